"""Rows of our benchmarks (benchmarks/cpu.py, msrnn bench) as records, to be drawn and tabulated like others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..eval.record import Cell, Record


def from_benchmark(line: Mapping[str, Any]) -> Iterator[Record]:
    """Speeds, and the bytes of a state where the row has them; other rows give nothing."""
    if line.get("what") in ("prefill", "decode") and "run" in line and "length" in line:
        yield _cpu(line)
    elif "part" in line and "tokens_per_s" in line:
        yield from _bench(line)


def capacity_in(policy: str) -> float | None:
    """The number of slots that a policy's text names."""
    found = re.search(r":(?:avg=)?(\d+(?:\.\d+)?)(?=,|\s|$)", policy)
    return float(found[1]) if found else None


def _cpu(line: Mapping[str, Any]) -> Record:
    """`run` is a policy; `length` tokens were read in `median_s`, or one was written after them."""
    tokens = line["length"] if line["what"] == "prefill" else 1
    rates = sorted(tokens / seconds for seconds in line["runs_s"])
    facts = {"model": line["model"], "low": rates[0], "high": rates[-1], "samples": len(rates)}
    policy = "full" if line["run"] == "plain" else line["run"]
    return _record(
        line, policy, f"{line['what']} tokens/s", tokens / line["median_s"], {"length": line["length"]}, facts
    )


def _bench(line: Mapping[str, Any]) -> Iterator[Record]:
    """In the part `table` every policy has its largest batch; elsewhere the batch is part of what is measured."""
    place = {name: line[name] for name in ("context", "length") if name in line}
    cell = place if line["part"] == "table" else place | {"batch": line["batch"]}
    facts = {"model": line["shape"], "settings": {name: line[name] for name in ("batch", "chunk") if name in line}}
    yield _record(line, line["policy"], f"{line['part']} tokens/s", line["tokens_per_s"], cell, facts)
    if line["part"] == "table" and "state_bytes" in line:
        each = line["state_bytes"] / line["batch"]
        yield _record(line, line["policy"], "state bytes", each, place, facts)


def _record(
    line: Mapping[str, Any], policy: str, metric: str, value: float, cell: Cell, facts: Mapping[str, Any]
) -> Record:
    common: dict[str, Any] = {
        "task": "benchmark", "policy": policy, "capacity": capacity_in(policy), "metric": metric, "value": value,
        "low": None, "high": None, "samples": 1, "groups": 1, "seed": 0, "dtype": line.get("dtype", ""),
        "machine": line.get("machine", ""), "versions": line.get("versions", {}), "commit": line.get("commit", ""),
        "date": line.get("date", ""), "seconds": line.get("median_s", 0.0), "peak_bytes": 0,
        "run": line.get("command", "msrnn bench"), "cell": cell, "command": line.get("command", ""),
    }  # fmt: skip
    return Record(**common | dict(facts))
