"""Where, with what and by which command something was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("msrnn", "torch", "transformers", "triton", "numba", "rouge-score")


def machine(device: torch.device) -> str:
    """The chip that computes: a GPU by its name, a CPU by its name and the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {name: _version(name) for name in _PACKAGES}
    return {name: text for name, text in found.items() if text} | {"python": platform.python_version()}


def commit() -> str:
    """The commit of this source: $MSRNN_COMMIT, where the source is a copy whose git knows another, or git's word."""
    if said := os.environ.get("MSRNN_COMMIT"):
        return said
    here = Path(__file__).parent
    ask = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    """What was typed: `msrnn ...`, or a script and its arguments."""
    script, *arguments = sys.argv
    ours = Path(script).name in ("msrnn", "__main__.py")
    return " ".join(["msrnn", *arguments] if ours else ["python", script, *arguments])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
