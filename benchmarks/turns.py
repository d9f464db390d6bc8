"""Engines that start at the same time and measure one after the other, also those of several scripts.

    export TURNS=/tmp/turns:4
    python benchmarks/vllm_gpu.py --together ... & python benchmarks/vllm_reuse.py --together ...

Starts take most of a GPU's time, and many cores: four engines start in little more time than one. None of them measures
before all have started, and never two at once.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 300  # seconds: an engine that never starts must not stop the others


@contextmanager
def own_turn() -> Iterator[None]:
    """Inside, no other engine measures. TURNS=FOLDER:COUNT names a new folder and how many engines there are."""
    if "TURNS" not in os.environ:
        yield
        return
    folder, _, count = os.environ["TURNS"].rpartition(":")
    _wait_for_all(Path(folder), int(count))
    with (Path(folder) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wait_for_all(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"started-{os.getpid()}").touch()
    end = time.monotonic() + PATIENCE
    while len(list(folder.glob("started-*"))) < count and time.monotonic() < end:
        time.sleep(0.1)
