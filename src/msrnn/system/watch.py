"""What a server leaves is removed when its parent ends, however that ends: processes, shared memory, files.

`python -m msrnn.system.watch FOLDER` reads a session's id from its standard input, then waits for the end of that
input. The parent's death closes it, SIGKILL included. It then ends the session's processes and removes FOLDER.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

_SHARED = Path("/dev/shm")
_NAMES = ("vllm_dist_", "vllm_offload_", "psm_", "sem.mp-", "torch_")  # users keep other things there, even models
_PATIENCE = 5.0  # seconds from SIGTERM to SIGKILL
_EVERY = 5.0  # seconds between two looks at the shared memory that is in use


def start_watcher(folder: str) -> subprocess.Popen[bytes]:
    """A watcher in a session of its own; write the watched session's id to its input, then leave the input open."""
    command = [sys.executable, "-m", __name__, folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    session = sys.stdin.readline().strip()
    if session:
        shared: set[Path] = set()
        while not select.select([sys.stdin], [], [], _EVERY)[0]:
            shared |= _shared_memory(int(session))
        shared |= _shared_memory(int(session))
        end_session(int(session))
        for path in shared:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def end_session(session: int, patience: float = _PATIENCE) -> None:
    """SIGTERM for all processes of a session, then SIGKILL for those that remain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in _members(session):
            with suppress(psutil.Error):  # it has just ended
                process.send_signal(number)
        end = time.monotonic() + patience
        while _members(session) and time.monotonic() < end:
            time.sleep(0.05)


def _members(session: int) -> list[psutil.Process]:
    """The session's living processes."""
    return [process for process in psutil.process_iter(["status"]) if _belongs(process, session)]


def _belongs(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE
    except OSError:  # it has just ended
        return False


def _shared_memory(session: int) -> set[Path]:
    """The session's files in /dev/shm, by what its processes have mapped."""
    paths: set[Path] = set()
    for process in _members(session):
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:  # it has just ended, or this is no Linux
            continue
        names = (line.partition(f"{_SHARED}/")[2] for line in lines)
        paths |= {_SHARED / name for name in names if name.startswith(_NAMES) and "/" not in name}
    return paths


if __name__ == "__main__":
    main(sys.argv[1])
