"""The peers' figure, from invented records whose values are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from msrnn.analysis import peers
from msrnn.analysis.figures import draw
from msrnn.analysis.peers import gaps, recall
from msrnn.eval.record import Record
from tests.support.records import record


def perplexity(run: str, values: list[float], capacity: int | None = 512) -> Record:
    parts = {str(i): {"nll": 100 * math.log(value), "tokens": 100.0, "count": 1} for i, value in enumerate(values)}
    return record("peers", run, "perplexity", values[0], cell={"work": "pg19"}, parts=parts, capacity=capacity)


def answers(run: str, work: str, metric: str, kind: str, values: list[float]) -> Record:
    parts = {str(i): {metric: value, "count": 2.0} for i, value in enumerate(values)}
    cell = {"work": work, "kind": kind, "length": 1024}
    return record("peers", run, metric, 0.5, cell=cell, parts=parts, capacity=512)


@pytest.fixture
def records() -> list[Record]:
    rows = [
        perplexity("transformers full", [20.0, 30.0], None),
        perplexity("kvpress knorm", [40.0, 60.0]),
        perplexity("msrnn tova", [22.0, 33.0]),
        perplexity("msrnn tova", [24.0, 36.0], 256),
    ]
    for run in ("kvpress knorm", "msrnn tova"):
        rows += [answers(run, "ruler", "match", kind, [100.0, 200.0]) for kind in ("all", "vt")]
        rows += [answers(run, "needle", "recall", kind, [2.0, 1.0]) for kind in ("passkey", "needle")]
        for length in (2048, 4096):
            rows.append(record("peers", run, "peak bytes", length * 1e4, cell={"work": "memory", "length": length}))
    return rows


def test_gaps_are_shares_above_full_the_best_first(records: list[Record]) -> None:
    assert {run: gap.value for run, gap in gaps(records, 512).items()} == pytest.approx(
        {"msrnn tova": 0.1, "kvpress knorm": 1.0}
    )
    assert list(gaps(records, 512)) == ["msrnn tova", "kvpress knorm"]
    assert gaps(records, 256)["msrnn tova"].value == pytest.approx(0.2)


def test_other_lengths_are_other_work(records: list[Record]) -> None:
    other = perplexity("transformers full", [5.0, 5.0], None)
    other.cell["prompt"] = 99
    assert gaps([*records, other], 512) == gaps(records, 512)


def test_right_answers_count_once(records: list[Record]) -> None:
    assert recall(records, 512, "ruler")["msrnn tova"].value == pytest.approx(0.75)
    assert recall(records, 512, "needle")["msrnn tova"].value == pytest.approx(0.75)
    assert recall(records, 512, "needle")["msrnn tova"].low == pytest.approx(0.5)


@pytest.mark.parametrize("metrics, panels", [(("match", "recall", "peak bytes"), 3), (("match",), 2), ((), 1)])
def test_a_panel_for_what_was_measured(
    records: list[Record], metrics: tuple[str, ...], panels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(peers, "save_figure", lambda figure, path: drawn.append(figure) or path)
    rows = [one for one in records if one.metric in (*metrics, "perplexity")]
    assert [name for name, *_ in draw(rows, tmp_path, only="peers")] == ["peers"]
    assert len(drawn[0].axes) == panels
