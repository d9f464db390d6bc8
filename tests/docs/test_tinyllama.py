"""The sections of docs/results.md about TinyLlama and RULER say what the records say."""

from __future__ import annotations

import re

import pytest

from tests.docs import pages
from tests.docs.records import Record, find, index, numbers, policy, same

FILE = "tinyllama"


def tables(heading: str) -> list[list[list[str]]]:
    return pages.tables("docs/results.md", heading)


def perplexity(label: str, size: int) -> Record:
    return find(FILE, "perplexity", policy(label, size))


def sizes(header: list[str]) -> list[int]:
    return [int(cell.replace(",", "")) for cell in header[1:]]


def test_perplexities() -> None:
    header, *rows = tables("A larger model")[0]
    assert [label for label, *_ in rows] == ["`window+4`", "`h2o`", "`tova`", "`fade`"]
    for label, *cells in rows:
        for size, cell in zip(sizes(header), cells, strict=True):
            same(cell, perplexity(label, size))


def test_differences_to_tova() -> None:
    header, *rows = tables("A larger model")[1]
    for label, *cells in rows:
        for size, cell in zip(sizes(header), cells, strict=True):
            value, low, high = map(float, numbers(cell))
            assert low - 0.005 <= value <= high + 0.005
            assert value == pytest.approx(
                perplexity(label, size)["value"] - perplexity("tova", size)["value"], abs=0.00501
            )


def test_all_rows_of_table_3() -> None:
    header, *rows = tables("A larger model")[2]
    assert len(rows) == 11
    for label, *cells in rows:
        for size, cell in zip(sizes(header), cells, strict=True):
            same(cell, find("tinyllama_table3", "perplexity", policy(label, size)))


def test_passkeys() -> None:
    _, *rows = tables("A larger model")[3]
    assert len(rows) == 12
    for label, size, *cells in rows:
        for length, cell in zip((1024, 2000), cells, strict=True):
            name = policy(label, int(size.replace(",", "")))
            depths = [
                find(FILE, "recall", name, kind="passkey", length=length, depth=depth)["value"]
                for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
            ]
            assert float(cell) == pytest.approx(sum(depths) / 5, abs=0.00501)


def test_turns() -> None:
    header, *rows = tables("A larger model")[4]
    for label, *cells in rows:
        for size, cell in zip(sizes(header), cells, strict=True):
            same(cell, find(FILE, "recall", policy(label, size), turns=2))


def test_qasper() -> None:
    header, *rows = tables("A larger model")[5]
    assert [label for label, *_ in rows] == ["`window+4`", "`h2o`", "`tova`", "`fade`"]
    for label, *cells in rows:
        for size, cell in zip(sizes(header), cells, strict=True):
            same(cell, find(FILE, "f1", policy(label, size)))


def test_ruler() -> None:
    ((header, *rows),) = tables("RULER")
    places = [("ruler", 1024), ("ruler", 2048), (FILE, 1024), (FILE, 2048)]
    assert (len(header), len(rows)) == (5, 14)
    compared = 0
    for label, *cells in rows:
        for (file, length), cell in zip(places, cells, strict=True):
            if cell:
                same(cell, find(file, "match", policy(label), kind="all", length=length))
                compared += 1
    assert compared == 14 * 4 - 11
    assert len([key for key in index(FILE, "match") if key[0] == "full"]) == 2 * 13


def test_babilong() -> None:
    text = " ".join(pages.text("docs/results.md").split())
    sentence = text[text.index("It names the right place in") : text.index("No policy was measured:")]
    printed = re.findall(r"\d+ %(?: \[\d+, \d+\])?", sentence)
    cells = [("qa1", 1024), ("qa1", 1984), ("qa2", 1024), ("qa2", 1984)]
    for cell, (kind, length) in zip(printed, cells, strict=True):
        same(cell, find(FILE, "accuracy", "full", kind=kind, length=length))
    assert all(find(FILE, "accuracy", "full", kind="qa3", length=length)["value"] == 0 for length in (1024, 1984))
