"""Compiled code without a place to keep it: a read-only installation, and no home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import msrnn

READ = """
import torch
from msrnn.core.attention import Attention
from msrnn.core.recurrence import read
from msrnn.core.slots import Slots
from msrnn.policy import parse_policy
import msrnn.kernels.numba.scan as scan
assert scan.__file__.startswith({folder!r}), scan.__file__
policy, rows = parse_policy("tova:4"), torch.randn(1, 2, 12, 8)
slots = Slots.empty(policy, rows, rows, 2)
read(slots, rows, rows, rows, policy, Attention(0.3))
read(slots, *[rows[:, :, :1]] * 3, policy, Attention(0.3))
print(int(slots.held))
"""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that nobody can write beside, not even root: where Numba's folder would be is a file."""
    folder = tmp_path_factory.mktemp("site")
    source = Path(msrnn.__file__).parent
    shutil.copytree(source, folder / "msrnn", ignore=shutil.ignore_patterns("__pycache__", "page", "profiles"))
    (folder / "msrnn" / "kernels" / "numba" / "__pycache__").write_text("")
    for path in (folder / "msrnn").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: text for name, text in os.environ.items() if name not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    own |= {"HOME": "/proc/nonexistent", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    own |= {"PYTHONDONTWRITEBYTECODE": "1", "MSRNN_CACHE": "/proc/nonexistent/msrnn"} | environment
    command = [sys.executable, "-c", READ.format(folder=str(folder))]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=500, cwd="/")


@pytest.mark.slow
def test_no_place_at_all_is_one_note(installation: Path) -> None:
    done = run(installation)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr[-2000:]
    notes = [line for line in done.stderr.splitlines() if line.startswith("msrnn:")]
    assert len(notes) == 1
    assert "set MSRNN_CACHE" in notes[0]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_our_own_cache_folder_comes_before_none(installation: Path, tmp_path: Path) -> None:
    done = run(installation, MSRNN_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr[-2000:]
    assert "msrnn:" not in done.stderr
    assert list((tmp_path / "numba").rglob("*.nbi"))
