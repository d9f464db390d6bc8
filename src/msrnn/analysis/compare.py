"""Two policies on the same texts: their difference, with an interval that resamples texts for both at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..eval.record import Record

DRAWS = 2000


class Excess(NamedTuple):
    """How much larger one perplexity is than another: 0.1 is 10 %."""

    value: float
    low: float | None
    high: float | None


def excess(record: Record, reference: Record) -> Excess | None:
    """Of a perplexity over the reference's, text by text; None where they were not measured on the same texts."""
    shared = sorted(record.parts)
    if not shared or shared != sorted(reference.parts):
        return None
    ours, theirs = _columns(record, shared), _columns(reference, shared)
    value = float(_ratio(ours.sum(0), theirs.sum(0)))
    if len(shared) < 2:
        return Excess(value, None, None)
    chance = np.full(len(shared), 1 / len(shared))
    picks = np.random.default_rng(record.seed).multinomial(len(shared), chance, size=DRAWS)
    low, high = np.percentile(_ratio(picks @ ours, picks @ theirs), [2.5, 97.5])
    return Excess(value, float(low), float(high))


def _columns(record: Record, groups: list[str]) -> NDArray[np.float64]:
    """[groups, 2]: nats and tokens."""
    return np.array([[record.parts[group][name] for name in ("nll", "tokens")] for group in groups], dtype=np.float64)


def _ratio(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., 2] each -> the ratio of the perplexities, less 1."""
    made: NDArray[np.float64] = np.exp(ours[..., 0] / ours[..., 1] - theirs[..., 0] / theirs[..., 1]) - 1
    return made
