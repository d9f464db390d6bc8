"""The conditions of a measurement: machine, package versions, commit, command and time."""

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
    """The names of the GPU and of the CPU that launches its kernels; or the CPU's and the number of threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {_cpu_name()}"
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, where they are installed."""
    installed = {name: _version(name) for name in _PACKAGES}
    return {name: text for name, text in installed.items() if text} | {"python": platform.python_version()}


def commit() -> str:
    """The commit of this source: $MSRNN_COMMIT (for a copy without its own git), else what git says."""
    if override := os.environ.get("MSRNN_COMMIT"):
        return override
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    """The command line of this process: `msrnn ...`, or a script and its arguments."""
    script, *arguments = sys.argv
    own = Path(script).name in ("msrnn", "__main__.py")
    return " ".join(["msrnn", *arguments] if own else ["python", script, *arguments])


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
