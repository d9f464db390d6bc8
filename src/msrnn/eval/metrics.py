"""Metrics over summed columns, with confidence intervals. ROUGE and F1 come from the libraries people compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..system.extras import install
from .statistics import Interval, bootstrap
from .task import Metric, Sums

ROUGE = ("rouge1", "rouge2", "rougeL")


def perplexity() -> Metric:
    """exp(nats / tokens), both summed over all texts: a long text weighs more than a short one."""
    return Metric("perplexity", lambda sums: np.exp(sums["nll"] / sums["tokens"]))


def mean(name: str, column: str | None = None, over: str = "count") -> Metric:
    """The sum of a column (the metric's own name unless given) over the sum of another."""
    return Metric(name, lambda sums: sums[column or name] / sums[over])


def geometric_rouge() -> Metric:
    """The cube root of the product of the three mean ROUGE scores, as ZeroSCROLLS defines it; 0 to 100."""

    def value(sums: Sums) -> NDArray[np.float64]:
        product = np.ones_like(sums["count"])
        for name in ROUGE:
            product = product * (sums[name] / sums["count"])
        return np.cbrt(product)

    return Metric("rouge", value)


def interval(parts: Mapping[str, Mapping[str, float]], metric: Metric, seed: int) -> Interval:
    """The metric over all groups, with a 95 % interval from resampling whole groups.

    `parts` has the summed columns of each group; a column that a group lacks counts as 0.
    """
    names = sorted({name for part in parts.values() for name in part})
    groups = sorted(parts)  # so that a seed means the same whatever came first
    columns = [np.array([parts[group].get(name, 0.0) for group in groups], dtype=np.float64) for name in names]
    return bootstrap(columns, lambda sums: metric.value(dict(zip(names, sums, strict=True))), seed)


def rouge(answer: str, references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, -2 and -L (F), 0 to 100, each against the best of the references."""
    scorer = _scorer()
    scores = [scorer.score(reference, answer) for reference in references]
    return {name: 100 * max(score[name].fmeasure for score in scores) for name in ROUGE}


@lru_cache(maxsize=1)
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError(f"ROUGE needs the package {error.name}; {install('eval')}") from error
    return RougeScorer(list(ROUGE), use_stemmer=False)


def f1(answer: str, references: Sequence[str]) -> float:
    """QASPER's answer F1, 0 to 100: SQuAD's token F1 (no case, punctuation, articles) with the best reference."""
    from transformers.data.metrics.squad_metrics import compute_f1, normalize_answer

    if not normalize_answer(answer):
        return 0.0  # QASPER has no empty answers; SQuAD would count one as agreement with another
    return float(100 * max(compute_f1(reference, answer) for reference in references))
