"""How much memory this process uses, and the peak over a block of code: CUDA's own count, or psutil's."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil
import torch


class Peak:
    """How far memory rose inside a `with` block, in `bytes`; the CPU's is sampled every `interval` seconds."""

    def __init__(self, device: torch.device | str = "cpu", interval: float = 0.005) -> None:
        self.device, self.interval, self.bytes = torch.device(device), interval, 0
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
            self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self._sample()

    def _sample(self) -> None:
        self.bytes = max(self.bytes, resident() - self._start)


def resident() -> int:
    """Bytes of this process in memory now, without pages of files where the system counts those (Linux).

    Memory-mapped weights are such pages: the kernel loads and drops them as it likes.
    """
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def physical() -> int:
    """Bytes of this machine's memory."""
    return int(psutil.virtual_memory().total)
