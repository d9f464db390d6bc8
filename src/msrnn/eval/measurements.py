"""Resumable measurements: one JSON line each, appended as they come, under a first line of conditions.

A file opened again under the same conditions knows what was measured; under others it is refused, and the message says
which conditions differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .record import append_lines, read_lines


class Measurements:
    """`key -> result`, both JSON, in a file whose first line holds the conditions."""

    def __init__(self, path: str | Path, conditions: dict[str, Any]) -> None:
        self.path, self.results = Path(path), dict[str, Any]()
        if not self.path.parent.is_dir():
            raise ValueError(f"there is no folder {self.path.parent} for {self.path.name}; make it first")
        conditions = json.loads(json.dumps(conditions))  # as they come back from the file
        lines = _lines(self.path)
        if lines:
            _check(self.path, lines[0], conditions)
            self.results = {json.dumps(line["key"]): line["result"] for line in lines[1:]}
        else:
            append_lines(self.path, [{"conditions": conditions}])

    def __contains__(self, key: object) -> bool:
        return json.dumps(key) in self.results

    def __getitem__(self, key: object) -> Any:
        return self.results[json.dumps(key)]

    def add(self, key: object, result: Any) -> None:
        append_lines(self.path, [{"key": key, "result": result}])
        self.results[json.dumps(key)] = json.loads(json.dumps(result))


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [line for _, line in read_lines(path)] if path.exists() else []
    except ValueError:
        raise ValueError(f"{path} is not a file of measurements; move it away, or write elsewhere") from None


def _check(path: Path, first: dict[str, Any], conditions: dict[str, Any]) -> None:
    before = first.get("conditions") if isinstance(first, dict) else None
    if not isinstance(before, dict):
        raise ValueError(f"{path} is not a file of measurements; move it away, or write elsewhere")
    differences = [name for name in conditions if before.get(name) != conditions[name]]
    if differences or before.keys() != conditions.keys():
        names = ", ".join(differences) or "its conditions"
        raise ValueError(f"{path} holds measurements of another run (another {names}); remove it, or write elsewhere")
