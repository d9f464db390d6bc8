"""What the tests of experiments share: the scripts on the path, a tiny model in a folder, small books."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from msrnn.hf.load import bundled

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")


@pytest.fixture
def model(llama: Any, tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    llama(vocab_size=49152, initializer_range=0.1, num_hidden_layers=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled(progress=False)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def books(tmp_path: Path) -> Callable[[int], Path]:
    """A folder with four books of so many lines."""

    def write(lines: int) -> Path:
        (tmp_path / "pg19").mkdir()
        for number in range(4):
            text = (f"In year {i} of book {number} there were {i * i % (number + 5)} kings.\n" for i in range(lines))
            (tmp_path / "pg19" / f"{number}.txt").write_text("".join(text))
        return tmp_path

    return write
