"""Where and with what a figure was measured, and how it is written down: one JSON line each, with its conditions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median


def conditions(**more: object) -> dict[str, object]:
    """What every record of one run shares."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {name: _version(name) for name in ("torch", "transformers", "numba")}
        | {"python": platform.python_version()},
        **more,
    }


def timed(runs: list[float]) -> dict[str, object]:
    """A median with all that it was taken from."""
    return {"median_s": round(median(runs), 5), "runs_s": [round(run, 5) for run in runs]}


def write(path: Path, records: list[dict[str, object]]) -> None:
    """Beside the records that are there of other figures; those of the same figure are replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    new = {_figure(record) for record in records}
    kept = [record for record in there if _figure(record) not in new]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*kept, *records]))


def _figure(record: dict[str, object]) -> tuple[object, ...]:
    return tuple(record.get(name) for name in ("what", "run", "length", "prompt", "continuation", "capacity"))


def _commit() -> str:
    try:
        known = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return known.stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
