"""Which columns a row sees: by hand, and the compiled twin equal to plain PyTorch on random cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrnn.core.attention import OutOfRange
from msrnn.core.slots import NEVER
from msrnn.kernels.numba import mask as numba_mask
from msrnn.kernels.torch import mask as torch_mask

Mask = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
both = pytest.mark.parametrize(
    "mask", [torch_mask.mask_exponentials, numba_mask.mask_exponentials], ids=["torch", "numba"]
)


def test_mask_by_hand() -> None:
    positions = torch.tensor([[[4, 0, -1, 5, 6]]])
    expiry = torch.tensor([[[4, 5, -1, NEVER, NEVER]]])
    visible = torch_mask.mask(positions, expiry, torch.tensor([[4, 5, -1]]))
    assert visible[0, 0].int().tolist() == [
        [1, 1, 0, 0, 0],  # 4 and 0; 5 and 6 come later
        [0, 1, 0, 1, 0],  # 4 has left
        [1, 1, 1, 1, 1],  # padding stays finite
    ]


@both
def test_exponentials_by_hand(mask: Mask) -> None:
    weights = torch.tensor([1.0, 2, 4, 8, 16]).expand(1, 2, 2, 5).clone()
    positions, expiry = torch.tensor([[[4, 0, -1, 5, 6]]]), torch.tensor([[[4, 5, -1, NEVER, NEVER]]])
    total = mask(weights, positions, expiry, torch.tensor([[4, 5]]), torch.tensor([0.0, 1.0]))
    assert weights[0, 0].tolist() == weights[0, 1].tolist() == [[1, 2, 0, 0, 0], [0, 2, 0, 8, 0]]
    torch.testing.assert_close(total[0, :, :, 0], torch.tensor([[4.0, 11.0], [3 + torch.e, 10 + torch.e]]))


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    units=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    has_sinks=st.booleans(),
    padded=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_numba_equals_torch(
    seed: int, batch: int, units: int, rows: int, columns: int, has_sinks: bool, padded: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = 5 + torch.arange(rows).expand(batch, rows).clone()
    positions = torch.randint(-1, 5 + rows, (batch, units, columns), generator=generator)
    positions[:, :, 0] = 0  # every row sees something
    expiry = torch.randint(0, 5 + rows, positions.shape, generator=generator)
    expiry = torch.where(torch.rand(positions.shape, generator=generator) < 0.5, NEVER, expiry)
    expiry[:, :, 0] = NEVER
    real = torch.rand(batch, rows, generator=generator) < (0.7 if padded else 2)
    steps = torch.where(real, steps, -1)
    weights = torch.randn(batch, 4, rows, columns, generator=generator, dtype=dtype).exp()
    sinks = torch.randn(4, generator=generator) if has_sinks else None
    plain, compiled = weights.clone(), weights.clone()
    expected = torch_mask.mask_exponentials(plain, positions, expiry, steps, sinks)
    total = numba_mask.mask_exponentials(compiled, positions, expiry, steps, sinks)
    shown = real[:, None, :, None].expand(-1, 4, -1, 1)  # at padding both are finite and mean nothing
    torch.testing.assert_close(torch.where(shown, total, 1), torch.where(shown, expected, 1))
    assert torch.equal(compiled * shown, plain * shown)
    assert (compiled / total).isfinite().all()


@both
@pytest.mark.parametrize("weight", [0.0, 1e-35, 1e38, float("inf"), float("nan")])
def test_a_sum_out_of_range_is_noticed(mask: Mask, weight: float) -> None:
    weights = torch.ones(1, 2, 2, 3)
    weights[0, 1, 1] = weight
    positions = torch.zeros(1, 1, 3, dtype=torch.int64)
    with pytest.raises(OutOfRange):
        mask(weights, positions, torch.full_like(positions, NEVER), torch.tensor([[0, 1]]), None)
