"""Closing the gaps after a chunk, in plain PyTorch and in Numba: by hand, and both alike on random cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrnn.core.slots import NEVER
from msrnn.kernels.numba import compact as numba_compact
from msrnn.kernels.torch import compact as torch_compact

Compact = Callable[[Tensor, Tensor | None, tuple[Tensor, ...], Tensor, int, int], None]
both = pytest.mark.parametrize("compact", [torch_compact.compact, numba_compact.compact], ids=["torch", "numba"])


def columns(used: int, evicted: list[int]) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    """Positions, scores, rows and expiry of columns 0 to used - 1, each of which holds its own number."""
    number = torch.arange(used)
    expiry = torch.full((1, 1, used), NEVER)
    expiry[..., evicted] = 5
    return number.view(1, 1, -1).clone(), number.float().view(1, 1, -1), (number.float().view(1, 1, -1, 1),), expiry


@both
def test_survivors_fill_the_gaps_in_order(compact: Compact) -> None:
    positions, scores, rows, expiry = columns(9, [1, 4, 7])
    compact(positions, scores, rows, expiry, 9, 6)
    assert positions[0, 0, :6].tolist() == [0, 6, 2, 3, 8, 5]
    assert scores[0, 0, :6].tolist() == [0, 6, 2, 3, 8, 5]
    assert rows[0][0, 0, :6, 0].tolist() == [0, 6, 2, 3, 8, 5]


@both
def test_survivors_without_room_are_dropped(compact: Compact) -> None:
    """As after logits that are NaN: the first in line move, what is held stays, nothing is written outside."""
    positions, scores, rows, expiry = columns(12, [2, 9])
    compact(positions, scores, rows, expiry, 12, 8)
    assert positions[0, 0, :8].tolist() == [0, 1, 8, 3, 4, 5, 6, 7]
    assert rows[0][0, 0, :, 0].tolist() == [0, 1, 8, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert scores[0, 0].tolist() == rows[0][0, 0, :, 0].tolist()


@both
@pytest.mark.parametrize("end", [0, 6])
def test_evicted_columns_become_empty_where_nothing_moves(compact: Compact, end: int) -> None:
    positions, scores, rows, expiry = columns(6, [1, 4])
    compact(positions, scores, rows, expiry, 6, end)
    assert positions[0, 0].tolist() == [0, -1, 2, 3, -1, 5]
    assert rows[0][0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    units=st.sampled_from([1, 2]),
    share=st.integers(1, 2),
    end=st.integers(0, 9),
    more=st.integers(0, 9),
    spare=st.integers(0, 2),
    staying=st.floats(0, 1),
    scored=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_numba_equals_torch(
    seed: int, batch: int, units: int, share: int, end: int, more: int, spare: int, staying: float, scored: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Any number of survivors, too many among them; heads that share a unit; memory behind the columns in use."""
    generator, used = torch.Generator().manual_seed(seed), max(1, end + more)
    end = min(end, used)
    positions = torch.rand(batch, units, used + spare, generator=generator).argsort(-1)
    positions[torch.rand(positions.shape, generator=generator) < 0.2] = -1
    alive = torch.rand(batch, units, used, generator=generator) < staying
    expiry = torch.where(alive, NEVER, torch.randint(0, 50, alive.shape, generator=generator))
    scores = torch.rand(positions.shape, generator=generator) if scored else None
    rows = tuple(
        torch.randn(batch, units * share, used + spare, size, generator=generator).to(kind)
        for size, kind in ((3, dtype), (2, dtype), (1, torch.float32))
    )
    expected = [None if tensor is None else tensor.clone() for tensor in (positions, scores, *rows)]
    torch_compact.compact(expected[0], expected[1], tuple(expected[2:]), expiry, used, end)
    numba_compact.compact(positions, scores, rows, expiry, used, end)
    part = slice(0, end or used)
    for tensor, other in zip((positions, scores, *rows), expected, strict=True):
        if other is not None:
            assert torch.equal(tensor[:, :, part], other[:, :, part])
            assert torch.equal(tensor[:, :, used:], other[:, :, used:])


def test_rows_move_on_several_threads() -> None:
    """So many elements that the work is shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        positions = torch.arange(96).expand(3, 2, 96).clone()
        expiry = torch.full((3, 2, 96), NEVER)
        expiry[:, 0, :32], expiry[:, 1, 32:64] = 5, 5
        rows = (torch.randn(3, 4, 96, 4096),)
        expected = (positions.clone(), rows[0].clone())
        torch_compact.compact(expected[0], None, expected[1:], expiry, 96, 64)
        numba_compact.compact(positions, None, rows, expiry, 96, 64)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(positions[:, :, :64], expected[0][:, :, :64])
    assert torch.equal(rows[0][:, :, :64], expected[1][:, :, :64])
