"""What a task is: samples, the prompt of one, the score of what came of it, and how scores become numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .record import Cell

Sums = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Sample:
    """One thing to measure. `group` is what it shares luck with (a book, a story): intervals resample whole groups.

    `positions` names how rotary positions are dealt out while it is read (see positions.py).
    """

    id: str
    group: str
    content: Any
    positions: str = "plain"


@dataclass(frozen=True)
class Output:
    """What a policy made of a prompt: the nats of each token but the first, or the ids and the text it wrote.

    `ended` says that the model stopped by itself, before the limit.
    """

    nll: NDArray[np.float32] | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Row:
    """Columns to be added up over samples, and the cell of the task they belong to."""

    columns: dict[str, float]
    cell: Cell = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """`value` makes the metric from the summed columns; it takes and gives arrays, one entry per resampling.

    It is left out of cells that have none of the columns it `needs`.
    """

    name: str
    value: Callable[[Sums], NDArray[np.float64]]
    needs: tuple[str, ...] = ()

    def applies(self, parts: Mapping[str, Mapping[str, float]]) -> bool:
        """Whether the columns it is made from are there."""
        return all(any(name in part for part in parts.values()) for name in self.needs)


@dataclass(frozen=True)
class Task:
    """`prompt(sample, context)`: the ids, of a prompt made for a shorter context where one is given.

    `writes` new tokens follow each prompt; with 0, the prompt itself is what is predicted, read `piece` tokens at a
    time. `reach(policy)` is how many tokens of a prompt that policy is to read at most, None for all.
    """

    name: str
    samples: Callable[[], Iterable[Sample]]
    prompt: Callable[[Sample, int | None], Sequence[int]]
    score: Callable[[Sample, Output], list[Row]]
    metrics: tuple[Metric, ...]
    writes: int = 0
    piece: int = 256
    temperature: float = 0.0
    reach: Callable[[str], int | None] = lambda policy: None
