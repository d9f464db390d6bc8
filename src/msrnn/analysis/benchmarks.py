"""Rows of our benchmarks (benchmarks/{cpu,vllm_cpu,vllm_gpu}.py, msrnn bench) as records, for figures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..eval.record import Cell, Record
from .policy_names import policy_capacity

SERVED = "tokens served per second"
VLLM_FIRST, VLLM_RATE = "seconds to all first tokens in vLLM", "new tokens per second in vLLM"
VLLM_STEP, VLLM_START = "milliseconds of a step in vLLM", "seconds to start vLLM"


def from_benchmark(line: Mapping[str, Any]) -> Iterator[Record]:
    """Throughput, and the bytes of a state where the row has them; other rows give nothing."""
    if line.get("what") in ("prefill", "decode") and "run" in line and "length" in line:
        yield _cpu(line)
    elif line.get("what") == "serving":
        yield _serving(line)
    elif line.get("kind") in ("vllm load", "vllm start") and not line.get("small"):
        yield from _vllm(line)
    elif line.get("tokens_per_s") and (line.get("part") or line.get("kind")):
        yield from _bench(line)


def _cpu(line: Mapping[str, Any]) -> Record:
    """`run` is a policy; `median_s` is the time to prefill `length` tokens, or to decode one after them."""
    tokens = line["length"] if line["what"] == "prefill" else 1
    rates = sorted(tokens / seconds for seconds in line["runs_s"])
    fields = {"model": line["model"], "low": rates[0], "high": rates[-1], "samples": len(rates)}
    policy = "full" if line["run"] == "plain" else line["run"]
    return _record(
        line, policy, f"{line['what']} tokens/s", tokens / line["median_s"], {"length": line["length"]}, fields
    )


def _serving(line: Mapping[str, Any]) -> Record:
    """All requests at once in an engine with a KV cache of `memory` bytes."""
    settings = {name: line[name] for name in ("requests", "prompt", "new", "at_once")}
    running = {str(time): count for time, count, _ in line["over_time"]}
    written = {str(time): tokens for time, _, tokens in line["over_time"]}
    parts = {"running": running, "written": written, "first token": line["first_token_s"]}
    fields = {"model": line["model"], "settings": settings, "seconds": line["seconds"], "parts": parts}
    return _record(line, line["policy"], SERVED, line["new_tokens_per_s"], {"memory": line["memory"]}, fields)


def _vllm(line: Mapping[str, Any]) -> Iterator[Record]:
    """A load of benchmarks/vllm_gpu.py, or an engine's start; stock vLLM has the policy `full`, its cache 16 bits."""
    if line.get("kv_cache_dtype", "auto") != "auto":
        return
    load = ("requests", "prompt", "new", "attention", "round")
    cell = {name: line[name] for name in (*load, "max_num_seqs", "threshold") if name in line}
    at = {"commit": line.get("commit", "")}  # both engines are compared at one
    fields = {"model": line["shape"], "dtype": "bfloat16", "seconds": line.get("seconds", 0.0), "settings": at}
    values = {VLLM_START: line["start_s"]} if line["kind"] == "vllm start" else {}
    if line["kind"] == "vllm load":
        values = {VLLM_FIRST: line["seconds"]} if line["new"] == 1 else {VLLM_RATE: line["new_tokens_per_s"]}
        values |= {VLLM_STEP: line["step_ms"]} if line["step_ms"] and line["new"] < 256 else {}
    for metric, value in values.items():
        yield _record(line, line["policy"], metric, value, cell, fields)


def _bench(line: Mapping[str, Any]) -> Iterator[Record]:
    """Where every policy has its own largest batch, the batch is a setting; elsewhere it is part of the cell."""
    kind = line.get("part") or line["kind"]
    place = {name: line[name] for name in ("context", "length") if line.get(name)}
    if kind == "prefill":  # fused projections are part of the pipelined prefill
        place |= {"attention": "steady"} if str(line.get("attention", "")).startswith("steady") else {}
    elif line.get("joined"):
        place |= {"projections": "fused"}
    largest = kind in ("table", "largest")
    cell = place if largest or not line.get("batch") else place | {"batch": line["batch"]}
    settings = {name: line[name] for name in ("batch", "chunk", "compiled", "lanes", "gate", "note") if line.get(name)}
    policy = line["policy"]
    if "all_readings" in line and policy != "full":  # full attention, fastest with our own kernel
        policy, settings["reading"] = "full", f"our kernel without scores ({policy})"
    fields = {"model": line["shape"], "settings": settings, "peak_bytes": line.get("peak_bytes") or 0}
    runs = {"samples": max(1, len(line.get("runs_s", [])))}
    if len(line.get("runs_s", [])) > 1:
        rates = [line["tokens_per_s"] * line["median_s"] / seconds for seconds in line["runs_s"]]
        runs |= {"low": min(rates), "high": max(rates)}
    yield _record(line, policy, f"{kind} tokens/s", line["tokens_per_s"], cell, fields | runs)
    if largest and line.get("state_bytes"):
        yield _record(line, policy, "state bytes", line["state_bytes"] / line["batch"], place, fields)


def _record(
    line: Mapping[str, Any], policy: str, metric: str, value: float, cell: Cell, fields: Mapping[str, Any]
) -> Record:
    common: dict[str, Any] = {
        "task": "benchmark", "policy": policy, "capacity": policy_capacity(policy), "metric": metric, "value": value,
        "low": None, "high": None, "samples": 1, "groups": 1, "seed": 0, "dtype": line.get("dtype", ""),
        "machine": line.get("machine", ""), "versions": line.get("versions", {}), "commit": line.get("commit", ""),
        "date": line.get("date", ""), "seconds": line.get("median_s", 0.0), "peak_bytes": 0,
        "run": line.get("command", "msrnn bench"), "cell": cell, "command": line.get("command", ""),
    }  # fmt: skip
    return Record(**common | dict(fields))
