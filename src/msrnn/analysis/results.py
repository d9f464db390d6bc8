"""The inputs of `msrnn plot` and `msrnn report`: files of records, traces, and folders of both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..eval.record import Record
from .records import read_results

if TYPE_CHECKING:
    from ..core.trace import Trace

TRACE = ".safetensors"


@dataclass(frozen=True)
class Results:
    """`paths` are as the user wrote them, to be shown in commands."""

    paths: list[str]
    records: list[Record]
    traces: list[Path]


def open_results(paths: Iterable[str | Path]) -> Results:
    inputs = [Path(path) for path in paths]
    traces = sorted({file for path in inputs for file in _traces(path)})
    tables = [path for path in inputs if path.suffix != TRACE and not (path.is_dir() and _only_traces(path))]
    return Results([str(path) for path in inputs], read_results(tables), traces)


def load_trace(path: Path) -> Trace:
    from ..core.trace import Trace

    return Trace.load(path)


def _traces(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob(f"*{TRACE}"))
    if path.suffix == TRACE and not path.exists():
        raise ValueError(f"there is no trace {path}; make one with msrnn trace or msrnn retention --traces")
    return [path] if path.suffix == TRACE else []


def _only_traces(folder: Path) -> bool:
    return bool(_traces(folder)) and not any(folder.glob("*.jsonl"))
