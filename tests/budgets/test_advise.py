"""Advice on a tiny random model: the tolerance, the bisection, early stops, and what a capacity saves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn.budgets.advise import Comparator, Savings, grid, savings, sized, smallest
from msrnn.budgets.tolerance import Tolerance
from msrnn.eval.perplexity import token_nll
from msrnn.hf.cost import Cost

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "text, nats", [("0.4", math.log(10.4 / 10)), ("5%", math.log(1.05)), (" .5 % ", math.log(1.005))]
)
def test_a_bound_in_points_or_per_cent(text: str, nats: float) -> None:
    assert Tolerance.parse(text).nats(10.0) == pytest.approx(nats)


@pytest.mark.parametrize("text", ["", "0", "-1", "5pc", "%", "0%", "1e3", "nan"])
def test_what_is_no_bound(text: str) -> None:
    with pytest.raises(ValueError, match="is not a tolerance above 0; write perplexity points"):
        Tolerance.parse(text)


def test_the_grid_has_four_sizes_per_doubling_and_ends_with_everything() -> None:
    assert grid(64)[:5] == [16, 20, 24, 28, 32]
    assert grid(64)[-1] == 64
    assert grid(10) == [10]
    assert grid(2048) == sorted(set(grid(2048)))
    assert max(b / a for a, b in zip(grid(4096)[4:], grid(4096)[5:], strict=False)) < 1.3


def chunks(count: int = 6, length: int = 128) -> torch.Tensor:
    return torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(1))


def test_the_smallest_capacity_inside_is_best_and_the_next_is_outside(llama: Any) -> None:
    comparator = Comparator(llama(), chunks(), batch=2)
    everything = [comparator.compare("window+4", size, math.inf).mean for size in grid(128)[:-1]]
    tolerance = Tolerance(points=comparator.perplexity * math.expm1(sorted(everything)[len(everything) // 2]))
    best = smallest(comparator, "window+4", tolerance)
    plan = sized("window+4", best.capacity, comparator.model)
    nll = token_nll(comparator.model, comparator.chunks, plan).double().mean(1)
    assert best.within
    assert (
        float(nll.mean()) - math.log(comparator.perplexity) <= tolerance.nats(comparator.perplexity) + 1e-9
        or best.chunks < 6
    )
    below = grid(128)[grid(128).index(best.capacity) - 1]
    assert (
        best.capacity == 16 or not comparator.compare("window+4", below, tolerance.nats(comparator.perplexity)).within
    )


def test_reading_stops_when_the_answer_is_clear(llama: Any) -> None:
    calls: list[tuple[str, int]] = []
    comparator = Comparator(
        llama(), chunks(8), batch=1, on_chunks=lambda policy, tokens: calls.append((policy, tokens))
    )
    assert calls == [("full", 128)] * 8
    far = comparator.compare("tova", 16, 100.0)
    assert (far.chunks, far.within) == (3, True)
    near = comparator.compare("tova", 16, far.mean)
    assert near.chunks > 3
    assert comparator.compare("tova", 16, -100.0).within is False


def test_where_nothing_smaller_is_enough_full_is_the_answer(llama: Any) -> None:
    comparator = Comparator(llama(), chunks(4), batch=4)
    comparator.full = [loss - 1.0 for loss in comparator.full]  # as if the full model were far better
    assert smallest(comparator, "tova", Tolerance(points=0.001)).capacity == 128


def test_sizes_a_kind_cannot_have_are_left_out(llama: Any, tmp_path: Path) -> None:
    comparator = Comparator(llama(), chunks(4), batch=4)
    assert smallest(comparator, "tova+30", Tolerance(share=1000.0)).capacity >= 30
    with pytest.raises(ValueError, match="unknown policy 'tovo:"):
        smallest(comparator, "tovo", Tolerance(share=0.1))
    file = tmp_path / "p.json"
    file.write_text('{"capacities": [4, 8, 12], "average": 8, "curves": [[[16, 1.0], [64, 0.1]]]}')
    with pytest.raises(ValueError, match=r"p\.json: \"curves\" must have pairs of a size and a loss for the same"):
        smallest(comparator, f"tova,profile={file}", Tolerance(share=0.1))


def test_savings_follow_from_bytes() -> None:
    value = Savings(Cost(state=10, full=100, slot=1, length=100), weights=1000, memory=2000)
    assert value.batches == (100, 10)
    assert value.single_speedup == pytest.approx(1100 / 1010)
    assert value.batch_speedup == pytest.approx((100 / 2000) / (10 / 2000))
    assert Savings(value.cost, 1000, 1050).batch_speedup is None


def test_savings_of_a_capacity(llama: Any) -> None:
    comparator = Comparator(llama(), chunks(4), batch=4)
    small, whole = (savings(comparator, "tova", size, 1 << 30) for size in (16, 128))
    assert small.cost.state < whole.cost.state
    assert small.cost.full == whole.cost.full
    assert small.weights == 4 * comparator.model.num_parameters()
