"""What the scripts that measure on a GPU share: records with their conditions, timing by events, poisoned memory."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton

from msrnn.system.provenance import command

RECORDS: list[dict[str, Any]] = []


def machine() -> dict[str, str]:
    return {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
        "command": command(),
    }


def record(kind: str, **fields: Any) -> None:
    RECORDS.append({"kind": kind, **fields})
    shown = (f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in fields.items())
    print(kind, *shown, flush=True)


def write(path: Path) -> None:
    path.write_text("".join(json.dumps(machine() | row) + "\n" for row in RECORDS))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def timed(call: Callable[[], object], repeats: int = 7, least_ms: float = 5.0) -> dict[str, float]:
    """Microseconds a call on the device: the median, and the spread over the repeats."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    times = max(1, int(least_ms / 1e3 / (time.perf_counter() - start)))
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / times)
    return {"us": statistics.median(found), "us_min": min(found), "us_max": max(found)}


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph."""
    torch.cuda.synchronize()  # the other stream would not wait for what the call works on
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    one, two = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * 2**30 / (timed(lambda: one.copy_(two))["us"] / 1e6)
