"""How one layer of a model turns queries and keys into attention: scale, soft cap, learned sinks, its own window.

These belong to the model, not to the policy. This file knows nothing of eviction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .buffers import buffer

# A row's sum of exponentials, taken without subtracting its maximum, must lie between these to be divided by.
SMALLEST_SUM, LARGEST_SUM = 1e-30, 1e37


class OutOfRange(ArithmeticError):
    """Logits too large or too small for exponentials without subtracting the row's maximum first."""


@dataclass(frozen=True)
class Attention:
    """`window`: a query sees at most the newest so many tokens, itself included. `sinks`: one logit per head, [H]."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Nothing but scale and mask: ordinary scaled dot-product attention."""
        return self.softcap is None and self.sinks is None

    @property
    def sharded(self) -> bool:
        """Whether other processes hold some of the heads that decide together (tensor parallelism)."""
        return False

    def gather(self, rows: Tensor) -> Tensor:
        """[B, H, ...]: the rows of all heads that decide together; a sharded subclass asks the other processes."""
        return rows

    def local(self, rows: Tensor) -> Tensor:
        """[B, H, ...]: of gathered rows, those of the heads that this process holds."""
        return rows

    def logits(self, query: Tensor, keys: Tensor, exponentials: bool = False) -> Tensor:
        """[B, H, C, D], [B, G, N, D] -> [B, H, C, N] in float32 or better; query heads share the G stored heads.

        In a buffer: gone with the next call. `exponentials`: e to these powers instead. On the CPU one stored head at a
        time, so that exponentials are taken while the logits are still in the cache.
        """
        batch, heads, rows, size = query.shape
        stored, columns = keys.shape[1:3]
        dtype = torch.promote_types(query.dtype, torch.float32)
        shape = (batch * stored, heads // stored * rows, columns)
        if _accumulates(query):
            grouped, shared = query.reshape(*shape[:2], size), keys.reshape(shape[0], columns, size).mT
            logits = torch.empty(shape, dtype=dtype, device=query.device)
            # into itself: PyTorch would copy any other first argument over all logits, though beta is 0
            torch.baddbmm(logits, grouped, shared, dtype, beta=0, alpha=self.scale, out=logits)
            self.finish(logits, exponentials)
            return logits.view(batch, heads, rows, columns)
        scaled = torch.mul(query, self.scale, out=buffer("query", tuple(query.shape), dtype, query.device))
        grouped = scaled.view(*shape[:2], size)
        shared = keys.to(dtype).reshape(shape[0], columns, size).mT
        logits = buffer("logits", shape, dtype, query.device)
        if query.device.type != "cpu":
            self.finish(torch.bmm(grouped, shared, out=logits), exponentials)
        else:
            for head in range(len(grouped)):
                self.finish(torch.mm(grouped[head], shared[head], out=logits[head]), exponentials)
        return logits.view(batch, heads, rows, columns)

    def finish(self, logits: Tensor, exponentials: bool) -> None:
        """The soft cap, and the exponentials where they are wanted, in place."""
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if exponentials:
            logits.exp_()


def weighted_sum(weights: Tensor, values: Tensor, total: Tensor | None, out: Tensor) -> None:
    """weights [B, H, C, N], values [B, G, N, V] -> out [B, H, C, V], divided by `total` [B, H, C, 1] if given."""
    batch, heads, rows, columns = weights.shape
    shape = (batch * values.shape[1], heads // values.shape[1] * rows, columns)
    grouped, shared = weights.reshape(shape), values.reshape(shape[0], columns, -1)
    if _accumulates(values):
        mixed = torch.bmm(grouped.to(values.dtype), shared, weights.dtype)
    else:
        mixed = buffer("mixed", (*shape[:2], values.shape[3]), weights.dtype, weights.device)
        torch.bmm(grouped, shared.to(weights.dtype), out=mixed)
    mixed = mixed.view(batch, heads, rows, -1)
    if total is None:
        out.copy_(mixed)
    else:
        torch.div(mixed, total, out=out)


def _accumulates(tensor: Tensor) -> bool:
    """Whether matmuls take its dtype as it is and accumulate in float32: much faster on a GPU than float32 inputs.

    Not float16: exponentials without max subtraction would overflow in it.
    """
    return tensor.is_cuda and tensor.dtype == torch.bfloat16
