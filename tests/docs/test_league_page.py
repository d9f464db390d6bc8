"""The tables of docs/league.md say what the records say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from msrnn.analysis.league import RECALL, Player, in_tovas_bytes, mean_recall, paired, players, size_of
from msrnn.analysis.records import read_results
from msrnn.eval.record import Record
from msrnn.eval.statistics import Interval
from msrnn.hf.load import bundled, config
from tests.docs import pages
from tests.docs.records import close, find, numbers, same

SMOLLM = "SmolLM2-135M-Instruct"
HALVES = {"development": "choosing", "held-out": "reporting"}


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
        for cell, interval in zip(cells[:2], (player.gap, player.ratio), strict=True):
            printed = numbers(cell)
            assert close(printed[0], interval.value), (label, cell)
            for edge, value in zip(printed[1:], interval[1:], strict=False):
                assert close(edge, value), (label, cell)


def test_sizes_in_bytes() -> None:
    """Of the model that was measured, in its dtype; the two rules with numbers of their own are far from the others."""
    header, *rows = next(table for table in pages.tables("docs/league.md", "Results") if len(table[0]) == 5)
    shape, slots = config(str(bundled())), {}
    assert header[3:] == ["bytes relative to TOVA's", "slots in TOVA's bytes"]
    for label, *_, relative, count in rows:
        size = size_of(label.strip("`"), shape, torch.bfloat16)
        assert close(relative, size.relative), label
        assert int(count) == size.slots, label
        slots[label.strip("`").split(":")[0]] = size.slots
    far = {name for name, count in slots.items() if count == 166}
    assert far == {"window_attention-head", "redundancy-head+4"}
    assert (min(set(slots.values()) - {166}), sorted(set(slots.values()))[-2:]) == (243, [254, 256])


def test_every_policy_in_tovas_bytes() -> None:
    measured = in_tovas_bytes(read_results([pages.ROOT / "results" / "part" / "league_bytes.jsonl"]), 256)
    _, *rows = pages.tables("docs/league.md", "In the same bytes")[0]
    assert [row[0].strip("`") for row in rows] == [player.policy for player in measured.values()]
    for (_, *cells), player in zip(rows, measured.values(), strict=True):
        for cell, interval in zip(cells, (player.gap, player.ratio), strict=True):
            printed = numbers(cell)
            assert all(close(one, value) for one, value in zip(printed, interval, strict=False)), (player.policy, cell)
    ahead = measured["fade"].gap.value - next(iter(measured.values())).gap.value
    assert f"`output_aware` is {ahead:.2f} points ahead" in " ".join(pages.text("docs/league.md").split())


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


def relative(measured: Sequence[Record], blend: Record, fade: Record) -> Interval:
    """The gap to full attention relative to `fade`'s."""
    full = next(one for one in measured if (one.policy, one.settings) == ("full", blend.settings))
    return paired(lambda f, a, b: (b - f) / (a - f), full, fade, blend)


def records_of(name: str, model: str) -> list[Record]:
    records = read_results([pages.ROOT / "results" / "part" / f"{name}.jsonl"])
    return [one for one in records if one.model.startswith(model)]


def check(cell: str, interval: Interval) -> None:
    for printed, value in zip(numbers(cell), interval, strict=True):
        assert close(printed, value), (cell, interval)


def test_a_residual_in_the_loop() -> None:
    header, *rows = pages.tables("docs/league.md", "A residual: `blend`")[0]
    seen = 0
    for books, weight, decay, *cells in rows:
        for column, cell in zip(header[3:], cells, strict=True):
            model, slots = column.removesuffix(" slots").split(", ")
            number = {"1 - 1.5 / k": f"{1 - 1.5 / int(slots):.6f}"}.get(decay, decay)
            name = f"fade:{slots} with a residual slot, decay {number}" + ", by number" * (weight != "one token")
            mine = [one for one in records_of("residual", model) if one.settings["half"] == HALVES[books]]
            found = [one for one in mine if one.policy == name]
            assert len(found) == bool(cell), (books, name, column)
            if found:
                check(cell, relative(mine, found[0], next(one for one in mine if one.policy == f"fade:{slots}")))
                seen += 1
    assert seen == sum("residual" in one.policy for one in records_of("residual", ""))


def test_blend_in_the_bytes_of_fade() -> None:
    header, *rows = pages.tables("docs/league.md", "A residual: `blend`")[1]
    seen = 0
    for label, *cells in rows:
        books, model, *_ = label.split(", ")
        measured = [one for one in records_of("blend", model) if one.settings["half"] == HALVES[books]]
        for slots, cell in zip(header[1:], cells, strict=True):
            pair = [one for one in measured if one.capacity == int(slots.replace(",", ""))]
            pair = [one for one in pair if (",kv=" in one.policy) == ("best" in label)]
            assert len(pair) == 2 * bool(cell), (label, slots)
            if pair:
                fade, blend = sorted(pair, key=lambda one: one.policy.startswith("blend"))
                check(cell, relative(measured, blend, fade))
                seen += 1
    assert seen == sum(one.policy.startswith("blend") for one in records_of("blend", ""))
