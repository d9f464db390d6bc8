"""The section of docs/results.md about Gemma says what the records say."""

from __future__ import annotations

from math import exp

import pytest

from tests.docs import pages
from tests.docs.records import Record, find, numbers, policy, same

PERPLEXITIES, DIFFERENCES = 0, 1


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
