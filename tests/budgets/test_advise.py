"""Advice on a tiny random model: the bound, the bisection, early stops, and what a capacity is worth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn.budgets.advise import Reader, Worth, grid, interval, sized, smallest, worth
from msrnn.budgets.tolerance import Bound
from msrnn.eval.scoring import token_nll
from msrnn.hf.cost import Cost

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "text, nats", [("0.4", math.log(10.4 / 10)), ("5%", math.log(1.05)), (" .5 % ", math.log(1.005))]
)
def test_a_bound_in_points_or_per_cent(text: str, nats: float) -> None:
    assert Bound.parse(text).nats(10.0) == pytest.approx(nats)


@pytest.mark.parametrize("text", ["", "0", "-1", "5pc", "%", "0%", "1e3", "nan"])
def test_what_is_no_bound(text: str) -> None:
    with pytest.raises(ValueError, match="is no bound; write perplexity points"):
        Bound.parse(text)


def test_the_grid_has_four_sizes_per_doubling_and_ends_with_everything() -> None:
    assert grid(64)[:5] == [16, 20, 24, 28, 32]
    assert grid(64)[-1] == 64
    assert grid(10) == [10]
    assert grid(2048) == sorted(set(grid(2048)))
    assert max(b / a for a, b in zip(grid(4096)[4:], grid(4096)[5:], strict=False)) < 1.3


def test_the_interval_is_students() -> None:
    assert interval([1.0, 2.0]) == (-math.inf, math.inf)
    low, high = interval([1.0, 2.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - low == pytest.approx(2 * 9.925 / math.sqrt(3))
    assert interval([0.5] * 40) == (0.5, 0.5)


def chunks(count: int = 6, length: int = 128) -> torch.Tensor:
    return torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(1))


def test_the_smallest_capacity_inside_is_found_and_the_next_is_outside(llama: Any) -> None:
    reader = Reader(llama(), chunks(), batch=2)
    everything = [reader.judge("window+4", size, math.inf).mean for size in grid(128)[:-1]]
    bound = Bound(points=reader.perplexity * math.expm1(sorted(everything)[len(everything) // 2]))
    found = smallest(reader, "window+4", bound)
    nll = token_nll(reader.model, reader.chunks, sized("window+4", found.capacity, 3)).double().mean(1)
    assert found.inside
    assert float(nll.mean()) - math.log(reader.perplexity) <= bound.nats(reader.perplexity) + 1e-9 or found.chunks < 6
    below = grid(128)[grid(128).index(found.capacity) - 1]
    assert found.capacity == 16 or not reader.judge("window+4", below, bound.nats(reader.perplexity)).inside


def test_reading_stops_when_the_answer_is_clear(llama: Any) -> None:
    told: list[tuple[str, int]] = []
    reader = Reader(llama(), chunks(8), batch=1, told=lambda who, tokens: told.append((who, tokens)))
    assert told == [("full", 128)] * 8
    far = reader.judge("tova", 16, 100.0)
    assert (far.chunks, far.inside) == (3, True)
    near = reader.judge("tova", 16, far.mean)
    assert near.chunks > 3
    assert reader.judge("tova", 16, -100.0).inside is False


def test_where_nothing_smaller_is_enough_full_is_the_answer(llama: Any) -> None:
    reader = Reader(llama(), chunks(4), batch=4)
    reader.full = [loss - 1.0 for loss in reader.full]  # as if the full model were far better
    assert smallest(reader, "tova", Bound(points=0.001)).capacity == 128


def test_sizes_a_kind_cannot_have_are_left_out(llama: Any, tmp_path: Path) -> None:
    reader = Reader(llama(), chunks(4), batch=4)
    assert smallest(reader, "tova+30", Bound(share=1000.0)).capacity >= 30
    with pytest.raises(ValueError, match="unknown policy 'tovo:"):
        smallest(reader, "tovo", Bound(share=0.1))
    file = tmp_path / "p.json"
    file.write_text('{"capacities": [4, 8, 12], "average": 8, "curves": [[[16, 1.0], [64, 0.1]]]}')
    with pytest.raises(ValueError, match=r"p\.json has no capacities for an average of 44: zip"):
        smallest(reader, f"tova,profile={file}", Bound(share=0.1))


def test_worth_follows_from_bytes() -> None:
    value = Worth(Cost(state=10, full=100, slot=1, length=100), weights=1000, memory=2000)
    assert value.batches == (100, 10)
    assert value.single_gain == pytest.approx(1100 / 1010)
    assert value.batch_gain == pytest.approx((100 / 2000) / (10 / 2000))
    assert Worth(value.price, 1000, 1050).batch_gain is None


def test_worth_of_a_capacity(llama: Any) -> None:
    reader = Reader(llama(), chunks(4), batch=4)
    small, whole = (worth(reader, "tova", size, 1 << 30) for size in (16, 128))
    assert small.price.state < whole.price.state
    assert small.price.full == whole.price.full
    assert small.weights == 4 * reader.model.num_parameters()
