"""What benchmarks/vllm_gpu.py has measured, as a table: medians of both engines, and their ratios.

Only runs of one commit and one setting are put together; where ours ran in several ways at a commit, each has a table.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
_OURS = {"policy": "", "threshold": 512, "no_lanes": False}  # settings of ours alone, and their defaults


def summary(path: Path) -> None:
    """Medians of both engines, and their ratios, for every commit, shape and setting."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for setting in dict.fromkeys(map(_setting, rows)):
        alike = [row for row in rows if _setting(row) == setting]
        stock = [row for row in alike if row["engine"] == "stock"]
        ours = [row for row in alike if row["engine"] == "msrnn"]
        for own in dict.fromkeys(map(_own_setting, ours)) or [()]:
            print(f"\n{_title(setting, own)}")
            _summary_of(stock + [row for row in ours if _own_setting(row) == own])


def _setting(row: Row) -> tuple[Any, ...]:
    """What both engines have in common; --kv-gib may be another number for each."""
    common = row["commit"], row["shape"], row["max_num_seqs"], row["max_model_len"], row["budget"], row["utilization"]
    return *common, row["graphs"], row.get("kv_cache_dtype", "auto"), row.get("kv_gib") is not None, row["small"]


def _own_setting(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name, default) for name, default in _OURS.items())


def _title(setting: tuple[Any, ...], own: tuple[Any, ...]) -> str:
    commit, shape, sequences, length, budget, utilization, graphs, cache, given, small = setting
    parts = [f"{commit}: {shape}", f"{sequences:,} sequences and {length:,} tokens each at most"]
    parts += [f"{budget:,} tokens a batch"] * (budget != 8192) + [f"graphs {graphs}"] * (graphs is not None)
    parts += [f"{utilization:.0%} of the memory"] if utilization is not None else []
    parts += [f"stock with a cache in {cache}"] * (cache != "auto") + ["--kv-gib"] * given + ["small"] * small
    for value, (name, default) in zip(own, _OURS.items(), strict=False):
        parts += [f"{name} {value}"] * (value != default)
    return ", ".join(parts)


def _summary_of(rows: list[Row]) -> None:
    starts = [row for row in rows if row["kind"] == "vllm start"]
    for row in starts:
        print(f"{row['engine']}: started in {row['start_s']} s, {memory_in_words(row, starts)}")
    loads = [row for row in rows if row["kind"] == "vllm load"]
    if loads:
        print(f"{'load':22} {'attention':9} {'runs':>5} {'stock':>22} {'msrnn':>22}  msrnn / stock (target)")
    for load, attention in dict.fromkeys((row["load"], row["attention"]) for row in loads):
        some = [row for row in loads if (row["load"], row["attention"]) == (load, attention)]
        by_engine = {name: [row for row in some if row["engine"] == name] for name in ("stock", "msrnn")}
        cells = {name: _cell(runs) for name, runs in by_engine.items()}
        ratios = _ratios(by_engine) if all(by_engine.values()) else ""
        runs = "/".join(str(len(by_engine[name])) for name in ("stock", "msrnn"))
        target = f" ({some[0]['target']})" if some[0]["target"] else ""
        print(f"{load:22} {attention:9} {runs:>5} {cells['stock']:>22} {cells['msrnn']:>22}  {ratios}{target}")
    for row in rows:
        _print_flaws(row)


def memory_in_words(row: Row, starts: list[Row]) -> str:
    """Blocks, beside what `msrnn info` says of memory known before the start, and what stock's memory would hold."""
    words = f"{row['kv_bytes'] / 2**30:.1f} GiB for {row['blocks']:,} blocks"
    if row.get("info_blocks") is not None:
        words += f", {row['info_blocks']:,} by `msrnn info --memory`"
    stock = [one for one in starts if one["engine"] == "stock" and one.get("kv_gib") == row.get("kv_gib")]
    if row["engine"] == "msrnn" and stock:
        words += f", {stock[-1]['kv_bytes'] // row['request_bytes']:,} in stock's memory"
    return words


def _print_flaws(row: Row) -> None:
    """What should not have happened in a load, or in the requests before the first."""
    found = []
    if row["kind"] == "vllm load" and (not row["complete"] or row["preemptions"]):
        found.append(f"complete {row['complete']}, preempted {row['preemptions']:.0f}")
    if row.get("triton_compiled"):
        kernels = ", ".join(f"{name} {count}" for name, count in row["triton_compiled"].items())
        found.append(f"Triton compiled {kernels}")
    if found:
        print(f"    {row['engine']}, {row.get('load', 'first requests')} {row['attention']}: {'; '.join(found)}")


def _median(runs: list[Row], name: str) -> float | None:
    values = [run[name] for run in runs if run[name] is not None]
    return median(values) if values else None


def _cell(runs: list[Row]) -> str:
    if not runs:
        return "-"
    seconds, step = _median(runs, "seconds"), _median(runs, "step_ms")
    return f"{seconds:.3f} s" + (f", step {step:.2f} ms" if step is not None else "")


def _ratios(runs: dict[str, list[Row]]) -> str:
    parts = []
    for label, name in (("time", "seconds"), ("throughput", "new_tokens_per_s"), ("step", "step_ms")):
        ours, theirs = _median(runs["msrnn"], name), _median(runs["stock"], name)
        if ours is not None and theirs:
            parts.append(f"{label} {ours / theirs:.2f}")
    return ", ".join(parts)
