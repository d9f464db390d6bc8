"""Masking exponentials, compiled for the CPU: the same as in `kernels/torch/mask.py`, in one pass over memory."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...core.attention import LARGEST_SUM, SMALLEST_SUM, OutOfRange
from .compile import FAST_MATH, jit
from .threads import parallel_for, units_of

_jit = jit(FAST_MATH)


def mask_exponentials(
    weights: Tensor, positions: Tensor, expiry: Tensor, steps: Tensor, sinks: Tensor | None
) -> Tensor:
    """See `kernels/torch/mask.py`. A row of padding has no weights and a total of 1."""
    total = weights.new_empty(*weights.shape[:3], 1)
    if sinks is not None:
        total.copy_(sinks.detach().to(total.dtype).exp().view(-1, 1, 1).expand_as(total))
    failed = np.zeros(positions.shape[:2], np.bool_)
    arrays = (tensor.numpy() for tensor in (weights, total, positions, expiry, steps))
    parallel_for(mask_unit, units_of(positions), weights.numel(), *arrays, failed, sinks is not None)
    if failed.any():
        raise OutOfRange("a row's exponentials overflowed or vanished")
    return total


@_jit
def mask_unit(b, u, weights, totals, positions, expiry, steps, failed, has_sinks):  # type: ignore[no-untyped-def]
    """One unit's rows."""
    heads, columns, rows = weights.shape[1] // positions.shape[1], weights.shape[3], steps.shape[1]
    visible = np.empty(columns, weights.dtype)
    position, last = positions[b, u], expiry[b, u]
    for c in range(rows):
        now = steps[b, c]
        for n in range(columns):
            visible[n] = 1 if (position[n] >= 0) & (position[n] <= now) & (now <= last[n]) else 0
        for h in range(u * heads, (u + 1) * heads):
            total = totals[b, h, c, 0] if has_sinks else weights.dtype.type(0)
            row = weights[b, h, c]
            for n in range(columns):
                row[n] *= visible[n]
                total += row[n]
            if now < 0:
                total = weights.dtype.type(1)
            if not SMALLEST_SUM < total < LARGEST_SUM:
                failed[b, u] = True
                return
            totals[b, h, c, 0] = total
