"""Which columns each row of a chunk sees, in plain PyTorch: as a mask, and applied to exponentials in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.attention import LARGEST_SUM, SMALLEST_SUM, OutOfRange


def mask(positions: Tensor, expiry: Tensor, steps: Tensor) -> Tensor:
    """positions, expiry [B, U, N], steps [B, C] -> [B, U, C, N]: which columns each row sees.

    A row of padding sees everything, so that it stays finite.
    """
    now = steps[:, None, :, None]
    present = (positions[:, :, None] >= 0) & (positions[:, :, None] <= now)
    return (present & (now <= expiry[:, :, None])) | (now < 0)


def mask_exponentials(
    weights: Tensor, positions: Tensor, expiry: Tensor, steps: Tensor, sinks: Tensor | None
) -> Tensor:
    """weights [B, H, C, N], exponentials, become 0 where a column is not visible -> their sums [B, H, C, 1]."""
    visible = mask(positions, expiry, steps)
    weights.view(len(visible), visible.shape[1], -1, *visible.shape[2:]).mul_(visible[:, :, None].to(weights.dtype))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.detach().to(total.dtype).exp().view(-1, 1, 1)
    low, high = torch.aminmax(total)
    if not bool((low > SMALLEST_SUM) & (high < LARGEST_SUM)):
        raise OutOfRange("a row's exponentials overflowed or vanished")
    return total
