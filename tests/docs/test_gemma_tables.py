"""The section of docs/results.md about Gemma says what the records say."""

from __future__ import annotations

from math import exp

import pytest

from msrnn.analysis.league import mean_recall
from msrnn.analysis.records import read_results
from msrnn.eval.statistics import Interval
from tests.docs import pages
from tests.docs.records import Record, find, numbers, policy, same

PERPLEXITIES, DIFFERENCES, RECALL = 0, 1, 2
COLUMNS = (("passkey", 1024), ("passkey", 2048), ("needle", 1024))


def table(number: int) -> list[list[str]]:
    return pages.tables("docs/results.md", "A model with sliding windows")[number]


def perplexity(label: str, column: str) -> Record:
    return find("gemma", "perplexity", policy(label, int(column.replace(",", ""))))


def test_perplexities() -> None:
    header, *rows = table(PERPLEXITIES)
    assert [label for label, *_ in rows] == ["`window+4`", "`h2o`", "`tova`", "`fade`"]
    for label, *cells in rows:
        for column, cell in zip(header[1:], cells, strict=True):
            same(cell, perplexity(label, column))


def test_differences_to_tova() -> None:
    header, *rows = table(DIFFERENCES)
    assert [label for label, *_ in rows] == ["`window+4`", "`h2o`", "`fade`"]
    for label, *cells in rows:
        for column, cell in zip(header[1:], cells, strict=True):
            value, low, high = map(float, numbers(cell))
            assert low - 0.005 <= value <= high + 0.005
            difference = perplexity(label, column)["value"] - perplexity("tova", column)["value"]
            assert value == pytest.approx(difference, abs=0.00501)


def test_full_attention_and_books() -> None:
    text = " ".join(pages.text("docs/results.md").split())
    full = find("gemma", "perplexity", "full")
    section = text[text.index("## A model with sliding windows") :]
    same(section[section.index("Full attention: ") :].split("]")[0] + "]", full)
    assert f"the first chunk of 4,096 tokens of {full['groups']} books" in section


def test_full_attention_on_the_books_read_with_128_slots() -> None:
    parts = find("gemma", "perplexity", "full")["parts"]
    books = find("gemma", "perplexity", "tova:128")["parts"]
    nll, tokens = (sum(parts[book][column] for book in books) for column in ("nll", "tokens"))
    text = " ".join(pages.text("docs/results.md").split())
    assert f"{len(books)} of the books were read, where full attention has {exp(nll / tokens):.2f}" in text


def recall(label: str, slots: str, kind: str, length: int) -> Interval:
    """Over all depths."""
    records = read_results([pages.ROOT / "results" / "gemma.jsonl"])
    name = policy(label, int(slots.replace(",", "")) if slots else None)
    interval = mean_recall(records, name, ("needle",), {"kind": kind, "length": length})
    assert interval is not None, (label, slots)
    return interval


def test_recall() -> None:
    _, *rows = table(RECALL)
    compared = 0
    for label, slots, *cells in rows:
        for column, cell in zip(COLUMNS, cells, strict=True):
            if cell:
                same(cell, recall(label, slots, *column)._asdict())
                compared += 1
    assert (len(rows), compared) == (13, 27)


def test_differences_of_recall() -> None:
    text = " ".join(pages.text("docs/results.md").split())
    sentence = text.split("TOVA is ahead of H2O by ")[1].split(" no difference is found")[0]
    printed = [numbers(part)[-3:] for part in sentence.split("]")[:3]]
    tova = recall("tova", "512", "passkey", 1024).value
    for (value, *_), other in zip(printed, ("h2o", "window+4", "fade"), strict=True):
        assert float(value) == pytest.approx(tova - recall(other, "512", "passkey", 1024).value, abs=0.00501)


def test_what_full_attention_misses_at_the_end() -> None:
    missed = {
        length: find("gemma", "recall", "full", kind="passkey", length=length, depth=1.0) for length in (1024, 2048)
    }
    assert {length: (one["value"], one["samples"]) for length, one in missed.items()} == {1024: (0.5, 4), 2048: (0, 3)}
