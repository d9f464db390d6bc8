"""UTF-8 texts of any length, read block by block."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import IO

BLOCK = 1 << 16  # bytes per read


def read_blocks(source: str | Path | IO[bytes], size: int = BLOCK) -> Iterator[str]:
    """The text of a UTF-8 file, or of an open binary one, block by block; a byte order mark is left out."""
    if isinstance(source, str | Path):
        with open(source, "rb") as file:
            yield from read_blocks(file, size)
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    start, first = 0, True  # byte offset of the block; whether there was no text yet
    read = getattr(source, "read1", source.read)  # what a pipe has now, without waiting for the rest
    while True:
        block = read(size)
        undecoded = decoder.getstate()[0]
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(_not_utf8(source, error, start - len(undecoded))) from None
        if text:
            yield text.removeprefix("\ufeff") if first else text
            first = False
        if not block:
            return
        start += len(block)


def _not_utf8(source: IO[bytes], error: UnicodeDecodeError, start: int) -> str:
    """The error message: which byte of which file."""
    path = getattr(source, "name", None)
    name = path if isinstance(path, str) and path != "<stdin>" else "standard input"
    offset, byte = start + error.start, error.object[error.start]
    return f"{name} is not UTF-8 text: byte {offset} is 0x{byte:02x} ({error.reason}); convert it, e.g. with iconv"
