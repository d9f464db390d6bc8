"""Spending slots: known optima, noise, and curves of every shape."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrnn.budgets.allocate import allocate, convex_hull, expected_loss, interpolate, non_increasing

GRID = (16, 32, 64, 128, 256, 512, 1024)


def power(weight: float, exponent: float = 1.0) -> dict[int, float]:
    return {c: weight * c**-exponent for c in GRID}


def test_power_laws_have_a_known_optimum() -> None:
    """The least sum of w / c under a sum of c is at c proportional to the root of w."""
    weights = [1.0, 4.0, 16.0, 64.0]
    capacities = allocate([power(w) for w in weights], 1200)
    assert sum(capacities) == 1200
    roots = [w**0.5 for w in weights]
    assert capacities == pytest.approx([1200 * root / sum(roots) for root in roots], rel=0.1)


def test_a_layer_that_needs_nothing_gets_the_least() -> None:
    flat, steep = dict.fromkeys(GRID, 0.0), power(10.0)
    assert allocate([flat, steep, flat], 3 * 100) == [16, 300 - 32, 16]


def test_equal_layers_share_alike_up_to_one_step() -> None:
    capacities = allocate([power(3.0)] * 4, 4 * 128)
    assert sum(capacities) == 512
    assert max(capacities) / min(capacities) < 1.2


def test_no_choice_on_the_grid_is_better() -> None:
    curves = [power(1.0, 0.5), power(30.0, 1.5), {c: 0.2 if c < 200 else 0.01 for c in GRID}]
    total = 700
    capacities = allocate(curves, total)
    tried = (sum(curve[c] for curve, c in zip(curves, sizes, strict=True))
             for sizes in product(GRID, repeat=3) if sum(sizes) <= total)  # fmt: skip
    assert expected_loss(curves, capacities) <= min(tried) + 1e-9


def test_a_curve_with_a_cliff_is_paid_in_full_or_not_at_all() -> None:
    cliff = {16: 1.0, 32: 1.0, 64: 1.0, 128: 0.0}
    assert allocate([cliff, {16: 0.0, 128: 0.0}], 16 + 128) == [128, 16]
    (poor, rich) = allocate([cliff, power(100.0)], 16 + 64)
    assert (poor, rich) == (16, 64)


@given(st.lists(st.lists(st.floats(-0.1, 2), min_size=7, max_size=7), min_size=1, max_size=6), st.integers(16, 2000))
def test_every_slot_is_spent_within_the_curves(losses: list[list[float]], average: int) -> None:
    curves = [dict(zip(GRID, row, strict=True)) for row in losses]
    capacities = allocate(curves, average * len(curves))
    assert sum(capacities) == average * len(curves)
    assert all(16 <= c <= max(1024, average) for c in capacities)


@given(st.dictionaries(st.integers(1, 5000), st.floats(-1, 3), min_size=1, max_size=9))
def test_the_shapes_are_what_they_are_called(curve: dict[int, float]) -> None:
    points = non_increasing(curve)
    assert [c for c, _ in points] == sorted(curve)
    assert all(left[1] >= right[1] - 1e-12 >= -1e-12 for left, right in pairwise(points))
    filled = interpolate(points)
    assert set(points) <= set(filled)
    assert len({c for c, _ in filled}) == len(filled)
    hull = convex_hull(filled)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(hull)]
    assert slopes == sorted(slopes)
    assert (hull[0], hull[-1]) == (filled[0], filled[-1])


def test_noise_is_averaged_not_taken_at_its_best() -> None:
    assert non_increasing({16: 1.0, 32: 0.2, 64: 0.4, 128: 0.1}) == [(16, 1.0), (32, pytest.approx(0.3)),
                                                              (64, pytest.approx(0.3)), (128, 0.1)]  # fmt: skip


def test_too_few_slots_are_refused_and_too_many_are_shared() -> None:
    with pytest.raises(ValueError, match="31 slots are fewer than the smallest capacities of all layers, 32"):
        allocate([power(1.0)] * 2, 31)
    assert allocate([power(1.0), power(9.0)], 5001) == [2501, 2500]
