"""What a running server has on this machine, to look for after its end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil


class Belongings:
    """The processes, folder and shared memory of `msrnn serve`."""

    def __init__(self, server: subprocess.Popen) -> None:
        self.processes = psutil.Process(server.pid).children(recursive=True)
        maps = "\n".join(Path(f"/proc/{process.pid}/maps").read_text() for process in self.processes)
        names = {line.partition("/dev/shm/")[2] for line in maps.splitlines() if "/dev/shm/" in line}
        self.shared = [Path("/dev/shm") / name for name in names if not name.endswith("(deleted)")]
        environments = [process.environ() for process in self.processes]
        self.folders = {Path(one["TMPDIR"]) for one in environments if "msrnn-serve-" in one.get("TMPDIR", "")}
        assert len(self.processes) >= 4, "the watcher, vLLM's server, its engine, and a resource tracker"
        assert self.shared
        assert len(self.folders) == 1

    @property
    def remaining(self) -> list[str]:
        processes = [process for process in self.processes if self._lives(process)]
        files = [path for path in [*self.shared, *self.folders] if path.exists()]
        return [*map(str, processes), *map(str, files)]

    @staticmethod
    def _lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def gone_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.remaining and time.monotonic() < end:
            time.sleep(0.2)
        return not self.remaining
