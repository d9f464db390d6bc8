"""The script that fetches TinyLlama: parts are joined in order, checked and kept; errors are one line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The module, with a small file in place of the model and a cache of its own."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    monkeypatch.setenv("MSRNN_CACHE", str(tmp_path / "cache"))
    import tinyllama

    content = b"GGUF" + bytes(range(200))
    monkeypatch.setattr(tinyllama, "SIZE", len(content))
    monkeypatch.setattr(tinyllama, "SHA256", hashlib.sha256(content).hexdigest())
    (tmp_path / "parts").mkdir()
    for number in range(3):
        (tmp_path / "parts" / f"part.{number}").write_bytes(content[number * 80 : (number + 1) * 80])
    return tinyllama


def test_parts_are_joined_once(script, tmp_path: Path) -> None:
    path = script.gguf_file(tmp_path / "parts")
    assert path.read_bytes() == b"GGUF" + bytes(range(200))
    assert [one.name for one in path.parent.iterdir()] == [path.name]  # nothing is left beside it
    (tmp_path / "parts" / "part.0").unlink()
    assert script.gguf_file(tmp_path / "parts") == path


def test_a_wrong_part_is_refused_and_leaves_nothing(script, tmp_path: Path) -> None:
    (tmp_path / "parts" / "part.1").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="3 parts give sha256"):
        script.gguf_file(tmp_path / "parts")
    assert not list((tmp_path / "cache").iterdir())


def test_an_empty_folder_of_parts_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "experiments" / "tinyllama.py"), "--parts", str(tmp_path)]
    environment = {"MSRNN_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert (
        done.stderr.strip() == f"error: --parts {tmp_path} has no files; give a folder with the parts of the GGUF file"
    )
