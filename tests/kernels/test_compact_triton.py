"""The Triton compaction, interpreted on the CPU, equals the plain one."""

from __future__ import annotations

import pytest
import torch

from msrnn.core.slots import NEVER
from msrnn.kernels.torch import compact as torch_compact
from tests.support.interpreted import INTERPRETED, run_cases

if INTERPRETED:
    from msrnn.kernels.triton import compact as triton_compact


@pytest.mark.slow
def test_interpreted() -> None:
    run_cases(__file__)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scored", [False, True])
def case_equals_torch(seed: int, scored: bool) -> None:
    """Keys, values and gains; every third seed keeps more than there is room for."""
    generator = torch.Generator().manual_seed(seed)
    batch, units, stored, capacity, size = [(1, 1, 2, 7, 5), (2, 1, 3, 20, 4), (2, 2, 4, 9, 8)][seed % 3]
    chunk = 1 + 3 * seed
    used, room = capacity + chunk, capacity + chunk + seed % 2
    order = [torch.randperm(room, generator=generator) for _ in range(batch * units)]
    positions = torch.stack(order).view(batch, units, room)
    expiry = torch.full((batch, units, used), NEVER)
    for row in expiry.view(-1, used):
        row[torch.randperm(used, generator=generator)[: chunk + seed % 3 - 1]] = 5
    positions[..., 1][torch.rand(batch, units, generator=generator) < 0.3] = -1
    scores = torch.rand(batch, units, room, generator=generator) if scored else None
    rows = tuple(torch.randn(batch, stored, room, n, generator=generator) for n in (size, size + 3, 1))
    expected = [None if tensor is None else tensor.clone() for tensor in (positions, scores, *rows)]
    torch_compact.compact(expected[0], expected[1], tuple(expected[2:]), expiry, used, capacity)
    triton_compact.compact(positions, scores, rows, expiry, used, capacity)
    for tensor, other in zip((positions, scores, *rows), expected, strict=True):
        if other is not None:
            assert torch.equal(tensor[:, :, :capacity], other[:, :, :capacity])


def case_survivors_without_room_are_dropped() -> None:
    """As after logits that are NaN: nothing is written outside, the first in line move."""
    positions, expiry = torch.arange(12).view(1, 1, 12), torch.full((1, 1, 12), NEVER)
    expiry[0, 0, 2] = expiry[0, 0, 9] = 5  # seven of eight stay, and three of four behind them
    rows = (torch.arange(12.0).view(1, 1, 12, 1).clone(),)
    triton_compact.compact(positions, None, rows, expiry, 12, 8)
    assert positions[0, 0, :8].tolist() == [0, 1, 8, 3, 4, 5, 6, 7]
    assert rows[0][0, 0, :, 0].tolist() == [0, 1, 8, 3, 4, 5, 6, 7, 8, 9, 10, 11]
