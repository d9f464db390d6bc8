"""Triton kernels on the CPU: a file's cases run in a process of their own, in Triton's interpreter.

Triton decides at its import whether it interprets, and transformers imports it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_cases(file: str) -> None:
    """Run every function `case_*` of a file as a test."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-o", "python_functions=case_*", file]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """Inside, memory that nobody has written holds NaN: whoever reads it shows."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
