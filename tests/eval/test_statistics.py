"""The bootstrap against what is known by hand, and Student's t against a table."""

from __future__ import annotations

import math

import numpy as np
import pytest

from msrnn.eval.statistics import bootstrap, mean_interval


def ratio(sums):
    return sums[0] / sums[1]


def test_the_value_is_the_statistic_of_the_sums():
    value, low, high = bootstrap([np.array([1.0, 5.0]), np.array([2.0, 2.0])], ratio, seed=0)
    assert value == 1.5
    assert (low, high) == (0.5, 2.5)  # one group drawn twice, a quarter of the draws each


def test_groups_are_drawn_whole_and_together():
    """Two columns that differ by the same factor in every group have that ratio in every draw."""
    column = np.random.default_rng(0).random(20)
    interval = bootstrap([3 * column, column], ratio, seed=0)
    assert interval == (pytest.approx(3.0),) * 3


def test_the_draws_are_numpys_multinomial_of_the_seed():
    column, ones = np.arange(5.0), np.ones(5)
    counts = np.random.default_rng(7).multinomial(5, np.full(5, 0.2), size=300)
    low, high = np.percentile(counts @ column / 5, [2.5, 97.5])
    assert bootstrap([column, ones], ratio, seed=7, draws=300) == (2.0, low, high)


def test_draws_without_a_value_are_left_out():
    interval = bootstrap([np.array([0.0, 1.0]), np.array([0.0, 1.0])], ratio, seed=0)
    assert interval == (1.0, 1.0, 1.0)  # the first group alone is 0 / 0


def test_one_group_has_no_interval():
    assert bootstrap([np.array([3.0]), np.array([2.0])], ratio, seed=0) == (1.5, None, None)


def test_the_interval_of_a_mean_is_students():
    assert mean_interval([1.0, 2.0]) == (-math.inf, math.inf)
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - low == pytest.approx(2 * 9.925 / math.sqrt(3))
    assert mean_interval([0.5] * 40) == (0.5, 0.5)
