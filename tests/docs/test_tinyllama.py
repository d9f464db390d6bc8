"""The sections of docs/results.md about TinyLlama and RULER say what the records say."""

from __future__ import annotations

import re
from math import exp

import pytest

from tests.docs import pages
from tests.docs.records import Record, close, find, index, load, numbers, policy, same

FILE = "tinyllama"


def tables(heading: str) -> list[list[list[str]]]:
    return pages.tables("docs/results.md", heading)


def perplexity(label: str, size: int) -> Record:
    return find(FILE, "perplexity", policy(label, size))


def table(heading: str, title: str) -> list[list[str]]:
    """The table of a section whose first header cell is this."""
    return next(rows for rows in tables(heading) if rows[0][0] == title)


def words() -> str:
    return " ".join(pages.text("docs/results.md").split())


def difference(cell: str, a: Record, b: Record, digits: int) -> None:
    """A printed difference with its interval is that of two records."""
    value, low, high = map(float, numbers(cell))
    assert low <= value <= high
    assert close(f"{value:.{digits}f}", a["value"] - b["value"]), (cell, a["value"], b["value"])


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


def test_squality() -> None:
    _, full, *rows = table("A larger model", "SQuALITY")
    assert [label for label, *_ in rows] == ["`window+4:512`", "`h2o:512`", "`tova:512`", "`fade:512`"]
    for label, rouge, length, gap in (full, *rows):
        same(rouge, find(FILE, "rouge", policy(label)))
        same(length, find(FILE, "words", policy(label)))
        if gap:
            difference(gap, find(FILE, "rouge", policy(label)), find(FILE, "rouge", "full"), 1)
    record = find(FILE, "rouge", "full")
    assert f"{record['samples']} questions on {record['groups']} stories, cut to 1,664 tokens" in words()


def test_stories() -> None:
    _, *rows = table("Stories", "TinyLlama")
    assert len(rows) == 5
    for label, *cells in rows:
        for metric, cell in zip(("full perplexity", "repetition", "tokens", "ended"), cells, strict=True):
            same(cell, find(FILE, metric, policy(label)))
    sentence = words().split("end by themselves more often**, in ")[1].split(" more of 50 stories")[0]
    for name, cell in zip(("window+4:512", "tova:256"), sentence.split(" and "), strict=True):
        difference(cell, find(FILE, "ended", name), find(FILE, "ended", "full"), 2)


def running(label: str, position: int) -> Record:
    name, _, positions = label.rpartition(", ")
    return find(FILE, "running perplexity", policy(name, 512), position=position, positions=positions.strip("`"))


def test_beyond_the_trained_length() -> None:
    header, *rows = table("Beyond the trained length", "TinyLlama")
    lengths, compared = sizes(header[:-1]), 0
    for label, *cells, gap in rows:
        for length, cell in zip(lengths, cells, strict=True):
            if cell:
                same(cell, running(label, length))
                compared += 1
        if gap:
            difference(gap, running(label, lengths[-1]), running("window+4, gaps", lengths[-1]), 2)
    assert compared == 5 * 6 - 2


def second_half(label: str) -> float:
    """Perplexity of the tokens from 8,192 to 16,384."""
    whole, first = (running(label, length)["parts"].values() for length in (16384, 8192))
    nats, tokens = (
        sum(part[name] for part in whole) - sum(part[name] for part in first)
        for name in ("nll so far", "tokens so far")
    )
    return exp(nats / tokens)


def test_the_second_half_beyond_the_trained_length() -> None:
    printed = words().split("(+0.07 [-0.05, 0.17]) and is ")[1].split(" [")[0]
    assert close(printed, second_half("tova, gaps") - second_half("window+4, gaps"))


def test_findings_of_the_paper() -> None:
    """The pairs "a against b" of the findings are TOVA and full attention, or TOVA per layer and per head."""
    _, *rows = table("Which findings of the paper hold", "the paper (LLaMA-2-7B and others)")
    printed = {cell: re.findall(r"[\d.]+ against [\d.]+", cell) for _, *cells in rows for cell in cells}
    pairs = [pair.split(" against ") for found in printed.values() for pair in found]
    expected = [
        ("tinyllama_table3", "perplexity", "tova:64", "tova-head:64"),
        ("pg19", "perplexity", "tova:1024", "full"),
        (FILE, "perplexity", "tova:512", "full"),
        ("gemma", "perplexity", "tova:512", "full"),
        (FILE, "rouge", "tova:512", "full"),
    ]
    for pair, (file, metric, *names) in zip(pairs, expected, strict=True):
        for number, name in zip(pair, names, strict=True):
            assert close(number, find(file, metric, name)["value"]), (file, name)


def test_ruler_with_the_profile_before() -> None:
    printed = words().split("with the one before it (f8846a4) the two were ")[1].split(". ")[0]
    old = [one for one in load("ruler") if one["policy"] == "best:512" and one["commit"] == "f8846a4"]
    values = [one["value"] for one in old if one["cell"]["kind"] == "all"]
    assert all(close(cell, value) for cell, value in zip(printed.split(" and "), values, strict=True))


def test_ruler() -> None:
    header, *rows = table("RULER", "RULER")
    places = [("ruler", 1024), ("ruler", 2048), ("ruler", 4096), (FILE, 1024), (FILE, 2048)]
    assert (len(header), len(rows)) == (6, 15)
    compared = 0
    for label, *cells in rows:
        for (file, length), cell in zip(places, cells, strict=True):
            if cell:
                same(cell, find(file, "match", policy(label), kind="all", length=length))
                compared += 1
    assert compared == 15 * 5 - 22
    assert len([key for key in index(FILE, "match") if key[0] == "full"]) == 2 * 13


def babilong_file(model: str, kind: str, length: int) -> str:
    """TinyLlama's qa1 up to 1,024 tokens was measured on a CPU, the rest on a GPU."""
    if model == "SmolLM2":
        return "babilong"
    return "babilong_tinyllama" if kind == "qa1" and length <= 1024 else FILE


def test_babilong_with_full_attention() -> None:
    header, *rows = table("RULER", "BABILong")
    lengths = [int(cell.split()[0].replace(",", "")) for cell in header[1:]]
    compared = 0
    for label, *cells in rows:
        model, kind = label.replace("`", "").split(", ")
        for length, cell in zip(lengths, cells, strict=True):
            if cell:
                same(cell, find(babilong_file(model, kind, length), "accuracy", "full", kind=kind, length=length))
                compared += 1
    assert compared == 12


def test_samples_of_babilong() -> None:
    tiny = "babilong_tinyllama"
    places = {("babilong", 1024): 50, ("babilong", 512): 50, (FILE, 1984): 20, (tiny, 512): 24, (tiny, 1024): 46}
    for (file, length), samples in places.items():
        assert find(file, "accuracy", "full", kind="qa1", length=length)["samples"] == samples
    sentence = words().split("An earlier run of 20 samples on an H200 had ")[1].split(" for TinyLlama")[0]
    same(sentence, find(FILE, "accuracy", "full", kind="qa1", length=1024))
