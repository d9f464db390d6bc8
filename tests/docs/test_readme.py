"""The README: short, its Python runs, its models are the tested ones, its numbers are those of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.records import close, load, numbers, passkey, perplexity, recall, same, served
from tests.hf.test_models import FAMILIES, HYBRIDS, REFUSED

README = pages.text("README.md")
PYTHON = pages.blocks("README.md", "python")
LOST = "What is lost, and what is gained"


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) >= 2
    assert len(pages.commands("README.md")) >= 5


@pytest.mark.slow
def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in PYTHON:
        exec(compile(block, "README.md", "exec"), names)
    assert "Once upon a time" in capsys.readouterr().out
    assert (tmp_path / "state.safetensors").exists()


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *REFUSED])
def test_model_families_are_named(family: str) -> None:
    section = README.split("## Models")[1].split("##")[0]
    assert family.removesuffix("_text").replace("_", "") in re.sub(r"[^a-z0-9,]", "", section.lower())


def test_quality() -> None:
    header, full, *rows, best = pages.tables("README.md", LOST)[0]
    assert len(header) == 6
    assert len(rows) == 5
    for label, *cells in [["full", *full[1:]], *rows]:
        *curve, key, fact = cells
        for slots, cell in zip((256, 512, 1024), curve, strict=True):
            same(cell, perplexity(label, slots))
        same(key, passkey(label, 512, "passkey", 2048))
        same(fact, recall(label, 512, 4))
    measured = [one for one in load("part/best_recall") if one["policy"] == "best:512"]
    passkeys = [one["value"] for one in measured if one["cell"].get("kind") == "passkey"]
    assert close(best[-2], sum(passkeys) / len(passkeys))
    (fact,) = (one for one in measured if one["samples"] == 40 and one["cell"] == {"turns": 4})
    same(best[-1], fact)


def test_ruler() -> None:
    pattern = r"answers ([\d.]+) % in 2,048 tokens and ([\d.]+) % in 4,096 "
    pattern += r"\(`tova:512` ([\d.]+) and ([\d.]+), full attention ([\d.]+) and ([\d.]+)\)"
    found = re.search(pattern, README)
    assert found is not None
    newest = {
        (one["policy"], one["cell"]["length"]): one["value"] for one in load("ruler") if one["cell"]["kind"] == "all"
    }
    cells = [(policy, length) for policy in ("best:512", "tova:512", "full") for length in (2048, 4096)]
    assert all(close(printed, newest[cell]) for printed, cell in zip(found.groups(), cells, strict=True))


def test_best() -> None:
    """The share of TOVA's gap that `best:512` closes, on books that took no part in choosing it."""
    printed = re.search(r"`best:512` closes (\d+) % of the\s+gap between `tova:512`", README)
    assert printed is not None
    values = {one["policy"]: one["value"] for one in load("best_heads") if one["metric"] == "perplexity"}
    best = next(value for policy, value in values.items() if policy.startswith("fade:920,kv=int8"))
    assert int(printed[1]) == round(100 * (values["tova:512"] - best) / (values["tova:512"] - values["full"]))


def test_speed() -> None:
    _, batch48, largest, _, *prefill = pages.tables("README.md", LOST)[1]
    bench = {(one["kind"], one["policy"], one.get("batch"), one.get("length")): one for one in load("bench_h200")}
    llama3 = {one["figure"]: one for one in load("gpu") if "figure" in one}
    assert close(batch48[1], bench["step", "tova:512", 48, None]["times_full"])
    assert close(batch48[2], llama3["llama-3-8b: tova:512, same batch"]["times_full"])
    for cell, bounded, full in (
        (largest[1], bench["largest", "tova:512", 480, None], bench["largest", "full", 56, None]),
        (largest[2], llama3["llama-3-8b: tova:512, largest"], llama3["llama-3-8b: full, largest"]),
    ):
        ratio, sequences, rest = re.findall(r"[\d,.]*\d", cell.split(";")[0])
        assert close(ratio, bounded["times_full"])
        assert (sequences, rest) == (f"{bounded['batch']:,}", f"{full['batch']:,}")
    for row, batch, length in zip(prefill, (32, 1, 1), (4096, 4096, 131072), strict=True):
        printed = re.findall(r"[\d.]+", row[1].split(" with")[0])
        assert close(printed[-1], 1 / bench["prefill", "tova:512", batch, length]["times_full"])
        if len(printed) > 1:  # without the option
            assert close(printed[0], 1 / llama3["flat prefill 4096 x 1: tova:512"]["times_full"])


def test_vllm() -> None:
    """The rows are those of docs/serving.md, slower ones too; there some name a commit."""
    header, *rows = pages.tables("README.md", LOST)[2]
    loads, rows_there = served("vllm_gpu"), pages.tables("docs/serving.md", "On a GPU")[0]
    there = {re.sub(r" \(\w{7}\)$", "", row[0]): row[1:4] for row in rows_there}
    assert header[1:] == ["stock", "`tova:512`", "ratio"]
    assert len(rows) == 5
    assert any(loads[label].ours > loads[label].stock for label, *_ in rows if label.startswith("first tokens"))
    for label, *cells in rows:
        one = loads[label]
        assert cells == there[label]
        for cell, value in zip(cells, (one.stock, one.ours, one.ours / one.stock), strict=True):
            assert close(numbers(cell)[0], value), label


def test_speed_of_8_bits() -> None:
    label, llama2, _ = pages.tables("README.md", LOST)[1][3]
    assert "`kv=int8`" in label
    formats = {one["policy"]: one for one in load("part/formats_h200") if one["kind"] == "largest"}
    ratio, batch = numbers(llama2)[:2]
    assert int(batch) == formats["tova:512,kv=int8"]["batch"]
    assert close(ratio, formats["tova:512,kv=int8"]["times_full"])


def test_speed_on_a_cpu() -> None:
    pattern = r"reads 8,192\s+tokens\s+([\d.]+) times and writes the tokens after them ([\d.]+) times"
    sentence = re.search(pattern, README)
    assert sentence is not None
    ratios = {(one["what"], one["run"], one.get("length")): one["ratio"] for one in load("cpu") if "ratio" in one}
    for printed, what in zip(sentence.groups(), ("prefill", "decode"), strict=True):
        assert close(printed, 1 / ratios[what, "tova:512", 8192])
