"""The tables of docs/league.md say what the records say."""

from __future__ import annotations

import pytest

from msrnn.analysis.league import RECALL, Player, mean_recall, players
from msrnn.analysis.records import read_results
from tests.docs import pages
from tests.docs.records import close, find, numbers, same

SMOLLM = "SmolLM2-135M-Instruct"


def league(model: str, capacity: int) -> dict[str, Player]:
    records = [one for one in read_results([pages.ROOT / "results" / "league.jsonl"]) if one.model == model]
    return {player.policy: player for player in players(records, capacity)}


def tables() -> dict[int, list[list[str]]]:
    """Those with perplexities, by the slots of their first policy."""
    found = [rows for header, *rows in pages.tables("docs/league.md", "Results") if header[1].startswith("gap")]
    return {int(rows[0][0].split(":")[1].split(",")[0]): rows for rows in found}


@pytest.mark.parametrize("capacity", [64, 256, 1024])
def test_gaps_and_ratios(capacity: int) -> None:
    rows, measured = tables()[capacity], league(SMOLLM, capacity)
    assert [row[0].strip("`") for row in rows] == list(measured)
    for label, *cells in rows:
        player = measured[label.strip("`")]
        for cell, interval in zip(cells, (player.gap, player.ratio), strict=True):
            printed = numbers(cell)
            assert close(printed[0], interval.value), (label, cell)
            for edge, value in zip(printed[1:], interval[1:], strict=False):
                assert close(edge, value), (label, cell)


def test_recall() -> None:
    header, *rows = next(table for table in pages.tables("docs/league.md", "Results") if table[0][0] == "recall")
    records = read_results([pages.ROOT / "results" / "league.jsonl"])
    measured = {one.policy for one in records if one.task == "league-needle"}
    assert {row[0].strip("`") for row in rows} == measured
    for label, *cells in rows:
        for kind, cell in zip(header[1:], cells, strict=True):
            interval = mean_recall(records, label.strip("`"), *RECALL[kind])
            assert interval is not None
            for printed, value in zip(numbers(cell), interval, strict=True):
                assert close(printed, value), (label, kind, cell)


def test_facts_in_conversations() -> None:
    found = pages.tables("docs/league.md", "Results")
    _, *rows = next(table for table in found if table[0][0] == "facts in conversations")
    records = read_results([pages.ROOT / "results" / "league.jsonl"])
    rules = {one.policy for one in records if one.task == "league-turns"}
    elsewhere = {"full", "window+4:256", "h2o:256", "tova:256", "fade:256"}  # in results/turns.jsonl
    assert {label.strip("`") for label, *_ in rows} - elsewhere == rules
    for label, *cells in rows:
        name = label.strip("`")
        for turns, cell in zip((2, 4, 8), cells, strict=True):
            same(cell, find("league" if name in rules else "turns", "recall", name, turns=turns))
