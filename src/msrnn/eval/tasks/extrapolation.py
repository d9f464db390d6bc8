"""Extrapolation: perplexity against position over whole books, far past the trained length.

A book is tokenized whole (with BOS, if the tokenizer has one) and its first `length` tokens are read from an empty
state; shorter books are left out. Two metrics by position: `perplexity` of the `bin` tokens that end there, and
`running perplexity` of all tokens up to there. The first token of a book is not predicted. `full` reads as far as
`full_tokens` and the free memory allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from ...hf.geometry import geometry
from .. import data, metrics
from ..positions import GAPS
from ..prompts import Resources
from ..task import Metric, Output, Row, Sample, Sums, Task


@dataclass(frozen=True)
class Settings:
    length: int = 70_000
    bin: int = 1_000
    positions: tuple[str, ...] = ("plain",)
    piece: int = 256  # tokens between two re-rotations of the keys, where positions are not plain; 1 is exact
    full_tokens: int = 0  # 0: as far as memory allows
    books: int = 0  # 0: all that are long enough

    def __post_init__(self) -> None:
        if self.bin < 1 or self.length < 2 * self.bin:
            raise ValueError(f"length is {self.length} and bin {self.bin}; length must be at least twice bin, bin 1")
        if self.piece < 1:
            raise ValueError(f"piece is {self.piece}; it must be at least 1")
        unknown = [name for name in self.positions if name not in GAPS]
        if unknown or not self.positions:
            raise ValueError(f"positions has {unknown[:1] or 'nothing'}; allowed: {', '.join(GAPS)}")


def task(settings: Settings, resources: Resources) -> Task:
    def score(sample: Sample, output: Output) -> list[Row]:
        assert output.nll is not None
        return rows(output.nll.astype(np.float64), settings.bin, sample.positions)

    full_tokens = cache(lambda: _full_tokens(settings, resources))  # once: memory that this run uses must not count
    running = replace(metrics.perplexity(), name="running perplexity", value=_running, needs=("nll so far",))
    bins = Metric("perplexity", metrics.perplexity().value, ("nll",))
    return Task(
        "extrapolation",
        lambda: _samples(settings, resources),
        lambda sample, _: sample.content,
        score,
        (bins, running),
        piece=settings.piece,
        max_tokens=lambda policy: full_tokens() if policy == "full" else None,
    )


def _running(sums: Sums) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = sums["nll so far"] / sums["tokens so far"]
    return np.exp(mean)


def rows(nll: NDArray[np.float64], size: int, positions: str) -> list[Row]:
    """nll [T - 1] in bins that end at size, 2 x size, ... tokens; the first bin lacks the first token."""
    bins = []
    for end in range(size, len(nll) + 2, size):
        start = max(0, end - size - 1)
        columns = {
            "nll": float(nll[start : end - 1].sum()),
            "tokens": float(end - 1 - start),
            "nll so far": float(nll[: end - 1].sum()),
            "tokens so far": float(end - 1),
        }
        bins.append(Row(columns, {"positions": positions, "position": end}))
    return bins


def _samples(settings: Settings, resources: Resources) -> Iterator[Sample]:
    count = 0
    for book in data.books(resources.data):
        ids = resources.bos_ids() + resources.encode(book.text)
        if len(ids) < settings.length or (settings.books and count >= settings.books):
            continue
        count += 1
        for positions in settings.positions:
            start = np.asarray(ids[: settings.length], dtype=np.int32)
            yield Sample(f"{book.name}@{positions}", book.name, start, positions)


def _full_tokens(settings: Settings, resources: Resources) -> int:
    """How many tokens of one book the plain model may hold: half of the free memory, and never past `full_tokens`."""
    token_bytes = sum(layer.slot_bytes(resources.model.dtype) for layer in geometry(resources.model))
    tokens = free_bytes(resources.device) // 2 // token_bytes
    return max(2, min(settings.length, tokens, settings.full_tokens or settings.length))


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
