"""vLLM's server as a child process that leaves nothing behind: its signals, temporary files and end."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import tempfile
from types import FrameType

from ..system.watch import start_watcher

_SERVER = "vllm.entrypoints.openai.api_server"
_SECONDS = 5  # for an end by itself, after a signal
_SOCKET = 107 - 37  # the longest folder of a Unix socket that vLLM names by a UUID


class _Overdue(Exception):
    """The server was told to end and has not."""


def run_server(command: list[str], policy: str, shutdown: int = 0) -> int:
    """Run vLLM's server on a model and its options until it ends; its exit code. Signals are passed on.

    A watcher ends its processes and removes its files even if this process is killed. `shutdown`: the seconds that
    vLLM gives requests under way after SIGTERM.
    """
    folder = tempfile.mkdtemp(prefix="msrnn-serve-")
    watcher = start_watcher(folder)
    assert watcher.stdin is not None
    try:
        server = subprocess.Popen(
            [sys.executable, "-m", _SERVER, "--model", *command],
            env=_environment(folder, policy),
            start_new_session=True,
        )
        watcher.stdin.write(b"%d\n" % server.pid)
        watcher.stdin.flush()
        code = _wait(server, shutdown + _SECONDS)
    finally:
        watcher.stdin.close()
        watcher.wait()
    return code if code >= 0 else 128 - code


def _wait(server: subprocess.Popen[bytes], seconds: int) -> int:
    """The server's exit code. vLLM waits without end for clients that stay connected, so an alarm follows a signal."""

    def forward_signal(number: int, _: FrameType | None) -> None:
        server.send_signal(number)
        signal.alarm(seconds)

    def give_up(number: int, _: FrameType | None) -> None:
        raise _Overdue

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward_signal)
    signal.signal(signal.SIGALRM, give_up)
    try:
        return server.wait()
    except _Overdue:
        return -signal.SIGTERM


def _environment(folder: str, policy: str) -> dict[str, str]:
    """The policy, and a folder for all that vLLM leaves in /tmp: metrics, sockets, rendezvous files."""
    from ..vllm import POLICY

    usual = tempfile.gettempdir()
    # compiled code is worth keeping from start to start
    compiled = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(usual, f"torchinductor_{_user()}")}
    sockets = {"VLLM_RPC_BASE_PATH": folder if len(os.fsencode(folder)) <= _SOCKET else usual}
    own = {POLICY: policy, "PROMETHEUS_MULTIPROC_DIR": folder, "TMPDIR": folder}
    return compiled | sockets | os.environ | own


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return str(os.getuid())
