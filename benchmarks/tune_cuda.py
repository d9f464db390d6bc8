"""How the constants of the pipelined prefill and of the step were chosen: other values of them, on a GPU.

    PYTHONPATH=src python benchmarks/tune_cuda.py scan step side wavefront --out results/tune.jsonl

Microseconds per token of a long prompt, per layer of a step, and of a whole step with and without a decision stream.
The parts that need a model run on a CPU, too: `--device cpu`, with a tiny one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from msrnn.bench import decode, measure, prefill, shapes
from msrnn.engine.engine import Engine, EngineOptions
from msrnn.kernels.triton import scan as triton_scan
from msrnn.kernels.triton import step as triton_step
from msrnn.policy import parse_policy
from msrnn.rnn import RNN

# chunk, lanes, laps, programs of a scan, rows per block, registers per thread (None: the code's own), compiled
PIPELINES: tuple[tuple[int, int, int, int, int, int | None, bool], ...] = (
    (256, 7, 4, 6, 16, None, False), (256, 7, 4, 9, 16, None, False), (384, 7, 4, 6, 16, None, False),
    (256, 10, 3, 5, 16, None, False), (256, 5, 5, 9, 16, None, False), (256, 7, 4, 6, 16, None, True),
    (384, 7, 4, 6, 16, None, True),
)  # fmt: skip
TINY = (16, 2, 2, 3, 16, None, False)
# elements of a tile, warps, registers per thread
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
    """Concurrent scans with so many programs, rows per block and registers."""
    plan, own_rows = triton_scan._plan, triton_scan._ROWS

    def changed(*shape: Any) -> dict[str, Any]:
        settings = plan(*shape)
        if shape[-1] == 1:  # not concurrent
            return settings
        return settings | {"programs": programs, "maxnreg": registers or settings["maxnreg"]}

    triton_scan._plan, triton_scan._ROWS = changed, rows
    yield
    triton_scan._plan, triton_scan._ROWS = plan, own_rows


def pipelines(log: Log, model: Any, small: bool) -> None:
    for chunk, lanes, laps, programs, rows, registers, compiled in PIPELINES if not small else (TINY,):
        whole = chunk * lanes * laps
        length = 16 + whole if small else 512 + whole * max(1, round(14336 / whole))
        with scans_of(programs, rows, registers):
            try:
                record = prefill.pipelined(
                    model, "tova:512" if not small else "tova:16", length, chunk=chunk, lanes=lanes, laps=laps, runs=3,
                    compiled=compiled,
                )  # fmt: skip
            except Exception as error:
                record = {"error": str(error)[:200], "median_s": 0.0}
        measure.clear(torch.device(model.device))
        settings = {"programs": programs, "rows": rows, "registers": registers}
        log.add(**settings | record | {"kind": "wavefront", "us_a_token": 1e6 * record["median_s"] / length})


def plain(log: Log, model: Any, small: bool) -> None:
    """Without a pipeline, by batch: up to which batch prompts are faster one by one in the pipeline."""
    for batch in (1, 2, 4) if not small else (1,):
        record = prefill.bounded(model, "tova:512" if not small else "tova:16", batch, 4096 if not small else 64,
                                 chunk=256, runs=2)  # fmt: skip
        log.add(**record | {"kind": "plain"})


@torch.no_grad()
def profiles(log: Log, model: Any, small: bool) -> None:
    """A chunk alone: device time by kernel."""
    from torch.profiler import ProfilerActivity

    size = 256 if not small else 16
    rnn = RNN(model, f"tova:{2 * size}", chunk=size)
    ids = prefill.prompt(model, 1, 3 * size)
    _, state = rnn.step(ids[:, : 2 * size], rnn.start())
    rnn.step(ids[:, 2 * size :], state.fork())
    with torch.profiler.profile(activities=[ProfilerActivity.CPU if small else ProfilerActivity.CUDA]) as profiler:
        rnn.step(ids[:, 2 * size :], state)
        if not small:
            torch.cuda.synchronize()
    time_of = (lambda e: e.self_cpu_time_total) if small else (lambda e: e.self_device_time_total)
    events = sorted(profiler.key_averages(), key=time_of, reverse=True)
    top = [{"kernel": e.key[:100], "us": round(time_of(e), 1), "count": e.count} for e in events[:25]]
    log.add(
        kind="profile", what="a chunk after a full state", tokens=size, total_us=sum(map(time_of, events)), kernels=top
    )


def scans(log: Log) -> None:
    """The scan with and without trying the nearest columns alone first."""
    from scan_cuda import CASES, PLAIN, chunk, timed

    for text, heads, kv_heads, held, rows in CASES[:2]:
        policy = parse_policy(text)
        for batch in (1, 32):
            for like in ("kept", "flat"):
                inputs = chunk(policy, batch, heads, kv_heads, rows, held, like=like)
                for close in (False, True):
                    triton_scan._CLOSE = close
                    times = timed(partial(triton_scan.scan, *inputs, policy, PLAIN))
                    per_token = {name: us / rows for name, us in times.items()}
                    log.add(kind="scan", policy=text, chunk=rows, batch=batch, like=like, close=close, **per_token)


def steps(log: Log) -> None:
    """The step of one layer, as a CUDA graph over three layers."""
    from step_cuda import captured, filled, random_token, step, timed

    cut = triton_step._cut
    for batch in (384, 48):
        policy, shape = parse_policy("tova:512"), (batch, 32, 32, 128)
        states = [filled(policy, shape, torch.bfloat16) for _ in range(3)]
        token = random_token(states[0], 32)
        for tile, warps, registers in STEPS:
            triton_step._MANY = (tile, warps, 1)
            cut.cache_clear()

            def changed(*shape: Any, registers: int | None = registers) -> dict[str, Any]:
                settings = cut(*shape)
                attend = {name: value for name, value in settings["attend"].items() if name != "maxnreg"}
                return settings | {"attend": attend | ({"maxnreg": registers} if registers else {})}

            triton_step._cut = changed
            for text in ("tova:512", "window:512") if registers is None or tile == 2048 else ("tova:512",):
                other = parse_policy(text)
                call = lambda other=other: [step(slots, token, other, 0.1) for slots in states]  # noqa: B023, E731
                times = {key: us / 3 for key, us in timed(captured(call)).items()}
                log.add(kind="step", batch=batch, policy=text, tile=tile, warps=warps, registers=registers, **times)
        states.clear()
        torch.cuda.empty_cache()
    triton_step._cut = cut


def decision_streams(log: Log, model: Any, small: bool) -> None:
    """A whole step with victims chosen on the model's stream, or on a decision stream (`beside` in the records)."""
    for batch in (1, 48, 384) if not small else (2,):
        for policy in ("tova:512", "window:512") if not small else ("tova:16",):
            for beside in (False, True):
                engine = Engine(model, policy, batch=batch, length=4096)
                if not beside:
                    engine._decisions = nullcontext()
                log.add(kind="side", policy=policy, batch=batch, beside=beside, **_time_step(engine))


def fused_projections(log: Log, model: Any, small: bool) -> None:
    """A whole step with separate or with fused QKV and gate/up projections (`joined` in the records)."""
    policy = "tova:512" if not small else "tova:16"
    for batch in (1, 48, 384) if not small else (2,):
        for fused in (False, True):
            engine = Engine(model, policy, batch=batch, options=EngineOptions(fused_projections=fused))
            log.add(kind="joined", policy=policy, batch=batch, joined=fused, **_time_step(engine))


def _time_step(engine: Engine) -> dict[str, Any]:
    decode.fill(engine, 4096)
    one_step = engine.capture().replay if engine.graphs else engine.step
    times = measure.timed(measure.seconds(one_step, engine.rnn.device, 5))
    measure.clear(engine.rnn.device)
    return times


def weights(log: Log) -> None:
    """The matmuls of QKV and of gate/up, separate and fused. Microseconds per layer."""
    from gpu import captured, timed

    layers, wide = 8, 4096  # more layers than the cache holds
    for name, parts in (("queries, keys, values", (4096,) * 3), ("gate, up", (11008,) * 2)):
        whole = torch.randn(layers, sum(parts), wide, dtype=torch.bfloat16, device="cuda")
        cut = [layer.split(parts) for layer in whole]
        for batch in (1, 48, 384):
            x = torch.randn(batch, wide, dtype=torch.bfloat16, device="cuda")
            separate = lambda: [linear(x, part) for layer in cut for part in layer]  # noqa: B023, E731
            fused = lambda: [linear(x, layer) for layer in whole]  # noqa: B023, E731
            calls = (("each", separate), ("joined", fused))
            times = {key: timed(captured(call))["us"] / layers for key, call in calls}
            log.add(kind="weights", what=name, batch=batch, **times, ratio=times["joined"] / times["each"])


ALONE = {"scan": scans, "step": steps, "weights": weights}
WITH_MODEL = {"wavefront": pipelines, "plain": plain, "profile": profiles, "side": decision_streams,
              "joined": fused_projections}  # fmt: skip


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
        start = time.monotonic()
        if part in ALONE:
            model = None
            measure.clear(torch.device(options.device))
            ALONE[part](log)
        else:
            shape = ("tiny", torch.float32) if small else ("llama-2-7b", torch.bfloat16)
            model = model or shapes.make(*shape, options.device)
            WITH_MODEL[part](log, model, small)
        print(f"-- {part} took {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
