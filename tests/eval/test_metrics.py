"""Metrics over summed columns, their intervals, ROUGE and F1."""

from __future__ import annotations

import numpy as np
import pytest

from msrnn.eval import metrics


def test_perplexity_is_of_all_tokens_together():
    parts = {"a": {"nll": 10.0, "tokens": 5.0}, "b": {"nll": 2.0, "tokens": 1.0}}
    value, low, high = metrics.interval(parts, metrics.perplexity(), 0)
    assert value == pytest.approx(np.exp(2.0))
    assert low == high == pytest.approx(np.exp(2.0))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    source, hits = np.random.default_rng(1), 0
    for seed in range(200):
        parts = {str(i): {"x": float(v), "count": 1.0} for i, v in enumerate(source.normal(3, 1, 30))}
        _, low, high = metrics.interval(parts, metrics.mean("x"), seed)
        hits += low <= 3 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_interval_is_the_seeds_and_not_the_orders():
    parts = {str(i): {"x": i**0.5, "count": 1.0} for i in range(12)}
    reordered = dict(reversed(parts.items()))
    same = [metrics.interval(p, metrics.mean("x"), 3) for p in (parts, reordered)]
    assert same[0] == same[1] != metrics.interval(parts, metrics.mean("x"), 4)


def test_one_group_has_no_interval():
    assert metrics.interval({"a": {"x": 3.0, "count": 2.0}}, metrics.mean("x"), 0) == (1.5, None, None)


def test_rouge_takes_the_best_reference_and_the_geometric_mean_of_means():
    pytest.importorskip("rouge_score", reason="the extra 'eval' is not installed")
    scores = metrics.rouge("the cat sat on the mat", ["a dog", "the cat sat on the mat"])
    assert scores == {"rouge1": 100.0, "rouge2": 100.0, "rougeL": 100.0}
    half = metrics.rouge("the cat", ["the dog"])
    assert half["rouge1"] == pytest.approx(50)
    assert half["rouge2"] == 0
    sums = {"rouge1": 80.0, "rouge2": 20.0, "rougeL": 40.0, "count": 2.0}
    assert metrics.interval({"a": sums}, metrics.geometric_rouge(), 0)[0] == pytest.approx((40 * 10 * 20) ** (1 / 3))


@pytest.mark.parametrize(
    "answer, right, f1",
    [
        ("The Cat.", ["cat"], 100),
        ("unanswerable", ["Unanswerable"], 100),
        ("yes", ["no"], 0),
        ("", ["."], 0),
        ("blue cat", ["red cat", "a blue cat indeed"], 80),
    ],
)
def test_f1_is_qaspers(answer, right, f1):
    assert metrics.f1(answer, right) == pytest.approx(f1)


def test_a_mean_is_over_the_column_that_it_names():
    sums = {"a": {"wins": 3.0, "judged": 4.0, "count": 10.0}}
    assert metrics.interval(sums, metrics.mean("wins", over="judged"), 0).value == 0.75
    assert metrics.interval(sums, metrics.mean("win rate", "wins"), 0).value == 0.3


def test_a_column_that_a_group_lacks_counts_as_nothing():
    parts = {"a": {"wins": 1.0, "count": 1.0}, "b": {"count": 3.0}}
    assert metrics.interval(parts, metrics.mean("wins"), 0).value == 0.25


def test_a_metric_applies_where_its_columns_are():
    metric = metrics.Metric("wins", metrics.mean("wins").value, ("judged",))
    assert metric.applies({"a": {}, "b": {"judged": 1.0}})
    assert not metric.applies({"a": {"count": 1.0}})
