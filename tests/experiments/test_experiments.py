"""The experiments beyond the paper, on a tiny model: a fair split, a search that finds what is there, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msrnn.eval.record import read_records, write_records
from tests.support.records import record

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(tmp_path: Path, books: Callable[[int], Path]) -> Path:
    """Four small books and one article."""
    books(40)
    (tmp_path / "qasper").mkdir()
    article = {"input": "We measure what a state keeps. " * 40}
    (tmp_path / "qasper" / "leval_scientific_qa.jsonl").write_text(json.dumps(article) + "\n")
    return tmp_path


def test_the_halves_are_apart_and_always_the_same(data: Path) -> None:
    import books

    development, held_out = books.split(data)
    assert {book.stem for book in development + held_out} == {"0", "1", "2", "3"}
    assert len(development) == len(held_out) == 2
    assert books.split(data) == (development, held_out)


def test_intervals_keep_pairs_together() -> None:
    import books

    first = {str(i): (float(i + 10), 10) for i in range(6)}
    second = {name: (nats + 1.0, tokens) for name, (nats, tokens) in first.items()}
    value, low, high = books.interval(lambda a, b: np.log(b / a), first, second)
    assert (value, low, high) == (pytest.approx(0.1),) * 3  # the same difference in every book: no doubt at all
    value, low, high = books.interval(lambda a: a, first)
    assert value == pytest.approx(books.perplexity(first))
    assert low < value < high


def test_a_subset_of_losses_is_measured_with_all_texts(llama: Any, tmp_path: Path) -> None:
    import books

    ids = torch.randint(3, 64, (3, 2, 20), generator=torch.Generator().manual_seed(0))
    losses = books.Losses(llama(), dict(zip("abc", ids, strict=True)), 4, tmp_path / "measured.jsonl", "test")
    part = losses.subset(["c", "a"])
    ours = part.of("full")
    everything = losses.of("full")
    assert list(everything) == ["a", "b", "c"]
    assert ours == {name: everything[name] for name in ("c", "a")}
    assert len((tmp_path / "measured.jsonl").read_text().splitlines()) == 2  # conditions, and one measurement
    labelled = books.records(part, "test", {"full": ("full", None)}, {})
    assert (labelled[0].groups, labelled[0].samples, set(labelled[0].parts)) == (2, 4, {"a", "c"})


def test_the_search_takes_the_kind_whose_worst_capacity_gains_most(monkeypatch: pytest.MonkeyPatch) -> None:
    import search

    class InventedLosses:
        """Losses by rule: a memory as long as the state, 3/4 of it for the newest, is best, but for one trap."""

        def of(self, policy: str) -> dict[str, tuple[float, int]]:
            size = 0 if policy == "full" else int(policy.partition(":")[2].partition(",")[0])
            over = 0.0 if not size else 10 / size
            if "tova-head" in policy and "momentum=1-1/k" in policy:
                over *= 0.8 if "last=3/4" in policy else 0.9
            if "momentum=0.98" in policy:
                over *= 0.5 if size == 256 else 2.0
            return {"book": ((1 + over) * 100, 100)}

    kind = search.choose(InventedLosses(), quick=False)  # type: ignore[arg-type]
    assert kind == "tova-head,momentum=1-1/k,last=3/4"
    assert search.gain(InventedLosses(), kind, 64) > 0  # type: ignore[arg-type]


def test_reporting_shares_what_the_records_say_of_the_other_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import books
    import reporting

    names = [f"book{i}" for i in range(4)]
    ours = books.halves(names)[1]
    means = {"full": 1.0, "tova:64": 1.4, "tova:128": 1.2, "h2o:64": 1.3, "fade:64": 1.1}
    results = [record("pg19", policy, "perplexity", 0.0) for policy in means]
    parts = {
        policy: {name: {"nll": 1000 * (mean if name in ours else 9.0), "tokens": 1000.0} for name in names}
        for policy, mean in means.items()
    }
    few = replace(record("pg19", "tova-head:64", "perplexity", 0.0), samples=1, parts=parts["full"])
    write_records(tmp_path / "pg19.jsonl", [*(replace(one, parts=parts[one.policy]) for one in results), few])
    run(reporting, monkeypatch, str(tmp_path / "pg19.jsonl"))
    output = capsys.readouterr().out
    over = np.exp(list(means.values())) - np.e
    shares = [f"{over[4] / rival:.3f} [" for rival in (over[1], over[3], over[2])]
    line = next(line for line in output.splitlines() if line.startswith("fade"))
    assert f"{over[4]:.3f} [" in line
    assert all(share in line for share in shares)
    assert "tova-head" not in output  # of fewer samples than the others


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()


@pytest.mark.slow
def test_search_end_to_end_and_again(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import search

    for name, few in (("CAPACITIES", (8, 16, 32)), ("MOMENTA", ("0.9", "1-4/k")), ("OTHERS", ("tova+4",))):
        monkeypatch.setattr(search, name, few)
    out = tmp_path / "out" / "search.jsonl"
    options = ["--data", str(data), "--model", model, "--length", "64", "--chunks", "1", "--out", str(out)]
    run(search, monkeypatch, *options, "--quick")
    output = capsys.readouterr().out
    assert "chosen: tova" in output
    assert "tova - preset: " in output
    results = read_records(out)
    assert {record.capacity for record in results} == {None, 8, 16, 32}
    assert all(record.groups == 2 and record.value > 1 for record in results)
    measurements = (tmp_path / "out" / "search.chosen.measured.jsonl").read_text()
    run(search, monkeypatch, *options, "--quick")
    assert (tmp_path / "out" / "search.chosen.measured.jsonl").read_text() == measurements
    assert "0 new records" in capsys.readouterr().out


@pytest.mark.slow
def test_budgets_end_to_end(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import books
    import budgets

    monkeypatch.setattr(books, "MODULES", ("this", "colorsys"))
    profile = tmp_path / "profile.json"
    profile.write_text('{"capacities": [4, 28], "average": 16, "allocations": {"8": [4, 12]}}')
    out = tmp_path / "budgets.jsonl"
    options = ["--data", str(data), "--model", model, "--length", "64", "--chunks", "1", "--out", str(out)]
    averages = ["--average", "8", "--average", "16"]
    run(budgets, monkeypatch, *options, *averages, "--profile", f"tova={profile}")
    output = capsys.readouterr().out
    assert "novels: 2 texts" in output
    assert "articles: 1 texts" in output
    line = next(line for line in output.splitlines() if line.startswith("tova:16 + profile"))
    assert len(line.split("[")) == 4
    results = {(record.task, record.policy): record for record in read_records(out)}
    assert results["budgets-novels", "tova:16 + profile"].value != results["budgets-novels", "tova:16"].value
    assert ("budgets-code", "tova:32") in results


@pytest.mark.slow
def test_head_budgets_end_to_end(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import head_budgets

    profile, out = tmp_path / "profile.json", tmp_path / "heads.jsonl"
    profile.write_text('{"capacities": [4, 36], "average": 20}')
    options = ["--data", str(data), "--model", model, "--length", "64", "--out", str(out), "--profile", str(profile)]
    run(head_budgets, monkeypatch, *options, "--average", "20")
    assert "1 books to calibrate, 1 to measure" in capsys.readouterr().out
    results = {record.policy.removeprefix("fade:20"): record for record in read_records(out)}
    assert list(results)[1:] == ["", " by the shipped profile", " by layer, estimated", " by KV head, estimated"]
    assert results[""].settings["longest"] == 20 < results[" by KV head, estimated"].settings["longest"]
    assert len({record.value for record in results.values()}) == 5


@pytest.mark.parametrize("count", ["slots", "state"])
def test_candidates_for_best_fit_into_the_bytes_of_plain_slots(
    data: Path,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: str,
) -> None:
    import best

    out = tmp_path / "best.jsonl"
    options = ["--data", str(data), "--model", model, "--length", "64", "--slots", "8", "--count", count]
    kinds = ["--candidate", "fade,kv=int8", "--candidate", "tova,kv=k8v4"]
    run(best, monkeypatch, *options, *kinds, "--half", "reporting", "--out", str(out))
    # two KV heads of size 8 take 128 bytes in float32, 40 in int8, 44 in k8v4; positions 8 and scores 4 for each unit
    sizes = {"slots": (9 * 128 // 40 - 1, 9 * 128 // 44 - 1), "state": (18, 22)}[count]
    records = {one.policy: one for one in read_records(out)}
    assert list(records) == ["full", "tova:8", f"fade:{sizes[0]},kv=int8", f"tova:{sizes[1]},kv=k8v4"]
    assert records["tova:8"].task == "best-reporting"
    assert "tova:8" in capsys.readouterr().out
