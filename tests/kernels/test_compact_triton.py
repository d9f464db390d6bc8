"""The Triton compaction, interpreted on the CPU, equals the plain one."""

from __future__ import annotations

import pytest
import torch

from msrnn.kernels.torch import scan as eager
from tests.support.interpreted import INTERPRETED, run_cases

if INTERPRETED:
    from msrnn.kernels.triton import compact as gpu_rows


def test_interpreted() -> None:
    run_cases(__file__)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scored", [False, True])
def case_equals_eager(seed: int, scored: bool) -> None:
    made = torch.Generator().manual_seed(seed)
    batch, units, stored, capacity, size = [(1, 1, 2, 7, 5), (2, 1, 3, 20, 4), (2, 2, 4, 9, 8)][seed % 3]
    chunk = 1 + 3 * seed
    used, room = capacity + chunk, capacity + chunk + seed % 2
    births = torch.stack([torch.randperm(room, generator=made) for _ in range(batch * units)]).view(batch, units, room)
    expiry = torch.full((batch, units, used), eager.NEVER)
    for row in expiry.view(-1, used):  # as many stay as there is room for, or fewer
        row[torch.randperm(used, generator=made)[: chunk + seed % 3]] = 5
    births[..., 1][torch.rand(batch, units, generator=made) < 0.3] = -1
    scores = torch.rand(batch, units, room, generator=made) if scored else None
    rows = tuple(torch.randn(batch, stored, room, n, generator=made) for n in (size, size + 3))
    want = [tensor if tensor is None else tensor.clone() for tensor in (births, scores, *rows)]
    eager.compact(want[0], want[1], (want[2], want[3]), expiry, used, capacity)
    gpu_rows.compact(births, scores, rows, expiry, used, capacity)
    for mine, theirs in zip((births, scores, *rows), want, strict=True):
        if theirs is not None:
            assert torch.equal(mine[:, :, :capacity], theirs[:, :, :capacity])


def case_no_more_move_than_there_is_room_for() -> None:
    """As after logits that are not numbers: nobody is written outside, the first in line move."""
    births, expiry = torch.arange(12).view(1, 1, 12), torch.full((1, 1, 12), eager.NEVER)
    expiry[0, 0, 2] = expiry[0, 0, 9] = 5  # seven of eight stay, and three of four behind them
    rows = (torch.arange(12.0).view(1, 1, 12, 1).clone(),)
    gpu_rows.compact(births, None, rows, expiry, 12, 8)
    assert births[0, 0, :8].tolist() == [0, 1, 8, 3, 4, 5, 6, 7]
    assert rows[0][0, 0, :, 0].tolist() == [0, 1, 8, 3, 4, 5, 6, 7, 8, 9, 10, 11]
