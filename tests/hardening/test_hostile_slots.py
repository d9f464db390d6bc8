"""Slots that no text makes, given to every kernel in a process of its own: no crash, and the bound holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("hostile_slots.py")


COUNTS = {"compiled": 567, "eager": 567, "interpreted": 81, "interpreted chunks": 7}


@pytest.mark.slow
@pytest.mark.parametrize("operations", COUNTS)
def test_no_kernel_trusts_a_position(operations: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    interpreted = operations.startswith("interpreted")
    environment |= {"TRITON_INTERPRET": "1", "MSRNN_OPS": "eager"} if interpreted else {"MSRNN_OPS": operations}
    command = [sys.executable, str(SCRIPT), operations]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-1500:])
    assert len(done.stdout.splitlines()) == COUNTS[operations]
    assert done.stdout.count(": ran") > min(40, COUNTS[operations] - 1)
