"""What a task is: samples, the prompt of each, the score of what a policy made of it, and the metrics over scores."""

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
    """One thing to measure. Samples of one `group` (a book, a story) are correlated: intervals resample whole groups.

    `positions` names how RoPE positions are assigned while it is read (see positions.py).
    """

    id: str
    group: str
    content: Any
    positions: str = "plain"


@dataclass(frozen=True)
class Output:
    """What a policy made of a prompt: the nats of each token but the first, or the ids and the text it generated.

    `ended` says that the model stopped by itself, before the limit.
    """

    nll: NDArray[np.float32] | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Row:
    """Columns to be summed over samples, and the cell of the task they belong to."""

    columns: dict[str, float]
    cell: Cell = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """`value` makes the metric from the summed columns; it takes and gives arrays, one entry per bootstrap draw.

    It is left out of cells that lack one of the columns it `needs`.
    """

    name: str
    value: Callable[[Sums], NDArray[np.float64]]
    needs: tuple[str, ...] = ()

    def applies(self, parts: Mapping[str, Mapping[str, float]]) -> bool:
        """Whether the columns it needs are there."""
        return all(any(name in part for part in parts.values()) for name in self.needs)


@dataclass(frozen=True)
class Task:
    """`prompt(sample, context)`: the ids, shortened to `context` tokens where that is not None.

    `new_tokens` are generated after each prompt; with 0, the prompt itself is scored, `piece` tokens per forward pass.
    `max_tokens(policy)` is how many tokens of a prompt that policy reads at most, None for all.
    """

    name: str
    samples: Callable[[], Iterable[Sample]]
    prompt: Callable[[Sample, int | None], Sequence[int]]
    score: Callable[[Sample, Output], list[Row]]
    metrics: tuple[Metric, ...]
    new_tokens: int = 0
    piece: int = 256
    temperature: float = 0.0
    max_tokens: Callable[[str], int | None] = lambda policy: None
