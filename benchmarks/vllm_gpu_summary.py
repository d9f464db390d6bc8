"""What benchmarks/vllm_gpu.py has measured, as a table: medians of both engines, and their ratios."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any


def summary(path: Path) -> None:
    """Medians of both engines, and their ratios, for every shape and setting."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for setting in dict.fromkeys(map(_setting, rows)):
        shape, sequences, utilization, cache = setting
        memory = "" if utilization is None else f", {utilization:.0%} of the memory"
        stock = "" if cache == "auto" else f", stock with a cache in {cache}"
        print(f"\n{shape}, {sequences:,} sequences at most{memory}{stock}")
        _summary_of([row for row in rows if _setting(row) == setting])


def _setting(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["shape"], row["max_num_seqs"], row["utilization"], row.get("kv_cache_dtype", "auto")


def _summary_of(rows: list[dict[str, Any]]) -> None:
    for engine in ("stock", "msrnn"):
        for row in rows:
            if row["kind"] == "vllm start" and row["engine"] == engine:
                predicted = f", predicted {row['predicted_blocks']:,}" if "predicted_blocks" in row else ""
                kv = f"{row['kv_bytes'] / 2**30:.1f} GiB for {row['blocks']:,} blocks{predicted}"
                print(f"{engine}: started in {row['start_s']} s, {kv}")
    print(f"{'load':22} {'attention':9} {'runs':>5} {'stock':>22} {'msrnn':>22}  msrnn / stock (target)")
    keys = dict.fromkeys((row["load"], row["attention"]) for row in rows if row["kind"] == "vllm load")
    for load, attention in keys:
        some = [row for row in rows if (row.get("load"), row.get("attention")) == (load, attention)]
        by_engine = {name: [row for row in some if row["engine"] == name] for name in ("stock", "msrnn")}
        cells = {name: _cell(runs) for name, runs in by_engine.items()}
        ratios = _ratios(by_engine) if all(by_engine.values()) else ""
        runs = "/".join(str(len(by_engine[name])) for name in ("stock", "msrnn"))
        line = f"{load:22} {attention:9} {runs:>5} {cells['stock']:>22} {cells['msrnn']:>22}  {ratios}"
        print(f"{line} ({some[0]['target']})")
        for row in some:
            if not row["complete"] or row["preemptions"]:
                print(f"    {row['engine']}: complete {row['complete']}, preempted {row['preemptions']:.0f}")


def _median(runs: list[dict[str, Any]], name: str) -> float | None:
    values = [run[name] for run in runs if run[name] is not None]
    return median(values) if values else None


def _cell(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "-"
    seconds, step = _median(runs, "seconds"), _median(runs, "step_ms")
    return f"{seconds:.3f} s" + (f", step {step:.2f} ms" if step is not None else "")


def _ratios(runs: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    for label, name in (("time", "seconds"), ("throughput", "new_tokens_per_s"), ("step", "step_ms")):
        ours, theirs = _median(runs["msrnn"], name), _median(runs["stock"], name)
        if ours is not None and theirs:
            parts.append(f"{label} {ours / theirs:.2f}")
    return ", ".join(parts)
