"""Two policies on the same texts: the gap between their perplexities, with a paired confidence interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..eval.record import Record
from ..eval.statistics import Interval, bootstrap


def perplexity_gap(record: Record, baseline: Record) -> Interval | None:
    """How much larger one perplexity is than another, 0.1 for 10 %; None where the texts are not the same.

    Texts are resampled for both at once, so what makes a text hard for both is not counted as a difference.
    """
    groups = sorted(record.parts)
    if not groups or groups != sorted(baseline.parts):
        return None
    columns = [
        np.array([one.parts[group][name] for group in groups], dtype=np.float64)
        for one in (record, baseline)
        for name in ("nll", "tokens")
    ]
    return bootstrap(columns, _relative_gap, record.seed)


def _relative_gap(sums: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """nats and tokens of a policy, then of the baseline -> the ratio of their perplexities, less 1."""
    nll, tokens, baseline_nll, baseline_tokens = sums
    gap: NDArray[np.float64] = np.exp(nll / tokens - baseline_nll / baseline_tokens) - 1
    return gap
