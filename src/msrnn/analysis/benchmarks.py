"""Rows of our benchmarks (benchmarks/{cpu,vllm_cpu}.py, msrnn bench) as records, to be drawn and tabulated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..eval.record import Cell, Record

SERVED = "tokens served per second"


def from_benchmark(line: Mapping[str, Any]) -> Iterator[Record]:
    """Speeds, and the bytes of a state where the row has them; other rows give nothing."""
    if line.get("what") in ("prefill", "decode") and "run" in line and "length" in line:
        yield _cpu(line)
    elif line.get("what") == "serving":
        yield _serving(line)
    elif line.get("tokens_per_s") and (line.get("part") or line.get("kind")):
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


def _serving(line: Mapping[str, Any]) -> Record:
    """All requests at once into an engine with so much memory for keys and values."""
    settings = {name: line[name] for name in ("requests", "prompt", "new", "at_once")}
    running = {str(time): count for time, count, _ in line["over_time"]}
    written = {str(time): tokens for time, _, tokens in line["over_time"]}
    parts = {"running": running, "written": written, "first token": line["first_token_s"]}
    facts = {"model": line["model"], "settings": settings, "seconds": line["seconds"], "parts": parts}
    return _record(line, line["policy"], SERVED, line["new_tokens_per_s"], {"memory": line["memory"]}, facts)


def _bench(line: Mapping[str, Any]) -> Iterator[Record]:
    """Where every policy has its largest batch, that is a setting; elsewhere the batch is part of what is measured."""
    kind = line.get("part") or line["kind"]
    place = {name: line[name] for name in ("context", "length") if line.get(name)}
    if kind == "prefill":  # joined weights are how a wavefront reads, not what is read
        place |= {"attention": "steady"} if str(line.get("attention", "")).startswith("steady") else {}
    elif line.get("joined"):
        place |= {"weights": "joined"}
    largest = kind in ("table", "largest")
    cell = place if largest or not line.get("batch") else place | {"batch": line["batch"]}
    told = {name: line[name] for name in ("batch", "chunk", "compiled", "lanes", "gate", "note") if line.get(name)}
    policy = line["policy"]
    if "all_readings" in line and policy != "full":  # the opponent, who is fastest by our own kernel
        policy, told["reading"] = "full", f"our kernel without scores ({policy})"
    facts = {"model": line["shape"], "settings": told, "peak_bytes": line.get("peak_bytes") or 0}
    spread = {"samples": max(1, len(line.get("runs_s", [])))}
    if len(line.get("runs_s", [])) > 1:
        rates = [line["tokens_per_s"] * line["median_s"] / seconds for seconds in line["runs_s"]]
        spread |= {"low": min(rates), "high": max(rates)}
    yield _record(line, policy, f"{kind} tokens/s", line["tokens_per_s"], cell, facts | spread)
    if largest and line.get("state_bytes"):
        yield _record(line, policy, "state bytes", line["state_bytes"] / line["batch"], place, facts)


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
