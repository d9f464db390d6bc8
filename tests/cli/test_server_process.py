"""`msrnn serve`'s child process: signals, exit codes, environment. A small server stands in for vLLM's, which
tests/in_vllm starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = """
import sys
from msrnn.cli import server_process
server_process._SERVER = "server"
sys.exit(server_process.run_server(["MODEL", *sys.argv[1:]], "tova:64", 0))
"""
# says its environment and its arguments, then ends as its first option says
SERVER = """
import json, os, signal, subprocess, sys, tempfile, time
heard = []
def hear(number, _):
    heard.append(number)
    if sys.argv[3] != "deaf":
        print(number, flush=True)
        sys.exit(7)
signal.signal(signal.SIGTERM, hear)
signal.signal(signal.SIGINT, hear)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
names = ("MSRNN_POLICY", "PROMETHEUS_MULTIPROC_DIR", "TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR")
said = {name: os.environ.get(name) for name in names} | {"pids": [os.getpid(), child.pid], "argv": sys.argv[1:]}
print(json.dumps(said), flush=True)
if sys.argv[3] == "end":
    sys.exit(3)
if sys.argv[3] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(1)
"""


@pytest.fixture
def start(tmp_path: Path):
    (tmp_path / "server.py").write_text(SERVER)
    processes = []

    def start(how: str, **environment: str) -> tuple[subprocess.Popen[str], dict]:
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, how],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | environment,
        )
        processes.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.wait()


def gone(said: dict, seconds: float = 20.0) -> bool:
    """Whether the server, its child and its folder are gone, now or soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        left = [pid for pid in said["pids"] if _lives(pid)]
        if not left and not os.path.exists(said["TMPDIR"]):
            return True
        time.sleep(0.05)
    return False


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_server_gets_a_folder_of_its_own(start, tmp_path: Path) -> None:
    process, said = start("end", TMPDIR=str(tmp_path), TORCHINDUCTOR_CACHE_DIR="")
    assert process.wait(30) == 3
    assert said["argv"] == ["--model", "MODEL", "end"]
    assert said["MSRNN_POLICY"] == "tova:64"
    assert said["PROMETHEUS_MULTIPROC_DIR"] == said["TMPDIR"]
    assert Path(said["TMPDIR"]).parent == tmp_path
    assert said["TORCHINDUCTOR_CACHE_DIR"] == "", "what the user has set stays"
    assert gone(said, 0.5), "it is gone when `msrnn serve` ends, a child of the server too"


def test_a_long_folder_is_not_used_for_sockets(start, tmp_path: Path) -> None:
    """The path of a Unix socket has at most 107 bytes."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    _, said = start("end", TMPDIR=str(long))
    assert said["VLLM_RPC_BASE_PATH"] == str(long)
    _, said = start("end", TMPDIR="/tmp")
    assert said["VLLM_RPC_BASE_PATH"] == said["TMPDIR"]
    assert said["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/torchinductor_")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(start, number: int) -> None:
    process, said = start("wait")
    process.send_signal(number)
    assert process.stdout.readline() == f"{int(number)}\n"
    assert process.wait(30) == 7
    assert gone(said, 0.5)


def test_a_server_that_does_not_end_is_ended(start) -> None:
    """As vLLM's with a client that stays connected."""
    process, said = start("deaf")
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 128 + signal.SIGTERM
    assert time.monotonic() - begin > 5
    assert gone(said, 0.5)


def test_a_killed_server_ends_it(start) -> None:
    process, said = start("kill")
    assert process.wait(30) == 128 + signal.SIGKILL
    assert gone(said, 0.5)


def test_killed_itself_it_leaves_nothing(start) -> None:
    process, said = start("deaf")
    process.kill()
    assert gone(said)
