"""Compares a residual in slots with the definition's."""

from __future__ import annotations

import torch
from torch import Tensor

from msrnn.core.reference import Residual


def check_residual(ours: Tensor, residual: Residual | None, unit: int, units: int) -> None:
    """ours [G, D + V + 1]: of all stored heads, of which those of one unit are compared."""
    share = len(ours) // units
    heads = range(unit * share, (unit + 1) * share)
    if residual is None:
        assert not ours[heads].any()
        return
    of = [head * len(residual.key) // len(ours) for head in heads]  # KV heads
    number = torch.full((len(of), 1), residual.number, dtype=ours.dtype)
    want = torch.cat([residual.key[of], residual.value[of], number], 1)
    torch.testing.assert_close(ours[heads], want, rtol=0, atol=1e-9)
