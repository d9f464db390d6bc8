"""The one place that knows how results lie in files: records in, the newest of each kind out. Light: no torch.

Results are JSON lines (`*.jsonl`: records, or the rows of our benchmarks) and folders of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..eval.record import Record, read_lines, read_records
from .benchmarks import from_benchmark

SAMPLES = ".samples.jsonl"  # the log of a run lies beside its records and is none


def read_results(paths: Iterable[str | Path]) -> list[Record]:
    """The records of all files, the newest where one was measured again."""
    return newest([_whole(record) for path in paths for file in record_files(path) for record in _read(file)])


def _whole(record: Record) -> Record:
    """A budget by layer may average 255.97 slots; it belongs beside 256."""
    return record if record.capacity is None else replace(record, capacity=round(record.capacity))


def record_files(path: str | Path) -> list[Path]:
    """A file itself, or the result files of a folder."""
    given = Path(path)
    if given.is_dir():
        found = sorted(file for file in given.glob("*.jsonl") if not file.name.endswith(SAMPLES))
        if not found:
            raise ValueError(f"{given} has no result files (*.jsonl); make some with msrnn eval")
        return found
    if not given.exists():
        raise ValueError(f"there is no file {given}; give result files (*.jsonl), traces or a folder of them")
    return [given]


def _read(path: Path) -> list[Record]:
    """Records; in a benchmark's file, whatever of it is about a policy and a time."""
    first = next((line for _, line in read_lines(path)), None)
    if first is None or "metric" in first:
        return read_records(path)
    return [made for _, line in read_lines(path) for made in from_benchmark(line)]


def newest(records: Iterable[Record]) -> list[Record]:
    """One record for each thing measured under the same settings; the last one in time."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = _thing(record)
        if key not in found or found[key].date <= record.date:
            found[key] = record
    return list(found.values())


def _thing(record: Record) -> tuple[Any, ...]:
    settings = json.dumps([record.cell, record.settings], sort_keys=True)
    return (record.task, record.model, record.dtype, record.policy, record.metric, record.seed, settings)


def chosen(records: Iterable[Record], task: str | Sequence[str], metric: str | None = None) -> list[Record]:
    tasks = (task,) if isinstance(task, str) else task
    return [one for one in records if one.task in tasks and metric in (None, one.metric)]


def brief(policy: str) -> str:
    """A policy as tables name it: `tova:512 by layer` where a profile gives every layer a size of its own."""
    return re.sub(r",profile=[^,]*", " by layer", policy)


def family(policy: str) -> str:
    """A policy's name without its size: `tova` for tova:512, `window+4` for window+4:512."""
    name = re.sub(r":(avg=)?\d+(\.\d+)?(?=,|\s|$)", "", brief(policy))
    return name.replace(",", ", ")


# the order of the paper's table 3, in which lines of tables and figures come
ORDER = (
    "full", "baseline", "window", "window+1", "window+4", "h2o", "h2o-layer", "tova-head", "tova", "tova+1", "tova+4",
)  # fmt: skip


def families(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by family, in the paper's order and ours after that, each by capacity."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(family(record.policy), []).append(record)
    names = sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return {name: sorted(found[name], key=lambda one: one.capacity or 0) for name in names}


def models(records: Iterable[Record]) -> list[str]:
    return sorted({record.model for record in records})
