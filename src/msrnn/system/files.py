"""Atomic writes: a file is written under a temporary name, then renamed, so that a crash never destroys the old one."""

from __future__ import annotations

import glob
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A temporary file that replaces `path`, or what a link there points to, if the block ends without an error."""
    target = target_of(path)
    check_regular(target)
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder; make it first")
    prefix = f".{target.name}.{platform.node()}."
    _remove_stale(target.parent, prefix)
    handle, name = tempfile.mkstemp(prefix=f"{prefix}{os.getpid()}.", suffix=".part", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def target_of(path: str | Path) -> Path:
    """What is written at a path: the file that a link there points to."""
    return Path(os.path.realpath(path) if os.path.islink(path) else path)


def check_regular(path: Path) -> None:
    """Refuse what is there and is no file: a folder, and a device or a pipe, which a file would replace."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a device or a pipe; give the name of a file")


def _remove_stale(folder: Path, prefix: str) -> None:
    """Temporary files of the same target that processes of this machine left when they were killed."""
    for path in folder.glob(f"{glob.escape(prefix)}*.part"):
        process = path.name.removeprefix(prefix).partition(".")[0]
        if process.isdigit() and not _lives(int(process)):
            path.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save  # imports torch, which texts and figures do not need

    with atomic_write(path) as temporary:  # not its save_file, which has a temporary file of its own
        temporary.write_bytes(save(tensors, metadata))


def write_text(path: str | Path, text: str) -> None:
    """Write a text file."""
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def load_tensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a safetensors file; ValueError if it is none.

    Tensors are copied: in the file they lie at any address, and kernels round differently off a cache line.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, AttributeError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error  # also dtypes that this torch does not have
    return about, tensors
