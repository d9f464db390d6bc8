"""The tasks by name. Each is a file with `Settings` and `task(settings, resources)`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAMES = ("pg19", "squality", "qasper", "story", "extrapolation", "needle", "turns", "ruler", "babilong")


def module(name: str) -> Any:
    return import_module(f".{name}", __name__)


def settings() -> dict[str, type]:
    """The settings class of every task."""
    return {name: module(name).Settings for name in NAMES}
