"""Extrapolation: perplexity against position over whole books, far past the trained length.

A book is tokenized whole (with the tokenizer's opening token, if it has one) and its first `length` tokens are read
from an empty state in one go; shorter books are left out. Two metrics by position: `perplexity` of the `bin` tokens
that end there, and `running perplexity` of all tokens up to there. The first token of a book is not predicted. `full`
reads as far as `full_tokens` and the free memory allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...hf.cache import geometry
from .. import data, metrics
from ..positions import GAPS
from ..prompts import Tools
from ..task import Metric, Output, Row, Sample, Sums, Task


@dataclass(frozen=True)
class Settings:
    length: int = 70_000
    bin: int = 1_000
    positions: tuple[str, ...] = ("plain",)
    piece: int = 256  # tokens between two turns of the keys, where positions are not plain; 1 is exact
    full_tokens: int = 0  # 0: as far as memory allows
    books: int = 0  # 0: all that are long enough

    def __post_init__(self) -> None:
        if self.bin < 1 or self.length < 2 * self.bin:
            raise ValueError(f"length is {self.length} and bin {self.bin}; length must be at least twice bin, bin 1")
        if self.piece < 1:
            raise ValueError(f"piece is {self.piece}; it must be at least 1")
        strange = [name for name in self.positions if name not in GAPS]
        if strange or not self.positions:
            raise ValueError(f"positions has {strange[:1] or 'nothing'}; allowed: {', '.join(GAPS)}")


def task(settings: Settings, tools: Tools) -> Task:
    def score(sample: Sample, output: Output) -> list[Row]:
        assert output.nll is not None
        return rows(output.nll.astype(np.float64), settings.bin, sample.positions)

    far = cache(lambda: _full_reach(settings, tools))  # asked once: memory that this run takes is not to count
    running = replace(metrics.perplexity(), name="running perplexity", value=_running, needs=("nll so far",))
    bins = Metric("perplexity", metrics.perplexity().value, ("nll",))
    return Task(
        "extrapolation",
        lambda: _samples(settings, tools),
        lambda sample, _: sample.content,
        score,
        (bins, running),
        piece=settings.piece,
        reach=lambda policy: far() if policy == "full" else None,
    )


def _running(sums: Sums) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = sums["nll so far"] / sums["tokens so far"]
    return np.exp(mean)


def rows(nll: NDArray[np.float64], size: int, positions: str) -> list[Row]:
    """nll [T - 1] in bins that end at size, 2 x size, ... tokens; the first bin lacks the first token."""
    made = []
    for end in range(size, len(nll) + 2, size):
        start = max(0, end - size - 1)
        columns = {
            "nll": float(nll[start : end - 1].sum()),
            "tokens": float(end - 1 - start),
            "nll so far": float(nll[: end - 1].sum()),
            "tokens so far": float(end - 1),
        }
        made.append(Row(columns, {"positions": positions, "position": end}))
    return made


def _samples(settings: Settings, tools: Tools) -> Iterator[Sample]:
    taken = 0
    for book in data.books(tools.data):
        ids = tools.opening() + tools.encode(book.text)
        if len(ids) < settings.length or (settings.books and taken >= settings.books):
            continue
        taken += 1
        for positions in settings.positions:
            part = np.asarray(ids[: settings.length], dtype=np.int32)
            yield Sample(f"{book.name}@{positions}", book.name, part, positions)


def _full_reach(settings: Settings, tools: Tools) -> int:
    """How many tokens of one book the plain model may hold: half of the free memory, and never past `full_tokens`."""
    each = sum(layer.slot_bytes(tools.model.dtype) for layer in geometry(tools.model))
    fits = free_bytes(tools.device) // 2 // each
    return max(2, min(settings.length, fits, settings.full_tokens or settings.length))


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return free[0] if free else 4 << 30
