"""Records by what a table of the documentation says, read as plain JSON. The newest record of a thing counts."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from msrnn.analysis.benchmarks import from_benchmark
from msrnn.analysis.serving_gpu import LOADS, Pair, pairs
from tests.docs.pages import ROOT

PROFILE = ",profile=SmolLM2-135M-Instruct"
Record = dict[str, Any]


@cache
def load(name: str) -> list[Record]:
    return [json.loads(line) for line in (ROOT / "results" / f"{name}.jsonl").read_text().splitlines()]


def policy(label: str, slots: int | None = None) -> str:
    """`tova` + profile at 512 slots -> tova:512,profile=...; a label may have its own size."""
    by_head = "-heads" if label.endswith(" by KV head") else ""
    name = re.sub(r"[`*]| \+ profile| by KV head", "", label).removesuffix(" attention")
    name = name.replace("short context", "baseline").split(", ")[-1]
    sized = name if name == "full" or ":" in name else f"{name}:{slots}"
    return sized + (PROFILE + by_head if "+ profile" in label else "")


@cache
def index(name: str, metric: str) -> dict[tuple[str, str], Record]:
    """Records of one metric by policy and cell."""
    chosen = [record for record in load(name) if record["metric"] == metric]
    return {(record["policy"], json.dumps(record["cell"], sort_keys=True)): record for record in chosen}


def find(name: str, metric: str, which: str, **cell: object) -> Record:
    return index(name, metric)[which, json.dumps(cell, sort_keys=True)]


def perplexity(label: str, slots: int) -> Record:
    return find("pg19", "perplexity", policy(label, slots))


def recall(label: str, slots: int, turns: int) -> Record:
    return find("turns", "recall", policy(label, slots), turns=turns)


def passkey(label: str, slots: int | None, kind: str, length: int) -> Record:
    """Recall over all depths; the interval of that mean is in no record."""
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    found = [find("needle", "recall", policy(label, slots), kind=kind, length=length, depth=depth) for depth in depths]
    return {"value": sum(record["value"] for record in found) / len(depths), "low": None, "high": None}


@cache
def served(name: str) -> dict[str, Pair]:
    """By load of vLLM on a GPU: of the newest commit at which both engines ran it."""
    return pairs([one for line in load(name) for one in from_benchmark(line)], LOADS)


def numbers(cell: str) -> list[str]:
    """The numbers of a cell as they are printed: 1,788 [1,669, 1,899] has three."""
    return [
        number.replace(",", "") for number in re.findall(r"[-+]?\d[\d,]*\.\d+|[-+]?\d{1,3}(?:,\d{3})+|[-+]?\d+", cell)
    ]


def close(printed: str, value: float) -> bool:
    """Whether the value, rounded to as many digits, is what is printed."""
    printed = printed.replace(",", "")
    digits = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10**-digits + 1e-9


def same(cell: str, record: Record) -> None:
    """A cell is the record's value, with its interval where one is printed and recorded."""
    value, *interval = numbers(cell)
    assert close(value, record["value"]), (cell, record["value"])
    if interval and record["low"] is not None:
        assert close(interval[0], record["low"]), (cell, record["low"])
        assert close(interval[1], record["high"]), (cell, record["high"])
