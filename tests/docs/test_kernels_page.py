"""docs/kernels.md: what quantised slots cost and what rounding does to them, from the records."""

from __future__ import annotations

import re

import pytest

from tests.docs import pages
from tests.docs.records import Record, close, load, numbers

COMMIT = "a83a95a"  # of the table with torch.compile on both sides
TABLES = pages.tables("docs/kernels.md", "Quantised slots")
FORMATS = ("tova:512", "tova:512,kv=int8", "tova:512,kv=k8v4")


def of_formats(kind: str, batch: int | None = None) -> dict[str, Record]:
    rows = [one for one in load("part/formats_h200") if one.get("commit") == COMMIT and one["kind"] == kind]
    return {one["policy"]: one for one in rows if batch in (None, one["batch"])}


@pytest.mark.parametrize(
    "label, kind, batch, field, unit",
    [
        ("step at batch 384", "step", 384, "median_s", 1e3),
        ("times its floor", "step", 384, "times_floor", 1),
        ("step at batch 48", "step", 48, "median_s", 1e3),
        ("step at batch 1", "step", 1, "median_s", 1e3),
        ("largest batch", "largest", None, "batch", 1),
        ("tokens/s there", "largest", None, "tokens_per_s", 1),
    ],
)
def test_slot_formats_on_a_gpu(label: str, kind: str, batch: int | None, field: str, unit: float) -> None:
    rows = {row[0]: row[1:] for table in TABLES for row in table}
    measured = of_formats(kind, batch)
    assert all(one["compiled"] for one in measured.values())
    for name, cell in zip(FORMATS, rows[label], strict=True):
        assert close(numbers(cell)[0], unit * measured[name][field]), (label, name)


def test_ratios_of_slot_formats() -> None:
    rows = {row[0]: row[1:] for table in TABLES for row in table}
    steps, most = of_formats("step", 384), of_formats("largest")
    for name, cell in zip(FORMATS, rows["relative to plain"], strict=True):
        assert close(cell, steps[name]["median_s"] / steps[FORMATS[0]]["median_s"])
    (label,) = (name for name in rows if name.startswith("relative to full attention"))
    full = most["full"]
    assert label == f"relative to full attention ({full['tokens_per_s']:,.0f} at its largest batch, {full['batch']})"
    for name, cell in zip(FORMATS, rows[label], strict=True):
        assert close(cell, most[name]["tokens_per_s"] / full["tokens_per_s"])


def test_how_far_rounding_carries_with_codes() -> None:
    found = {(one["policy"], one["dtype"]): one for one in load("rounding")}
    (_, *rows) = next(table for table in TABLES if "texts" in table[0][1])
    assert len(rows) == 5
    for label, same_texts, change in rows:
        dtype = "float64" if "float64" in label else "float32"
        for name in re.findall("`(.*?)`", label):
            record = found[name, dtype]
            assert same_texts == f"{record['equal']} of {record['texts']}", name
            assert close(change, record["likely_change"]), name
    assert len(found) == 6
