"""What a state costs before it is made, and what a run really took: bytes, and nothing else."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from ..core.slots import decides_by_age, slots, units
from ..policy import Plan
from .cache import Geometry

_POSITION = 8  # bytes of an int64
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Cost:
    """Bytes of keys, values and book-keeping for one sequence. `full` is an unbounded cache after `length` tokens."""

    state: int
    full: int
    slot: int
    length: int

    def largest_batch(self, available: int) -> tuple[int, int]:
        """How many sequences fit into so many bytes: bounded, and full."""
        return available // self.state, available // self.full


def cost(layers: Sequence[Geometry], plan: Plan, dtype: torch.dtype, length: int) -> Cost:
    """What one sequence of `length` tokens costs under `plan`."""
    wide = torch.promote_types(dtype, torch.float32).itemsize
    state = full = 0
    for layer, policy in zip(layers, plan.policies, strict=True):
        rows = min(length, layer.window or length)
        full += rows * layer.slot_bytes(dtype)
        room = slots(policy, layer.window)
        scored = policy.momentum > 0 and not decides_by_age(policy, layer.window)
        marks = units(policy, layer.heads, layer.kv_heads) * (_POSITION + (wide if scored else 0))
        state += (rows if room is None else room) * (layer.slot_bytes(dtype, policy.scope) + marks) + _POSITION
    return Cost(state, full, sum(layer.slot_bytes(dtype) for layer in layers), length)


def human(count: float) -> str:
    """Bytes as a person reads them: 23.6 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def parse_bytes(text: str) -> int:
    """`16GiB`, `500MB`, `1024` as a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", text.upper())
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write e.g. 16GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


class Peak:
    """How far memory rose inside a `with` block: CUDA's own count, or what this process has in memory of its own."""

    def __init__(self, device: torch.device | str = "cpu", every: float = 0.005) -> None:
        self.device, self.every, self.bytes = torch.device(device), every, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            self._start = resident()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._start
        else:
            self._stop.set()
            self._thread.join()
            self._look()

    def _watch(self) -> None:
        while not self._stop.wait(self.every):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, resident() - self._start)


def resident() -> int:
    """Bytes of this process in memory now (the peak so far, where there is no /proc).

    Pages of files do not count: weights that are mapped come and go as the system likes.
    """
    statm = Path("/proc/self/statm")
    if statm.exists():
        _, held, of_files, *_ = map(int, statm.read_text().split())
        return (held - of_files) * _page()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _page() -> int:
    import resource

    return resource.getpagesize()
