"""Triton kernels on the CPU: a file's cases run in a process of their own, where Triton is interpreted.

Triton is interpreted from its import on, and transformers imports it.
"""

from __future__ import annotations

import os
import subprocess
import sys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_cases(file: str) -> None:
    """Every function `case_*` of a file, as a test."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-o", "python_functions=case_*", file]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
