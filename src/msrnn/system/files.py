"""Writing files so that a crash never destroys what was there: to a temporary name beside, then over it at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file that takes the place of `path` only when the block ends well."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{target} is a folder; give the name of a file")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder; make it first")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod(0o666 & ~_umask())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_tensors(path: str | Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    from safetensors.torch import save_file  # brings torch, which the writing of texts and pictures can do without

    with replacing(path) as part:
        save_file(tensors, part, metadata=about)


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text)
