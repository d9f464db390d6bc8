"""From scores to numbers with intervals. ROUGE and F1 come from the libraries people compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .task import Metric, Sums

DRAWS = 2000
ROUGE = ("rouge1", "rouge2", "rougeL")


def perplexity() -> Metric:
    """exp(nats / tokens), both summed over everything: long texts weigh more than short ones."""
    return Metric("perplexity", lambda sums: np.exp(sums["nll"] / sums["tokens"]))


def mean(name: str, column: str | None = None, over: str = "count") -> Metric:
    return Metric(name, lambda sums: sums[column or name] / sums[over])


def geometric_rouge() -> Metric:
    """The cube root of the product of the three mean ROUGE scores, as ZeroSCROLLS defines it; 0 to 100."""

    def value(sums: Sums) -> NDArray[np.float64]:
        product = np.ones_like(sums["count"])
        for name in ROUGE:
            product = product * (sums[name] / sums["count"])
        return np.cbrt(product)

    return Metric("rouge", value)


def interval(
    parts: Mapping[str, Mapping[str, float]], metric: Metric, seed: int, draws: int = DRAWS
) -> tuple[float, float | None, float | None]:
    """The value over all groups, and the 95 % bootstrap interval from resampling whole groups."""
    table = _table(parts)
    value = float(metric.value({name: column.sum(keepdims=True) for name, column in table.items()})[0])
    groups = len(parts)
    if groups < 2:
        return value, None, None
    picks = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=draws)
    with np.errstate(all="ignore"):
        drawn = metric.value({name: picks @ column for name, column in table.items()})
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return value, float(low), float(high)


def _table(parts: Mapping[str, Mapping[str, float]]) -> dict[str, NDArray[np.float64]]:
    names = sorted({name for part in parts.values() for name in part})
    order = sorted(parts)  # so that a seed means the same whatever came first
    return {name: np.array([parts[group].get(name, 0.0) for group in order], dtype=np.float64) for name in names}


def rouge(answer: str, references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, -2 and -L (F), 0 to 100, each against the reference that suits it best."""
    scorer = _scorer()
    scores = [scorer.score(reference, answer) for reference in references]
    return {name: 100 * max(score[name].fmeasure for score in scores) for name in ROUGE}


@lru_cache(maxsize=1)
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError(f"ROUGE needs the package {error.name}; pip install 'msrnn[eval]'") from error
    return RougeScorer(list(ROUGE), use_stemmer=False)


def f1(answer: str, references: Sequence[str]) -> float:
    """QASPER's answer F1, 0 to 100: SQuAD's token F1 (no case, punctuation, articles) with the best reference."""
    from transformers.data.metrics.squad_metrics import compute_f1, normalize_answer

    if not normalize_answer(answer):
        return 0.0  # QASPER has no empty answers; SQuAD would count one as agreement with another
    return float(100 * max(compute_f1(reference, answer) for reference in references))


Scorer = Callable[[str, Sequence[str]], float]
