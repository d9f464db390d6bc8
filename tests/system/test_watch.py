"""The watcher removes what a killed parent leaves, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from msrnn.system.watch import end_session, start_watcher

SHARED = Path("/dev/shm")
PARENT = """
import subprocess, sys, time
from msrnn.system.watch import start_watcher
watcher = start_watcher(sys.argv[1])
server = subprocess.Popen([sys.executable, "-c", sys.argv[2], *sys.argv[3:]], start_new_session=True, stdout=1)
watcher.stdin.write(b"%d\\n" % server.pid)
watcher.stdin.flush()
print(server.pid, watcher.pid, flush=True)
time.sleep(600)
"""
# a server that maps files of /dev/shm, has a child, and one that ignores SIGTERM
SERVER = """
import mmap, os, signal, subprocess, sys, time
files = [open(name, "r+b") for name in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 16) for file in files]
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
time.sleep(600)
"""


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ignores_sigterm(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


def wait_until(condition, seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(not SHARED.is_dir(), reason="no /dev/shm here")
def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    """Processes, also one that ignores SIGTERM, the folder and the server's shared memory; a mapped model stays."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "metrics.db").write_text("numbers")
    names = [SHARED / f"{name}-{os.getpid()}" for name in ("psm_test", "sem.mp-test", "model.safetensors", "psm_other")]
    for name in names:
        name.write_bytes(bytes(16))
    mapped = [str(name) for name in names[:3]]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), SERVER, *mapped], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        lines = sorted(parent.stdout.readline() for _ in range(2))  # the pids, and "up"
        server, watcher = map(int, lines[0].split())
        child = int(Path(f"/proc/{server}/task/{server}/children").read_text().split()[0])
        parent.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not any(map(lives, (server, child, watcher))))
        assert not folder.exists()
        assert [name.exists() for name in names] == [False, False, True, True]
    finally:
        parent.kill()
        parent.wait()
        for name in names:
            name.unlink(missing_ok=True)


def test_a_parent_that_starts_nothing_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    watcher = start_watcher(str(folder))
    assert watcher.stdin is not None
    assert wait_until(lambda: ignores_sigterm(watcher.pid))
    watcher.send_signal(signal.SIGTERM)  # as at a machine's shutdown: it has work to do
    watcher.stdin.close()
    assert watcher.wait(15) == 0
    assert not folder.exists()


def test_only_the_session_ends() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    inside, outside = (subprocess.Popen(command, start_new_session=True) for _ in range(2))
    try:
        end_session(inside.pid, 5.0)
        assert inside.wait(5) == -signal.SIGTERM
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()
