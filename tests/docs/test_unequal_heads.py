"""docs/budgets.md, "By KV head": the tables of what unequal heads cost say what the records say."""

from __future__ import annotations

import pytest

from tests.docs import pages
from tests.docs.records import Record, close, load

COMMIT = "d88c343"  # that of the tables
SHAPES = {"LLaMA-2-7B": "llama-2-7b", "Llama-3-8B": "llama-3-8b"}
COLUMNS = ("equal", "0.4 to 1.6", "4 long heads")


def tables() -> dict[str, list[list[str]]]:
    """By the first words of the header."""
    return {header[0]: rows for header, *rows in pages.tables("docs/budgets.md", "By KV head")}


def records() -> list[Record]:
    return [one for one in load("part/heads_h200") if one["commit"] == COMMIT]


def step(shape: str, batch: int, capacities: str, run: str = "by KV head") -> float:
    """Milliseconds; equal heads were timed in either run."""
    mine = [one for one in records() if one["kind"] == "step" and f"--capacities {run}" in one["command"]]
    found = {(one["shape"], one["batch"], one["capacities"]): one["median_s"] for one in mine}
    seconds: float = found[shape, batch, capacities]
    return 1000 * seconds


def test_steps_of_whole_models() -> None:
    rows, shape = tables()["decode step of `fade:512`, ms"], ""
    assert len(rows) == 6
    for label, batch, equal, by_head, ratio in rows:
        shape = SHAPES[label.split(",")[0]] if label else shape
        ours, theirs = step(shape, int(batch), "by KV head"), step(shape, int(batch), "equal")
        assert close(equal, theirs)
        assert close(by_head, ours)
        assert close(ratio, ours / theirs)
    layers, equal_layers = (step("llama-2-7b", 48, name, "by layer") for name in ("by layer", "equal"))
    assert close("10.45", layers)
    assert close("10.38", equal_layers)
    assert close("1.007", layers / equal_layers)


def test_steps_of_one_layer() -> None:
    rows = tables()["a layer's decode step, us"]
    found = {(one["kv"], one["batch"]): one["us"] for one in records() if one.get("check") == "step time"}
    assert {(kv.strip("`"), int(batch)) for kv, batch, *_ in rows} == set(found)
    for kv, batch, *cells in rows:
        for name, cell in zip(COLUMNS, cells, strict=True):
            assert close(cell, found[kv.strip("`"), int(batch)][name]), (kv, batch, name)


@pytest.mark.parametrize("name, printed", [("equal", "8.8"), ("0.4 to 1.6", "18.9"), ("4 long heads", "20.0")])
def test_reads(name: str, printed: str) -> None:
    (record,) = [one for one in records() if one.get("check") == "read time"]
    assert f"{printed} ms" in pages.text("docs/budgets.md")
    assert close(printed, record["ms"][name])
    assert close("2.16", record["ms"]["0.4 to 1.6"] / record["ms"]["equal"])


def test_all_checks_agree() -> None:
    checks = [one for one in records() if "good" in one]
    assert len(checks) == 21
    assert all(one["good"] and not one.get("off") and not one.get("differ") for one in checks)


def test_on_a_cpu() -> None:
    found = {(one["what"], "profile" in one["run"]): one for one in load("part/heads_cpu")}
    read, equal, step = (
        found[key] for key in (("heads prefill", True), ("heads decode", False), ("heads decode", True))
    )
    text = " ".join(pages.text("docs/budgets.md").split())
    printed = text.split("reading takes ")[1].split("medians")[0]
    cells = (("1.01", read["ratio"]), ("1.01", step["ratio"]))
    times = (("42.6", 1000 * step["median_s"]), ("42.3", 1000 * equal["median_s"]))
    for number, value in (*cells, *times):
        assert number in printed
        assert close(number, value), number
    assert (len(read["runs_s"]), len(step["runs_s"])) == (5, 58)
