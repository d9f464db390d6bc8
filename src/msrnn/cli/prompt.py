"""The text that a command reads: from the command line, a file or standard input."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ..system.text import read_blocks


@dataclass
class Prompt:
    """A text that is read once, block by block. `size` is its number of bytes, None where that is unknown."""

    name: str
    first: str
    rest: Iterator[str]
    size: int | None

    @property
    def blocks(self) -> Iterator[str]:
        return chain([self.first], self.rest)

    def estimate_tokens(self, tokenizer: Any) -> int | None:
        """The number of tokens: counted for a short text, extrapolated from the first block for a long one."""
        if self.size is None:
            return None
        count = len(tokenizer(self.first, verbose=False)["input_ids"])
        return max(count, round(count * self.size / len(self.first.encode())))


def open_prompt(arguments: Namespace) -> Prompt:
    """Open the text and check that it is not empty, before a model is loaded."""
    if arguments.prompt is not None and arguments.file is not None:
        raise ValueError("a prompt and --file were both given; give one of them (--question asks about a file)")
    if arguments.file is not None and arguments.file != "-":
        return _from_file(arguments.file)
    if arguments.prompt is not None and arguments.prompt != "-":
        return _from_argument(arguments.prompt)
    if sys.stdin is None or (arguments.prompt is None and arguments.file is None and sys.stdin.isatty()):
        raise ValueError("there is no text; give a prompt, --file FILE, or pipe it in")
    return _from_blocks("standard input", read_blocks(sys.stdin.buffer), None)


def _from_argument(text: str) -> Prompt:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("the prompt is not UTF-8 text; put it into a file and give that with --file") from None
    return _from_blocks("the prompt", iter([text] if text else []), size)


def _from_file(name: str) -> Prompt:
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"--file {name} is a folder; give a text file")
    if not path.exists():
        raise ValueError(f"there is no file {name}; check the name, or use - for standard input")
    return _from_blocks(name, read_blocks(path), path.stat().st_size if path.is_file() else None)


def _from_blocks(name: str, blocks: Iterator[str], size: int | None) -> Prompt:
    first = next(blocks, "")
    if not first:
        raise ValueError(f"{name} is empty; give at least one word to begin with")
    return Prompt(name, first, blocks, size)
