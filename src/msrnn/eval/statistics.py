"""Confidence intervals: the one bootstrap that evaluations, figures and experiments share, and Student's t."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
Array = NDArray[np.float64]

# Student's t, two-sided 99 %, for 2, 3, ... degrees of freedom; close to the normal's 2.58 beyond
_T99 = (9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.25, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898)
_T99_BEYOND = 2.6
_FEWEST = 3  # values below which Student's t says nothing


class Interval(NamedTuple):
    """A value and its 95 % confidence interval; no interval where there is only one group to resample."""

    value: float
    low: float | None
    high: float | None


def bootstrap(
    columns: Sequence[Array], statistic: Callable[[Sequence[Array]], Array], seed: int, draws: int = DRAWS
) -> Interval:
    """columns [groups] each -> the statistic of their sums, with a 95 % interval from resampling whole groups.

    `statistic` takes the summed columns, [draws] each, and gives [draws]. All columns are resampled together, so
    columns of two policies stay paired.
    """
    value = float(statistic([column.sum(keepdims=True) for column in columns])[0])
    groups = len(columns[0])
    if groups < 2:
        return Interval(value, None, None)
    counts = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=draws)
    with np.errstate(all="ignore"):
        resampled = statistic([counts @ column for column in columns])
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 99 % interval of the mean by Student's t; infinite below three values."""
    if len(values) < _FEWEST:
        return -math.inf, math.inf
    index = len(values) - 3
    quantile = _T99[index] if index < len(_T99) else _T99_BEYOND
    half = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
