"""Reading result files: JSON lines (records, or rows of our benchmarks) and folders of them. Light: no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..eval.record import Record, checked, read_lines, read_records
from .benchmarks import from_benchmark
from .policy_names import family

SAMPLES = ".samples.jsonl"  # the log of a run lies beside its records


def read_results(paths: Iterable[str | Path]) -> list[Record]:
    """The records of all files; of repeated measurements the newest."""
    return newest([_rounded(record) for path in paths for file in record_files(path) for record in _read(file)])


def _rounded(record: Record) -> Record:
    """Capacities by layer may average 255.97 slots; they belong to the column of 256."""
    return record if record.capacity is None else replace(record, capacity=round(record.capacity))


def record_files(path: str | Path) -> list[Path]:
    """A file itself, or the result files of a folder."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.glob("*.jsonl") if not file.name.endswith(SAMPLES))
        if not files:
            raise ValueError(f"{path} has no result files (*.jsonl); make some with msrnn eval")
        return files
    if not path.exists():
        raise ValueError(f"there is no file {path}; give result files (*.jsonl), traces or a folder of them")
    return [path]


def _read(path: Path) -> list[Record]:
    """The records of a file; of a benchmark's file, the rows with a policy and a time."""
    first = next((line for _, line in read_lines(path)), None)
    if first is None or "metric" in first:
        return read_records(path)
    return [record for number, line in read_lines(path) for record in _benchmark(line, f"{path}:{number}")]


def _benchmark(line: dict[str, Any], where: str) -> list[Record]:
    try:
        return [checked(record, where) for record in from_benchmark(line)]
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{where}: not a row of a benchmark: {type(error).__name__} {str(error)[:100]}") from None


def newest(records: Iterable[Record]) -> list[Record]:
    """One record per measurement under the same settings: the last one in time."""
    by_key: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = _key(record)
        if key not in by_key or by_key[key].date <= record.date:
            by_key[key] = record
    return list(by_key.values())


def _key(record: Record) -> tuple[Any, ...]:
    settings = json.dumps([record.cell, record.settings], sort_keys=True)
    return (record.task, record.model, record.dtype, record.policy, record.metric, record.seed, settings)


def select(records: Iterable[Record], task: str | Sequence[str], metric: str | None = None) -> list[Record]:
    """The records of a task, or several, and of a metric."""
    tasks = (task,) if isinstance(task, str) else task
    return [one for one in records if one.task in tasks and metric in (None, one.metric)]


# the order of the paper's table 3, kept in tables and figures
ORDER = (
    "full", "baseline", "window", "window+1", "window+4", "h2o", "h2o-layer", "tova-head", "tova", "tova+1", "tova+4",
)  # fmt: skip


def families(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by family, in the paper's order, others after that; each sorted by capacity."""
    lines: dict[str, list[Record]] = {}
    for record in records:
        lines.setdefault(family(record.policy), []).append(record)
    names = sorted(lines, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return {name: sorted(lines[name], key=lambda one: one.capacity or 0) for name in names}


def models(records: Iterable[Record]) -> list[str]:
    return sorted({record.model for record in records})
