"""The conditions of a measurement, and how it is recorded: one JSON line per figure, with its conditions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median

import torch

from msrnn.system.provenance import command, commit, machine, now, versions


def conditions(**more: object) -> dict[str, object]:
    """What every record of one run shares."""
    common = {"date": now(), "commit": commit(), "machine": machine(torch.device("cpu")), "versions": versions()}
    return {**common, "command": command(), "load_before": round(os.getloadavg()[0], 2), **more}


def timed(runs: list[float]) -> dict[str, object]:
    """The median, and all runs behind it."""
    return {"median_s": round(median(runs), 5), "runs_s": [round(run, 5) for run in runs]}


def write(path: Path, records: list[dict[str, object]]) -> None:
    """Add records to a file; those of the same figure are replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    new = {_figure(record) for record in records}
    others = [record for record in earlier if _figure(record) not in new]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*others, *records]))


def _figure(record: dict[str, object]) -> tuple[object, ...]:
    return tuple(record.get(name) for name in ("what", "run", "length", "prompt", "continuation", "capacity"))
