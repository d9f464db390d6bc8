"""Compiled code without a place to keep it: a read-only installation, no home, a full disk, damaged files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import msrnn
from msrnn.kernels.numba import compile
from tests.hardening.test_faults import fill, small_disk  # noqa: F401 - a fixture
from tests.support import tiny_eval

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


# reads every file, as if all were readable to it, and writes nothing that it may not
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
NOBODY += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can become nobody")
def test_nobody_generates(installation: Path, tmp_path: Path) -> None:
    """The user of many containers: no home, nothing of the installation or the model can be written."""
    model = tiny_eval.save(tmp_path / "model")
    before = sorted(installation.rglob("*")), sorted(model.rglob("*"))
    command = [sys.executable, "-m", "msrnn", "generate", "the old captain " * 4, "--model", str(model)]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(installation)}
    done = subprocess.run(
        [*NOBODY, *command, "--policy", "tova:8", "--max-new-tokens", "5"],
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        timeout=500,
        cwd="/",
    )
    output = done.stderr.decode()
    assert done.returncode == 0, output[-2000:]
    assert done.stdout
    assert "8 held" in output
    assert output.count("compiled code cannot be kept") == 1
    assert "Traceback" not in output
    assert (sorted(installation.rglob("*")), sorted(model.rglob("*"))) == before


def plus_one(number: int) -> int:
    return number + 1


def plus_two(number: int) -> int:
    return number + 2


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("msrnn:")]


def test_a_full_disk_is_one_note(small_disk: Path, monkeypatch, capsys) -> None:  # noqa: F811
    """Numba writes its files at a function's first call; what was compiled is used all the same."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(small_disk))
    monkeypatch.setattr(compile, "_noted", False)
    one, two = (compile.jit(set())(function) for function in (plus_one, plus_two))
    fill(small_disk, 0)
    assert (one(2), two(2)) == (3, 4)
    (note,) = notes(capsys)
    assert "No space left on device" in note
    assert "set NUMBA_CACHE_DIR to a folder with room" in note
    assert not list(small_disk.rglob("*.nbc"))
    (small_disk / "filler").unlink()
    again = compile.jit(set())(plus_one)
    assert again(2) == 3
    assert len(list(small_disk.rglob("*.nbc"))) == 1
    assert not notes(capsys)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("size", [0, 5, 60])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, monkeypatch, capsys, suffix: str, size: int) -> None:
    """As a crash of the machine leaves it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compile.jit(set())(plus_one)(2) == 3
    (file,) = tmp_path.rglob(f"*.{suffix}")
    os.truncate(file, size)
    damaged = compile.jit(set())(plus_one)
    assert damaged(2) == 3
    assert sum(damaged.stats.cache_hits.values()) == 0
    mended = compile.jit(set())(plus_one)
    assert mended(2) == 3
    assert sum(mended.stats.cache_hits.values()) == 1
    assert not notes(capsys)


def test_a_callback_on_a_full_disk(small_disk: Path, tmp_path: Path, monkeypatch, capsys) -> None:  # noqa: F811
    """It is compiled as it is decorated: kept in our own folder if that has room."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(small_disk))
    monkeypatch.setattr(compile, "_noted", False)
    monkeypatch.setenv("MSRNN_CACHE", str(tmp_path / "own"))
    fill(small_disk, 0)
    assert compile.cfunc(numba.types.int64(numba.types.int64), plus_one).ctypes(2) == 3
    assert list((tmp_path / "own").rglob("*.nbc"))
    assert not notes(capsys)
    monkeypatch.setenv("MSRNN_CACHE", str(small_disk / "own"))
    assert compile.cfunc(numba.types.int64(numba.types.int64), plus_two).ctypes(2) == 4
    assert len(notes(capsys)) == 1
