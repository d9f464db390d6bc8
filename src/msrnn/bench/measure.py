"""Times, bandwidth and conditions: what every benchmark record consists of."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ..system.provenance import command, commit, machine, now, versions

Record = dict[str, Any]


def seconds(call: Callable[[], object], device: torch.device, runs: int = 5, least: float = 0.1) -> list[float]:
    """Seconds of a call, `runs` times; a short call is repeated until a run takes `least` seconds.

    With `least` at 0 there is no warm-up, and each run is one call.
    """
    if not least:
        return [_seconds_per_call(call, device, 1) for _ in range(runs)]
    call()
    once = _seconds_per_call(call, device, 1)
    times = max(1, int(least / max(once, 1e-6)))
    return [_seconds_per_call(call, device, times) for _ in range(runs)]


def _seconds_per_call(call: Callable[[], object], device: torch.device, times: int) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def timed(runs: list[float]) -> Record:
    """The median, and all runs behind it."""
    return {"median_s": median(runs), "runs_s": [round(run, 7) for run in runs]}


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written: the floor of a step is the bytes it must read over this."""
    size = 2**32 if device.type == "cuda" else 2**25
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / median(seconds(lambda: target.copy_(source), device))


def free_bytes(device: torch.device) -> int:
    """Bytes of free memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - _allocated(device)
    import os

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)


def clear(device: torch.device) -> None:
    """Free unreferenced memory for the next measurement."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def conditions(device: torch.device, **more: object) -> Record:
    """What every record of one run shares."""
    common = {"date": now(), "commit": commit(), "machine": machine(device), "cuda": torch.version.cuda}
    return {**common, "versions": versions(), "command": command(), **more}
