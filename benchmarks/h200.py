"""The speed figures of a GPU, most important first, each written as soon as it is measured.

    PYTHONPATH=src python benchmarks/h200.py --out results/gpu.jsonl --minutes 5 decode prefill

On a CPU: `--device cpu`, with a tiny model. What is left when the minutes are over is skipped and named.
"""

# ruff: noqa: B023 (each lambda is called before its loop goes on)
from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from msrnn.bench import decode, gate, measure, prefill, shapes
from msrnn.engine.engine import Engine, EngineOptions
from msrnn.rnn import RNN

Record = dict[str, Any]


class Session:
    """A model at a time, the clock, and the file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.end = time.monotonic() + 60 * options.minutes
        self.small = options.device == "cpu"
        self.k, self.context = (16, 64) if self.small else (512, 4096)
        self.policy = f"tova:{self.k}"
        self.speed = measure.bandwidth(self.device)
        earlier = options.gate and options.gate.exists() and options.gate.read_text()
        self.shape, self.model, self.gate = "", None, earlier or "not run in this process"
        self.records: dict[str, Record] = {}  # that later figures refer to
        print(f"copy {self.speed / 1e12:.2f} TB/s", flush=True)

    def load(self, shape: str, **changes: float) -> None:
        self.model = None
        measure.clear(self.device)
        dtype = torch.float32 if self.small else torch.bfloat16
        self.shape = "tiny" if self.small else shape
        self.model = shapes.make(self.shape, dtype, self.options.device, **changes)
        self.dtype = str(dtype)[6:]

    def figure(self, name: str, measurement: Callable[[], Record | None], **more: Any) -> Record | None:
        """Measure, write, print; an error costs one figure, not the rest. A record in `more` becomes a ratio to it."""
        if time.monotonic() > self.end:
            print(f"-- no time left for {name}", flush=True)
            return None
        start = time.monotonic()
        try:
            result = measurement()
        except Exception as error:
            traceback.print_exc(limit=-3)
            result = {"error": str(error)[:300]}
        measure.clear(self.device)
        if result is None:
            result = {"out_of_memory": True}
        more = {key: _ratio(key, result, other) for key, other in more.items()}
        shared = measure.conditions(self.device, shape=self.shape, dtype=self.dtype, weights="random")
        shared |= {"commit": self.options.commit} if self.options.commit else {}
        record = shared | {"copy_bytes_per_s": self.speed, "gate": self.gate, "figure": name} | result | more
        with self.options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        _show(record, time.monotonic() - start)
        return result if "median_s" in result else None


def _ratio(key: str, result: Record, other: Any) -> Any:
    """Times of a step relative to another record; throughputs for `times_full`. Anything but a record stays."""
    if other is not None and not isinstance(other, dict):
        return other
    if not other or "median_s" not in other or "median_s" not in result:
        return None
    if key == "times_full" and "tokens_per_s" in result and result.get("kind") != "prefill":
        return result["tokens_per_s"] / other["tokens_per_s"]
    return result["median_s"] / other["median_s"]


def _show(record: Record, spent: float) -> None:
    parts = [f"{record['figure']:<44}"]
    if "median_s" in record:
        parts.append(f"{1e3 * record['median_s']:9.3f} ms {record['tokens_per_s']:10,.0f} tok/s b{record['batch']:<4}")
    for name in ("times_full", "times_plain", "times_floor", "eviction", "times_faster"):
        if isinstance(record.get(name), float):
            parts.append(f"{name} {record[name]:.3f}")
    detail = ("all_readings", "all_ways", "attention_s", "error")
    parts += [str(record[name])[:160] for name in detail if name in record]
    if "peak_bytes" in record:
        parts.append(f"peak {record['peak_bytes'] / 2**30:.2f} GiB")
    if record.get("out_of_memory"):
        parts.append("out of memory")
    print(" ".join(parts), f"[{spent:.1f} s]", flush=True)


def check(s: Session) -> None:
    try:
        policies = ("tova:16", "h2o:16,gain=value_norm", "tova:16,kv=int8", "h2o:16,kv=k8v4")
        s.gate = f"{gate.check(s.device, policies)} checks passed"
    except gate.GateFailed as error:  # noted in every record: none of them counts before this is fixed
        s.gate = f"FAILED: {error}"
    if s.options.gate:
        s.options.gate.write_text(s.gate)
    print("gate:", s.gate, flush=True)


def compiling(s: Session) -> None:
    """Whether torch.compile pays; the rest of this run uses what is faster."""
    s.load("llama-2-7b")
    settings = {"runs": 5, "bytes_per_second": s.speed}
    for batch in (48, 1) if not s.small else (2,):
        plain = s.figure(
            f"compile: plain, batch {batch}", lambda: decode.step(s.model, s.policy, batch, s.context, **settings)
        )
        fused = s.figure(
            f"compile: fused, batch {batch}",
            lambda: decode.step(s.model, s.policy, batch, s.context, compiled=True, **settings),
            times_full=plain,
        )
        if batch != 1:
            s.options.compiled = bool(plain and fused and fused["median_s"] < plain["median_s"])
    print("compiled:", s.options.compiled, flush=True)


def decoding(s: Session, shape: str) -> None:
    s.load(shape)
    settings = {"runs": s.options.runs, "compiled": s.options.compiled, "bytes_per_second": s.speed}
    same = 48 if not s.small else 3
    full = s.figure(f"{shape}: full, same batch", lambda: decode.full_step(s.model, same, s.context, **settings))
    s.figure(
        f"{shape}: {s.policy}, same batch",
        lambda: decode.step(s.model, s.policy, same, s.context, **settings),
        times_full=full,
    )
    most = s.figure(f"{shape}: full, largest", lambda: decode.largest_full(s.model, s.context, full, **settings))
    s.figure(
        f"{shape}: {s.policy}, largest",
        lambda: decode.largest(s.model, s.policy, s.context, **settings),
        times_full=most,
    )


def overhead(s: Session) -> None:
    """A step with eviction against the same engine with as many slots and no eviction."""
    settings = {"runs": s.options.runs, "compiled": s.options.compiled, "bytes_per_second": s.speed}
    for batch in (1, 48, 384) if not s.small else (1, 3):
        none = s.figure(
            f"no eviction, {s.k} slots, batch {batch}", lambda: decode.full_step(s.model, batch, s.k + 1, **settings)
        )
        step = s.figure(
            f"{s.policy}, batch {batch}",
            lambda: decode.step(s.model, s.policy, batch, s.context, **settings),
            eviction=none,
        )
        s.records[f"step {batch}"] = step or {}


def formats(s: Session) -> None:
    """Slots of 16, 8 and 4 bits: steps and the largest batch."""
    settings = {"runs": s.options.runs, "compiled": s.options.compiled, "bytes_per_second": s.speed}
    steps(s, _formats(s), (384, 1, 48))
    full = s.figure("full, largest", lambda: decode.largest_full(s.model, s.context, None, **settings))
    for policy in _formats(s):
        s.figure(f"{policy}, largest", lambda: decode.largest(s.model, policy, s.context, **settings), times_full=full)


def _formats(s: Session) -> tuple[str, ...]:
    return s.policy, f"{s.policy},kv=int8", f"{s.policy},kv=k8v4"


def best(s: Session) -> None:
    """What the recommended policy costs beside TOVA, in as many bytes; random weights have no profile."""
    policies = s.policy, f"best:{s.k}"
    steps(s, policies, (384, 48, 1))
    prefills(s, policies, (32, 1))


def residual(s: Session) -> None:
    """What the residual of `blend` costs."""
    policies = f"fade:{s.k}", f"blend:{s.k}"
    steps(s, policies, (384, 48, 1))
    prefills(s, policies, (32, 1))


def steps(s: Session, policies: tuple[str, ...], batches: tuple[int, ...]) -> None:
    """Decoding steps of policies, against the first of them."""
    settings = {"runs": s.options.runs, "compiled": s.options.compiled, "bytes_per_second": s.speed}
    for batch in batches if not s.small else (2,):
        plain = None
        for policy in policies:
            step = s.figure(
                f"{policy}, batch {batch}", lambda: decode.step(s.model, policy, batch, s.context, **settings),
                times_plain=plain,
            )  # fmt: skip
            plain = plain or step


def prefills(s: Session, policies: tuple[str, ...], batches: tuple[int, ...]) -> None:
    """Prompts under policies, against the first of them."""
    settings = {"chunk": 256 if not s.small else 16, "runs": min(3, s.options.runs)}
    for batch in batches if not s.small else (2,):
        plain = None
        for policy in policies:
            read = s.figure(
                f"prefill {s.context} x {batch}: {policy}",
                lambda: prefill.bounded(s.model, policy, batch, s.context, **settings),
                times_plain=plain,
            )
            plain = plain or read


def latency(s: Session, shape: str = "") -> None:
    if shape:
        s.load(shape)
    settings = {"runs": s.options.runs, "compiled": s.options.compiled, "bytes_per_second": s.speed}
    for context in (1024, 2048, 4096, 16384, 65536, 131072) if not s.small else (32, 64):
        full = s.figure(f"full, batch 1, context {context}", lambda: decode.full_step(s.model, 1, context, **settings))
        s.figure(
            f"{s.policy}, batch 1, context {context}",
            lambda: decode.step(s.model, s.policy, 1, context, **settings),
            times_full=full,
        )


def prompts(s: Session, steady: bool) -> None:
    """Each prompt under full attention (whose cost no weights change), pipelined at batch 1, and in plain chunks."""
    s.load("llama-2-7b", **({"attention_bias": True} if steady else {}))
    what: dict[str, Any] = {"attention": "steady (query biases)" if steady else "flat (plain random weights)"}
    if steady:
        shapes.steady(s.model)
    tag, compiled = "steady" if steady else "flat", s.options.compiled
    long, many = (65536, 32) if not s.small else (256, 2)
    for length, batch, runs in ((s.context, 1, 5), (long, 1, 3), (s.context, many, 3)):
        name, full = f"{tag} prefill {length} x {batch}", s.records.get(f"full {length} {batch}")
        if full is None:
            full = s.figure(f"{name}: full", lambda: _full_prompt(s, batch, length, runs), **what)
            s.records[f"full {length} {batch}"] = full or {}
        if batch == 1:
            settings = {"runs": runs, "compiled": compiled} | ({"chunk": 16, "lanes": 2} if s.small else {})
            pipelined = s.figure(
                f"{name}: {s.policy}, pipelined", lambda: prefill.pipelined(s.model, s.policy, length, **settings),
                times_full=full, **what,
            )  # fmt: skip
            _against_stepping(s, pipelined, what)
        if length != long and not (steady and batch == 1):
            settings = {"chunk": 256 if not s.small else 16, "runs": runs}
            s.figure(
                f"{name}: {s.policy}", lambda: prefill.bounded(s.model, s.policy, batch, length, **settings),
                times_full=full, **what,
            )  # fmt: skip


def _full_prompt(s: Session, batch: int, length: int, runs: int) -> Record | None:
    """The faster of flash and cuDNN, as the model is and with torch.compile between its matmuls."""
    plain = prefill.fastest_full(s.model, batch, length, runs=runs)
    if plain is None or not s.options.compiled or batch > 1:
        return plain
    compiled = prefill.full(s.model, batch, length, backend=plain["backend"], runs=runs, compiled=True)
    times = {"plain": plain["median_s"], "compiled": compiled["median_s"]}
    return min((plain, compiled), key=lambda record: float(record["median_s"])) | {"all_ways": times}


def _against_stepping(s: Session, pipelined: Record | None, what: Record) -> None:
    """Pipelined prefill against as many decoding steps as the prompt has tokens."""
    step = s.records.get("step 1") or _earlier(s.options.out, f"{s.policy}, batch 1")
    if pipelined is None or not step or pipelined["length"] != s.context:
        return
    length, seconds = pipelined["length"], pipelined["median_s"]
    stepping = step["median_s"] * length
    derived = {"stepping_s": stepping, "wavefront_s": seconds, "times_faster": stepping / seconds}
    derived["derived"] = f"{length} x the median step at batch 1, over the pipelined prefill's median"
    s.figure(f"stepping {length} tokens through graphs against pipelined prefill", lambda: derived, **what)


def _earlier(path: Path, figure: str) -> Record | None:
    """A figure that another process wrote to the same file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return next((record for record in map(json.loads, reversed(lines)) if record.get("figure") == figure), None)


def memory(s: Session) -> None:
    """How far memory rises above weights and graphs; a first prompt captures the graphs."""
    for length in (4096, 65536, 131072) if not s.small else (64, 256):
        settings = {"chunk": 16, "lanes": 2} if s.small else {}
        s.figure(
            f"peak memory, prefill {length} x 1: {s.policy}, pipelined",
            lambda: prefill.pipelined(s.model, s.policy, length, runs=1, **settings),
        )


def transformers_generate(s: Session) -> None:
    batch = 48 if not s.small else 2
    s.figure(
        "transformers generate, same batch", lambda: decode.generate_speed(s.model, batch, s.context, new=4, runs=1)
    )


def profile(s: Session) -> None:
    """Device time of a step and of a prompt, by kernel."""
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU if s.small else ProfilerActivity.CUDA]
    calls = {}
    for batch in (1, 48) if not s.small else (2,):
        settings = EngineOptions(cuda_graphs=False, compile=s.options.compiled)
        engine = Engine(s.model, s.policy, batch=batch, options=settings)
        decode.fill(engine, s.context)
        calls[f"step, batch {batch}"] = engine.step
    rnn = RNN(s.model, s.policy)
    for batch in (1, 32) if not s.small else (2,):
        ids = prefill.prompt(s.model, batch, 2 * s.k)
        calls[f"prompt of {2 * s.k}, batch {batch}"] = lambda ids=ids: rnn.step(ids, rnn.start())
    for name, call in calls.items():
        with torch.no_grad():
            call()
            with torch.profiler.profile(activities=kinds) as profiler:
                call()
                if not s.small:
                    torch.cuda.synchronize()
        time_of = (lambda e: e.self_cpu_time_total) if s.small else (lambda e: e.self_device_time_total)
        events = sorted(profiler.key_averages(), key=time_of, reverse=True)
        total = sum(time_of(e) for e in events)
        top = [{"kernel": e.key[:90], "us": round(time_of(e)), "count": e.count} for e in events[:20]]
        record = {"figure": f"profile: {name}", "total_us": total, "kernels": top, "shape": s.shape}
        with s.options.out.open("a") as file:
            file.write(json.dumps(measure.conditions(s.device) | record) + "\n")
        print(f"profile: {name}: {total / 1e3:.2f} ms")
        for kernel in top[:12]:
            print(f"   {kernel['us']:8} us x{kernel['count']:<5} {kernel['kernel'][:70]}", flush=True)


PARTS: dict[str, Callable[[Session], None]] = {
    "gate": check,
    "compile": compiling,
    "decode": lambda s: decoding(s, "llama-2-7b"),
    "overhead": overhead,
    "formats": formats,
    "formats_prefill": lambda s: prefills(s, _formats(s), (32, 1)),
    "best": best,
    "residual": residual,
    "latency": latency,
    "latency3": lambda s: latency(s, "llama-3-8b"),
    "prefill": lambda s: prompts(s, False),
    "steady": lambda s: prompts(s, True),
    "memory": memory,
    "decode3": lambda s: decoding(s, "llama-3-8b"),
    "generate": transformers_generate,
    "profile": profile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="where the machine has no git")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--gate", type=Path, help="file in which the part `gate` leaves its result for later processes")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    session = Session(options)
    for part in options.parts:
        start = time.monotonic()
        if session.model is None and part not in ("gate", "compile", "decode", "latency3"):
            session.load("llama-2-7b")
        PARTS[part](session)
        print(f"-- {part} took {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
