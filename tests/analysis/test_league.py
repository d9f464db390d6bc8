"""The league's rows and figure, from invented records whose values are known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from msrnn.analysis.league import in_tovas_bytes, league_figure, league_table, mean_recall, players
from msrnn.eval.record import Record
from tests.support.records import record


def half(name: str, policy: str, values: list[float]) -> Record:
    """A perplexity per book."""
    parts = {str(i): {"nll": 1000 * math.log(value), "tokens": 1000.0} for i, value in enumerate(values)}
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return record(f"league-{name}", policy, "perplexity", mean, parts=parts, cell={"half": name})


def recall(task: str, policy: str, cell: dict, values: list[float]) -> Record:
    parts = {str(i): {"recall": value, "count": 1.0} for i, value in enumerate(values)}
    return record(f"league-{task}", policy, "recall", sum(values) / len(values), parts=parts, cell=cell)


@pytest.fixture
def records() -> list[Record]:
    choosing = {"full": 20, "tova:256": 24, "key_norm:256": 90, "key_norm-head+4:256,last=1/2": 26, "fade:256": 22}
    reporting = {"full": 20, "tova:256": 24, "key_norm:256": 21, "key_norm-head+4:256,last=1/2": 28, "fade:256": 22}
    rows = [half("choosing", policy, [value] * 3) for policy, value in choosing.items()]
    rows += [half("reporting", policy, [value] * 3) for policy, value in reporting.items()]
    for kind, values in (("passkey", [1.0, 0.0]), ("needle", [0.0, 0.0])):
        for length in (1024, 2048):
            rows.append(recall("needle", "tova:256", {"kind": kind, "length": length, "depth": 0.5}, values))
    for turns, values in ((0, [1.0, 1.0]), (2, [1.0, 1.0]), (4, [1.0, 0.0]), (8, [0.0, 0.0])):
        rows.append(recall("turns", "tova:256", {"turns": turns}, values))
    return rows


def test_the_frame_is_chosen_on_one_half_and_reported_on_the_other(records: list[Record]) -> None:
    rows = players(records, 256)
    assert [row.policy for row in rows] == ["fade:256", "tova:256", "key_norm-head+4:256,last=1/2"]
    assert [row.gap.value for row in rows] == pytest.approx([2, 4, 8])
    assert [row.ratio.value for row in rows] == pytest.approx([0.5, 1, 2])
    assert rows[0].ratio.low == pytest.approx(0.5)
    assert rows[0].recall == {}


def test_recall_is_pooled_over_cells(records: list[Record]) -> None:
    tova = next(row for row in players(records, 256) if row.policy == "tova:256")
    assert {name: value.value for name, value in tova.recall.items()} == {
        "passkeys": 0.5,
        "numbers in books": 0.0,
        "facts after 2 to 8 turns": 0.5,
    }
    assert mean_recall(records, "fade:256", ("league-needle",), {"kind": "needle"}) is None


def test_fading_is_a_score_of_its_own(records: list[Record]) -> None:
    for name in ("choosing", "reporting"):
        records.append(half(name, "key_norm-head:256,last=1/2,momentum=1-1.5/k", [30.0] * 3))
    assert len(players(records, 256)) == 4


def test_every_policy_in_tovas_bytes(records: list[Record], tmp_path: Path) -> None:
    values = {"full": 20, "tova:256": 24, "fade:247": 25, "key_norm-head+4:166,last=1/2": 32}
    fitted = [
        replace(half("bytes", name, [value] * 3), settings={"plain_slots": 256}) for name, value in values.items()
    ]
    rows = in_tovas_bytes([*records, *fitted], 256)
    assert list(rows) == ["tova", "fade", "key_norm-head+4,last=1/2"]
    assert [row.ratio.value for row in rows.values()] == pytest.approx([1, 1.25, 3])
    assert in_tovas_bytes([*records, *fitted], 64) == {}
    figures = [league_figure([*records, *more], tmp_path / f"{len(more)}.png") for more in ([], fitted)]
    assert figures[0].read_bytes() != figures[1].read_bytes(), "its points are shown"


def test_a_table_and_a_figure(records: list[Record], tmp_path: Path) -> None:
    table = league_table(records, 256).splitlines()
    assert table[2].startswith("| `fade:256` | 2.00 [2.00, 2.00] | 0.50 [0.50, 0.50] |  |")
    assert "| 0.50 [0.00, 1.00] | 0.00 [0.00, 0.00] | 0.50 [" in table[3]
    assert league_figure(records, tmp_path / "league.png").stat().st_size > 10_000
