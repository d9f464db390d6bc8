"""What the constants of the wavefront and of the step were chosen by: other values of them, on a GPU.

    PYTHONPATH=src python benchmarks/tune_cuda.py scan step side wavefront --out results/tune.jsonl

Microseconds a token of a long prompt, a layer of a step, and a whole step with and without deciding beside the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from msrnn.bench import decode, measure, prefill, shapes
from msrnn.kernels.triton import scan as gpu
from msrnn.kernels.triton import step as gpu_step

# chunk, lanes, laps, programs of a scan, rows per block, registers a thread (None: as the code has it), compiled
WAVES: tuple[tuple[int, int, int, int, int, int | None, bool], ...] = (
    (256, 7, 4, 6, 16, None, False), (256, 7, 4, 9, 16, None, False), (384, 7, 4, 6, 16, None, False),
    (256, 10, 3, 5, 16, None, False), (256, 5, 5, 9, 16, None, False), (256, 7, 4, 6, 16, None, True),
    (384, 7, 4, 6, 16, None, True),
)  # fmt: skip
TINY = (16, 2, 2, 3, 16, None, False)
# elements of a tile, warps, registers a thread
STEPS: tuple[tuple[int, int, int | None], ...] = (
    (2048, 2, 144), (1024, 1, None), (1024, 1, 128), (1024, 1, 168), (2048, 1, None), (1024, 2, None), (4096, 4, 144),
)  # fmt: skip


class Log:
    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.shared = path, measure.conditions(device)

    def add(self, **record: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(self.shared | record) + "\n")
        print(*(f"{name}={value:.5g}" if isinstance(value, float) else f"{name}={value}"
                for name, value in record.items() if name not in ("runs_s", "kernels")), flush=True)  # fmt: skip


@contextmanager
def scans_of(programs: int, rows: int, registers: int | None) -> Iterator[None]:
    """Scans beside each other are cut so."""
    plan, kept = gpu._plan, gpu._ROWS

    def changed(*cut: Any) -> dict[str, Any]:
        made = plan(*cut)
        if cut[-1] == 1:
            return made
        return made | {"programs": programs, "maxnreg": registers or made["maxnreg"]}

    gpu._plan, gpu._ROWS = changed, rows
    yield
    gpu._plan, gpu._ROWS = plan, kept


def wavefronts(log: Log, model: Any, small: bool) -> None:
    for chunk, lanes, laps, programs, rows, registers, compiled in WAVES if not small else (TINY,):
        whole = chunk * lanes * laps
        length = 16 + whole if small else 512 + whole * max(1, round(14336 / whole))
        with scans_of(programs, rows, registers):
            try:
                made = prefill.wavefront(
                    model, "tova:512" if not small else "tova:16", length, chunk=chunk, lanes=lanes, laps=laps, runs=3,
                    compiled=compiled,
                )  # fmt: skip
            except Exception as error:
                made = {"error": str(error)[:200], "median_s": 0.0}
        measure.clear(torch.device(model.device))
        how = {"programs": programs, "rows": rows, "registers": registers}
        log.add(**how | made | {"kind": "wavefront", "us_a_token": 1e6 * made["median_s"] / length})


def plain(log: Log, model: Any, small: bool) -> None:
    """Without the wavefront, by batch: up to which batch prompts are sooner read one by one."""
    for batch in (1, 2, 4) if not small else (1,):
        made = prefill.bounded(model, "tova:512" if not small else "tova:16", batch, 4096 if not small else 64,
                               chunk=256, runs=2)  # fmt: skip
        log.add(**made | {"kind": "plain"})


@torch.no_grad()
def profiles(log: Log, model: Any, small: bool) -> None:
    """A chunk by itself: where the device's time goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity

    size = 256 if not small else 16
    rnn = prefill.RNN(model, f"tova:{2 * size}", chunk=size)
    ids = prefill.prompt(model, 1, 3 * size)
    _, state = rnn.step(ids[:, : 2 * size], rnn.start())
    rnn.step(ids[:, 2 * size :], state.fork())
    with torch.profiler.profile(activities=[ProfilerActivity.CPU if small else ProfilerActivity.CUDA]) as seen:
        rnn.step(ids[:, 2 * size :], state)
        if not small:
            torch.cuda.synchronize()
    took = (lambda e: e.self_cpu_time_total) if small else (lambda e: e.self_device_time_total)
    events = sorted(seen.key_averages(), key=took, reverse=True)
    top = [{"kernel": e.key[:100], "us": round(took(e), 1), "count": e.count} for e in events[:25]]
    log.add(
        kind="profile", what="a chunk after a full state", tokens=size, total_us=sum(map(took, events)), kernels=top
    )


def scans(log: Log) -> None:
    """The scan with and without a second look at the nearest columns."""
    from scan_cuda import CASES, chunk, timed

    from msrnn.policy import parse

    for text, heads, kv_heads, held, rows in CASES[:2]:
        for batch in (1, 32):
            for like in ("kept", "flat"):
                inputs = chunk(parse(text), batch, heads, kv_heads, rows, held, like=like)
                for close in (False, True):
                    gpu._CLOSE = close
                    spent = timed(lambda: gpu.scan(*inputs, parse(text)))  # noqa: B023
                    per = {name: us / rows for name, us in spent.items()}
                    log.add(kind="scan", policy=text, chunk=rows, batch=batch, like=like, close=close, **per)


def steps(log: Log) -> None:
    """The step of one layer, as a CUDA graph over three layers' states."""
    from step_cuda import captured, filled, stepped, timed, token

    from msrnn.policy import parse

    cut = gpu_step._cut
    for batch in (384, 48):
        policy, shape = parse("tova:512"), (batch, 32, 32, 128)
        states = [filled(policy, shape, torch.bfloat16) for _ in range(3)]
        new = token(states[0][0], 32)
        for tile, warps, registers in STEPS:
            gpu_step._MANY = (tile, warps, 1)
            cut.cache_clear()

            def changed(*given: Any, registers: int | None = registers) -> dict[str, Any]:
                made = cut(*given)
                attend = {name: value for name, value in made["attend"].items() if name != "maxnreg"}
                return made | {"attend": attend | ({"maxnreg": registers} if registers else {})}

            gpu_step._cut = changed
            for text in ("tova:512", "window:512") if registers is None or tile == 2048 else ("tova:512",):
                blind = parse(text)
                call = lambda blind=blind: [stepped(*state, new, blind, 0.1) for state in states]  # noqa: B023, E731
                spent = {key: us / 3 for key, us in timed(captured(call)).items()}
                log.add(kind="step", batch=batch, policy=text, tile=tile, warps=warps, registers=registers, **spent)
        states.clear()
        torch.cuda.empty_cache()
    gpu_step._cut = cut


def sides(log: Log, model: Any, small: bool) -> None:
    """A whole step, victims chosen in line or beside the model."""
    for batch in (1, 48, 384) if not small else (2,):
        for policy in ("tova:512", "window:512") if not small else ("tova:16",):
            for beside in (False, True):
                engine = decode.Engine(model, policy, batch=batch, length=4096)
                if not beside:
                    engine._side = nullcontext()
                log.add(kind="side", policy=policy, batch=batch, beside=beside, **_step(engine))


def joins(log: Log, model: Any, small: bool) -> None:
    """A whole step, matmuls that share their input one by one or as one."""
    for batch in (1, 48, 384) if not small else (2,):
        for joined in (False, True):
            engine = decode.Engine(model, "tova:512" if not small else "tova:16", batch=batch, joined=joined)
            log.add(kind="joined", policy="tova:512", batch=batch, joined=joined, **_step(engine))


def _step(engine: decode.Engine) -> dict[str, Any]:
    """A step of an engine that nobody else needs."""
    decode.fill(engine, 4096)
    once = engine.capture().replay if engine.graphs else lambda: engine._step(False)
    found = measure.timed(measure.seconds(once, engine.rnn.device, 5))
    measure.clear(engine.rnn.device)
    return found


def weights(log: Log) -> None:
    """Matmuls that share their input, one by one and as one: queries, keys and values; gate and up. Microseconds."""
    from cuda import captured, timed

    layers, wide = 8, 4096  # more layers than the cache holds
    for name, parts in (("queries, keys, values", (4096,) * 3), ("gate, up", (11008,) * 2)):
        whole = torch.randn(layers, sum(parts), wide, dtype=torch.bfloat16, device="cuda")
        cut = [layer.split(parts) for layer in whole]
        for batch in (1, 48, 384):
            x = torch.randn(batch, wide, dtype=torch.bfloat16, device="cuda")
            each = lambda: [linear(x, part) for layer in cut for part in layer]  # noqa: B023, E731
            joined = lambda: [linear(x, layer) for layer in whole]  # noqa: B023, E731
            found = {how: timed(captured(call))["us"] / layers for how, call in (("each", each), ("joined", joined))}
            log.add(kind="weights", what=name, batch=batch, **found, ratio=found["joined"] / found["each"])


ALONE = {"scan": scans, "step": steps, "weights": weights}
WITH_MODEL = {"wavefront": wavefronts, "plain": plain, "profile": profiles, "side": sides, "joined": joins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*ALONE, *WITH_MODEL])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    small, model = options.device == "cpu", None
    log = Log(options.out, torch.device(options.device))
    for part in options.parts:
        began = time.monotonic()
        if part in ALONE:
            model = None
            measure.clear(torch.device(options.device))
            ALONE[part](log)
        else:
            made = ("tiny", torch.float32) if small else ("llama-2-7b", torch.bfloat16)
            model = model or shapes.make(*made, options.device)
            WITH_MODEL[part](log, model, small)
        print(f"-- {part} took {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
