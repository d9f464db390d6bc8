"""Measurements that outlive a kill: one JSON line each, appended as they come, under a line of conditions.

A ledger opened again under the same conditions knows what was measured; under others it refuses, and says which differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .record import append_lines, read_lines


class Ledger:
    """`key -> result`, both JSON. The first line of the file holds the conditions."""

    def __init__(self, path: str | Path, conditions: dict[str, Any]) -> None:
        self.path, self.known = Path(path), dict[str, Any]()
        if not self.path.parent.is_dir():
            raise ValueError(f"there is no folder {self.path.parent} for {self.path.name}; make it first")
        conditions = json.loads(json.dumps(conditions))  # as they will be read back
        lines = _lines(self.path)
        if lines:
            _check(self.path, lines[0], conditions)
            self.known = {_name(line["key"]): line["result"] for line in lines[1:]}
        else:
            append_lines(self.path, [{"conditions": conditions}])

    def __contains__(self, key: object) -> bool:
        return _name(key) in self.known

    def __getitem__(self, key: object) -> Any:
        return self.known[_name(key)]

    def add(self, key: object, result: Any) -> None:
        append_lines(self.path, [{"key": key, "result": result}])
        self.known[_name(key)] = json.loads(json.dumps(result))


def _name(key: object) -> str:
    return json.dumps(key)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [line for _, line in read_lines(path)] if path.exists() else []
    except ValueError:
        raise ValueError(f"{path} is not a file of measurements; move it away, or write elsewhere") from None


def _check(path: Path, first: dict[str, Any], conditions: dict[str, Any]) -> None:
    found = first.get("conditions") if isinstance(first, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a file of measurements; move it away, or write elsewhere")
    differ = [name for name in conditions if found.get(name) != conditions[name]]
    if differ or found.keys() != conditions.keys():
        told = ", ".join(differ) or "its conditions"
        raise ValueError(f"{path} holds measurements of another run (another {told}); remove it, or write elsewhere")
