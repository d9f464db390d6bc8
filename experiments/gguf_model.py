"""A model that comes as parts of a GGUF file: joined, checked and converted once, in msrnn's cache folder.

`MSRNN_CACHE` names another folder. Shared by tinyllama.py and gemma.py, which say where the parts come from.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from msrnn.system.downloads import cache_folder

Fetch = Callable[[Path], list[Path]]  # puts the parts into a folder; their paths, in order


def gguf_file(name: str, sha256: str, size: int, fetch: Fetch, parts: Path | None = None) -> Path:
    """The GGUF file in the cache, fetched or joined from `parts` on first use."""
    path = cache_folder() / f"{name}.gguf"
    if path.is_file() and path.stat().st_size == size:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        pieces = _local(parts) if parts else fetch(Path(work))
        joined = Path(work) / "joined"
        digest = _join(pieces, joined)
        if digest != sha256:
            raise ValueError(f"{len(pieces)} parts give sha256 {digest}, not {sha256}; fetch them again")
        os.replace(joined, path)
    return path


def model_folder(gguf: Path) -> Path:
    """The model as an ordinary bfloat16 folder beside the GGUF file, converted on first use."""
    folder = gguf.parent / gguf.stem
    if (folder / "config.json").is_file():
        return folder
    part = gguf.parent / f"{gguf.stem}.part"
    shutil.rmtree(part, ignore_errors=True)
    _convert(gguf, part)
    os.replace(part, folder)
    return folder


def _local(folder: Path) -> list[Path]:
    pieces = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if not pieces:
        raise ValueError(f"--parts {folder} has no files; give a folder with the parts of the GGUF file")
    return pieces


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
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(into)
    tokenizer.save_pretrained(into)
