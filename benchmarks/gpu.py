"""What the scripts that measure kernels on a GPU share: records with their conditions, timing, NaN-filled memory.

Without a GPU the checks run on small shapes with `TRITON_INTERPRET=1`; times mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton

from msrnn.system import provenance

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    sys.exit("there is no GPU here; set TRITON_INTERPRET=1 to run the checks on the CPU, on small shapes")
RECORDS: list[dict[str, Any]] = []


def conditions() -> dict[str, str]:
    return {
        "machine": torch.cuda.get_device_name() if ON_GPU else provenance.machine(DEVICE),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
        "command": provenance.command(),
    }


def record(kind: str, **fields: Any) -> None:
    RECORDS.append({"kind": kind, **fields})
    shown = (f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in fields.items())
    print(kind, *shown, flush=True)


def write(path: Path) -> None:
    path.write_text("".join(json.dumps(conditions() | row) + "\n" for row in RECORDS))


def run_parts(parts: Mapping[str, Callable[..., None]], about: str | None) -> None:
    """What a script of several parts does: those named on the command line, with records after each."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(parts))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shard", default="0/1", help="which share of the checks to run, e.g. 3/8")
    options = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**32)
    for part in options.parts:
        start = time.perf_counter()
        parts[part](*map(int, options.shard.split("/"))) if part == "check" else parts[part]()
        print(f"-- {part} took {time.perf_counter() - start:.0f} s", flush=True)
        if options.out:
            write(options.out)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def timed(call: Callable[[], object], repeats: int = 7, least_ms: float = 5.0) -> dict[str, float]:
    """Microseconds per call on the device: the median, and the spread over the repeats."""
    for _ in range(2):
        call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    count = max(1, int(least_ms / 1e3 / (time.perf_counter() - start)))
    times = [_microseconds(call, count) for _ in range(repeats)]
    return {"us": statistics.median(times), "us_min": min(times), "us_max": max(times)}


def _microseconds(call: Callable[[], object], count: int) -> float:
    if not ON_GPU:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e6 / count
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph; without a GPU, the call itself, after the one warm-up that a capture needs."""
    if not ON_GPU:
        call()
        return call
    torch.cuda.synchronize()  # the other stream would not wait for what the call works on
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    size = 2**30 if ON_GPU else 2**24
    source, target = (torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return 2 * size / (timed(lambda: target.copy_(source))["us"] / 1e6)
