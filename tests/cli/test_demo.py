"""The demo end to end, on the bundled model and on a tiny one."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

import msrnn
from msrnn.cli import demo, demo_measure
from msrnn.hf.cost import cost
from msrnn.hf.geometry import geometry
from msrnn.hf.load import bundled
from msrnn.system.sizes import human

LENGTH, CAPACITY = 320, 48


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One short run; the numbers are those of --json."""
    folder, output = tmp_path_factory.mktemp("demo"), io.StringIO()
    policies = ["--policy", "full", "--policy", f"tova:{CAPACITY}", "--policy", f"tova:{LENGTH}"]
    options = [*policies, "--length", str(LENGTH), "--out", str(folder / "kept.png"), "--json"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(demo_measure, "ANSWER", 16)
        assert demo.main(options) == 0
    return json.loads(output.getvalue()), folder


@pytest.mark.slow
def test_the_table_is_true(demo_run: tuple[dict[str, Any], Path]) -> None:
    numbers, _ = demo_run
    full, bounded, roomy = numbers["rows"]
    layers = geometry(AutoConfig.from_pretrained(bundled(progress=False)))
    plan = msrnn.Plan((msrnn.tova(CAPACITY),) * len(layers))
    predicted = cost(layers, plan, torch.float32, LENGTH)
    assert numbers["model"] == "SmolLM2-135M-Instruct"
    assert [row["policy"] for row in numbers["rows"]] == ["full", "tova:48", "tova:320"]
    assert (full["read"], full["held"], full["bytes"]) == (LENGTH, LENGTH, predicted.full)
    assert (bounded["read"], bounded["held"], bounded["bytes"]) == (LENGTH, CAPACITY, predicted.state)
    assert 2 < full["perplexity"] < bounded["perplexity"] < 200
    assert roomy["perplexity"] == pytest.approx(full["perplexity"], rel=1e-4)
    assert all(row["seconds"] > 0 and row["peak"] >= 0 and len(row["answer"]) > 10 for row in numbers["rows"])
    assert roomy["answer"] == full["answer"]


@pytest.mark.slow
def test_the_picture_shows_something(demo_run: tuple[dict[str, Any], Path]) -> None:
    numbers, folder = demo_run
    picture = folder / "kept.png"
    assert numbers["picture"] == str(picture)
    assert 10_000 < picture.stat().st_size < 500_000
    pixels = np.asarray(Image.open(picture).convert("L"))
    assert min(pixels.shape) > 600
    assert pixels.std() > 20
    assert [file.name for file in folder.iterdir()] == ["kept.png"]


@pytest.fixture
def small(llama: Any, monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """A tiny model with the bundled tokenizer in place of the bundled model."""
    tokenizer = AutoTokenizer.from_pretrained(bundled(progress=False))
    model = llama(vocab_size=49152)
    monkeypatch.setattr(demo, "load", lambda name, device: (model, tokenizer))
    return model


@pytest.mark.usefixtures("small", "one_thread")
def test_what_a_person_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kept.png"
    assert demo.main(["--length", "600", "--policy", "full", "--policy", "tova:64", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    for words in (
        "llama reads 600 tokens of Python's own documentation",
        "full     keeps every token: 225.0 KiB at the end, and growing",
        "tova:64  keeps 64 tokens in every layer: 25.9 KiB, whatever the length",
        "policy   tokens read  tokens held   KV bytes  peak memory  tokens/s  perplexity",
        "full             600          600  225.0 KiB",
        "tova:64          600           64   25.9 KiB",
        "Then asked: According to the text",
        "of the first 300 tokens",
        f"The picture: {out}",
        "Next: msrnn chat, msrnn generate",
        '--question "According to the text, what is an exception?"',
    ):
        assert words in output
    assert out.exists()


@pytest.mark.usefixtures("small", "one_thread")
def test_a_text_and_a_question_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.txt"
    own.write_text("One two three. " * 50)
    options = ["--text", str(own), "--policy", "tova:1/4", "--question", "How many?", "--out", str(tmp_path / "a.png")]
    assert demo.main([*options, "--length", "80"]) == 0
    output = capsys.readouterr().out
    assert f"80 tokens of {own}" in output
    assert "keeps 20 tokens in every layer" in output
    assert "Then asked: How many?" in output


@pytest.mark.usefixtures("one_thread")
def test_a_profile_stands_beside_the_plain_policy(
    small: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"capacities": [4, 40, 16], "average": 20}))
    policies = ["--policy", "tova:20", "--policy", f"tova:20,profile={file}"]
    assert demo.main(["--length", "64", *policies, "--out", str(tmp_path / "a.png")]) == 0
    output = capsys.readouterr().out
    assert "tova:20            keeps 20 tokens in every layer: " in output
    assert "tova:20 + profile  keeps 4 to 40 tokens in a layer, 20 on average: " in output
    rows = [line.split() for line in output.splitlines() if line.startswith("tova:20") and "keeps" not in line]
    assert [row[-9:-6] for row in rows] == [["tova:20", "64", "20"], ["profile", "64", "20"]]
    assert rows[0][3:5] == rows[1][5:7]  # the same bytes
    assert rows[0][-1] != rows[1][-1]  # but another perplexity
    file.write_text(json.dumps({"capacities": [4, 40, 16], "model": {"name": "other", "layers": 9}}))
    assert demo.main(["--length", "64", *policies, "--out", str(tmp_path / "a.png")]) == 2
    assert "was made for another model, other" in capsys.readouterr().err


@pytest.mark.usefixtures("small", "one_thread")
def test_best_keeps_more_in_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["--policy", "tova:16", "--policy", "best:16"]
    assert demo.main(["--length", "64", *policies, "--json", "--out", str(tmp_path / "a.png")]) == 0
    plain, best = json.loads(capsys.readouterr().out)["rows"]
    assert (plain["policy"], best["policy"]) == ("tova:16", "best:16")
    assert best["held"] > 1.5 * plain["held"]
    assert best["bytes"] <= plain["bytes"]


@pytest.mark.usefixtures("small", "one_thread")
def test_without_matplotlib_there_is_all_but_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main(["--length", "64", "--policy", "tova:16", "--out", str(tmp_path / "a.png")]) == 0
    expected = 'No picture: matplotlib is not installed here; for one, pip install ".[plot]" in a clone of msrnn.'
    assert expected in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "options, reason",
    [
        (["--out", "missing/a.png"], "--out missing/a.png: there is no folder missing; make it first"),
        (["--out", "a.txt"], "--out a.txt is no picture; give a name that ends in .png, .svg, .pdf, .jpg"),
        (["--policy", "tovo:8"], "did you mean 'tova:8'"),
        (["--length", "20"], "0 tokens of text"),
        (["--text", "nothing.txt"], "there is no file nothing.txt; check --text"),
    ],
)
def test_mistakes_are_told_in_one_line(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(options) == 2
    output = capsys.readouterr().err.strip().splitlines()[-1]
    assert output.startswith("msrnn demo: ")
    assert reason in output


def test_it_runs_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "msrnn.cli.demo", "--help"], capture_output=True, text=True, check=True)
    assert "--policy" in run.stdout


def test_the_text_is_long_and_plain() -> None:
    (text,) = demo.text_blocks()
    assert len(text) > 12_000
    assert "***" not in text


def test_the_table_is_aligned() -> None:
    rows = [
        demo_measure.Row("full", 4096, 4096, 10, 20, 2.0, 10.0, ""),
        demo_measure.Row("tova:256", 4096, 256, 1, 2, 0.5, 11.25, ""),
    ]
    lines = demo.table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["tova:256", "4,096", "256", "1", "B", "2", "B", "8,192", "11.25"]
    assert human(10) in lines[1]
