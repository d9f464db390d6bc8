"""The residual in a scan, in plain PyTorch: which of a chunk's columns are in it, and how much each counts.

A logit is linear in the key. So the logit of a mean key is the mean of the logits that the chunk's matmul has computed
already, and the residual's weight goes back to the columns in it: the outputs stay one matmul.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.slots import Columns


class Shares:
    """counts [B, U, N + 1]: how much each column counts in the residual; the last is the residual as it was before."""

    def __init__(self, columns: Columns, dtype: torch.dtype) -> None:
        assert columns.residual is not None
        batch, units, size = columns.positions.shape
        self.columns = columns
        self.counts = columns.residual.new_zeros(batch, units, size + 1, dtype=dtype)
        self.counts[:, :, -1] = columns.residual[:, :: columns.residual.shape[1] // units, -1]

    @property
    def number(self) -> Tensor:
        """[B, U, 1]: how many tokens are in the residual, those of long ago counting less."""
        return self.counts.sum(-1, keepdim=True)

    def of(self, heads: int) -> Tensor:
        """[B, heads, N + 1]: the share of every column, 0 where there is no residual yet."""
        return (self.counts / self.number.clamp(min=1)).repeat_interleave(heads // self.counts.shape[1], 1)

    def logit(self, logits: Tensor) -> Tensor:
        """logits [B, H, N + 1] of a row -> [B, H, 1]: that of the residual, with the weight of the tokens in it."""
        shares, number = (
            self.of(logits.shape[1]),
            self.number.repeat_interleave(logits.shape[1] // self.counts.shape[1], 1),
        )
        return torch.where(shares > 0, shares * logits, 0).sum(-1, keepdim=True) + number.log()

    def add(self, victim: Tensor, decay: float) -> None:
        """victim [B, U, N]: what leaves now, at most one column of a unit."""
        counts = torch.where(victim.any(-1, keepdim=True), decay * self.counts, self.counts)
        counts[:, :, :-1].masked_fill_(victim, 1)
        self.counts = counts

    def residual(self) -> Tensor:
        """[B, G, D + V + 1]: the residual after the chunk."""
        stored = self.columns.keys.shape[1]
        rows = torch.cat(self.columns.attended, -1).to(self.counts.dtype)  # [B, G, N + 1, D + V]
        mean = (self.of(stored)[:, :, None] @ rows)[:, :, 0]
        number = self.number.repeat_interleave(stored // self.counts.shape[1], 1)
        return torch.cat([mean, number], -1)
