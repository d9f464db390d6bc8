"""The text a command is given (in the command line, a file or standard input), and reading it into a state."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..system.text import read_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from ..rnn import RNN, RNNState


@dataclass
class Source:
    """A text that is read once, block by block. `size` is its bytes, None while nobody knows."""

    name: str
    first: str
    rest: Iterator[str]
    size: int | None

    @property
    def blocks(self) -> Iterator[str]:
        return chain([self.first], self.rest)

    def estimate(self, tokenizer: Any) -> int | None:
        """How many tokens it has: counted for a short text, guessed from the first block for a long one."""
        if self.size is None:
            return None
        count = len(tokenizer(self.first, verbose=False)["input_ids"])
        return max(count, round(count * self.size / len(self.first.encode())))


def open_source(arguments: Namespace) -> Source:
    """Find the text, and see that there is some, before anything heavy begins."""
    if arguments.prompt is not None and arguments.file is not None:
        raise ValueError("a prompt and --file were both given; give one of them (--question asks about a file)")
    if arguments.file is not None and arguments.file != "-":
        return _file(arguments.file)
    if arguments.prompt is not None and arguments.prompt != "-":
        return _prompt(arguments.prompt)
    if sys.stdin is None or (arguments.prompt is None and arguments.file is None and sys.stdin.isatty()):
        raise ValueError("there is no text; give a prompt, --file FILE, or pipe it in")
    return _begin("standard input", read_blocks(sys.stdin.buffer), None)


def _prompt(text: str) -> Source:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("the prompt is not UTF-8 text; put it into a file and give that with --file") from None
    return _begin("the prompt", iter([text] if text else []), size)


def _file(name: str) -> Source:
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"--file {name} is a folder; give a text file")
    if not path.exists():
        raise ValueError(f"there is no file {name}; check the name, or use - for standard input")
    return _begin(name, read_blocks(path), path.stat().st_size if path.is_file() else None)


def _begin(name: str, blocks: Iterator[str], size: int | None) -> Source:
    first = next(blocks, "")
    if not first:
        raise ValueError(f"{name} is empty; give at least one word to begin with")
    return Source(name, first, blocks, size)


def feed(
    rnn: RNN, pieces: Iterable[list[int]], state: RNNState, *, total: int | None = None, quiet: bool = False
) -> tuple[Tensor | None, RNNState]:
    """Read pieces of one sequence, with a progress bar when that takes long."""
    import torch

    logits = None
    with progress(total, quiet) as bar:
        for piece in pieces:
            with beyond(rnn):
                logits, state = rnn.step(torch.tensor([piece], device=rnn.device), state)
            bar.update(len(piece))
    return logits, state


@contextmanager
def beyond(rnn: RNN) -> Iterator[None]:
    """Learned position embeddings have an end."""
    try:
        yield
    except IndexError as error:
        known = getattr(rnn.model.config, "max_position_embeddings", "so many")
        raise ValueError(f"the model knows {known} positions and no more; give a shorter text") from error


def progress(total: int | None, quiet: bool) -> Any:
    from tqdm import tqdm

    seen = sys.stderr.isatty()  # in a log, a line now and then is enough
    return tqdm(
        total=total,
        desc="reading",
        unit="tok",
        leave=False,
        disable=quiet,
        delay=0.5 if seen else 10,
        mininterval=0.1 if seen else 10,
    )
