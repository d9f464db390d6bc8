"""How much memory this process uses and may use, and the peak over a block of code: CUDA's own count, or psutil's."""

from __future__ import annotations

import threading
from pathlib import Path
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


def usable() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit if that is less."""
    return min([physical(), *cgroup_limits()])


def cgroup_limits(system: Path = Path("/")) -> list[int]:
    """The limits of this process's control group (version 1 or 2) and of those that it is part of; Linux only."""
    folder, limits = system / "sys/fs/cgroup", []
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            limits += _limits(folder, path, "memory.max")
        elif "memory" in kinds.split(","):
            limits += _limits(folder / "memory", path, "memory.limit_in_bytes")
    return limits


def _limits(folder: Path, path: str, file: str) -> list[int]:
    """Inside a container the path may be the host's and lead nowhere: the container's own group is at `folder`."""
    own = folder / path.strip("/")
    groups = (group for group in (own, *own.parents) if group.is_relative_to(folder))
    texts = (_text(group / file).strip() for group in groups)
    return [int(text) for text in texts if text.isdigit()]  # "max": no limit


def _text(file: Path) -> str:
    """Nothing of a file that is not there or not ours to read."""
    try:
        return file.read_text()
    except OSError:
        return ""
