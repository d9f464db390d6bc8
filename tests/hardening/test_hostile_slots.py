"""Slots that no text makes, given to every kernel in a process of its own: no crash, and the bound holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("hostile_slots.py")


@pytest.mark.slow
@pytest.mark.parametrize("operations", ["compiled", "eager", "interpreted"])
def test_no_kernel_trusts_a_position(operations: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if operations == "interpreted" else {"MSRNN_OPS": operations}
    command = [sys.executable, str(SCRIPT), operations]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-1500:])
    assert len(done.stdout.splitlines()) == (50 if operations == "interpreted" else 450)
    assert done.stdout.count(": ran") > 40
