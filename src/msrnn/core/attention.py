"""How one layer of a model turns queries and keys into attention: scale, soft cap, learned sinks, its own window.

These belong to the model, not to the policy. This file knows nothing of eviction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .buffers import scratch


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

    def logits(self, query: Tensor, keys: Tensor, exponentials: bool = False) -> Tensor:
        """[B, H, C, D], [B, E, N, D] -> [B, H, C, N] in float32 or better; query heads share the E stored heads.

        In scratch memory: gone with the next call. On the CPU one stored head at a time, so that its exponentials,
        where they are wanted instead, are taken while it is still in the cache.
        """
        batch, heads, rows, size = query.shape
        stored, columns = keys.shape[1:3]
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (batch * stored, heads // stored * rows, columns)
        if _narrow(query):
            grouped, shared = query.reshape(*shape[:2], size), keys.reshape(shape[0], columns, size).mT
            nothing = torch.empty(1, 1, 1, dtype=wide, device=query.device)
            logits = torch.baddbmm(nothing, grouped, shared, wide, beta=0, alpha=self.scale)
            self.finish(logits, exponentials)
            return logits.view(batch, heads, rows, columns)
        scaled = torch.mul(query, self.scale, out=scratch("query", tuple(query.shape), wide, query.device))
        grouped = scaled.view(*shape[:2], size)
        shared = keys.to(wide).reshape(shape[0], columns, size).mT
        logits = scratch("logits", shape, wide, query.device)
        if query.device.type != "cpu":
            self.finish(torch.bmm(grouped, shared, out=logits), exponentials)
        else:
            for head in range(len(grouped)):
                self.finish(torch.mm(grouped[head], shared[head], out=logits[head]), exponentials)
        return logits.view(batch, heads, rows, columns)

    def gather(self, rows: Tensor) -> Tensor:
        """[B, H, C, N]: the rows of all heads that decide together: these, unless a subclass spreads the heads."""
        return rows

    def own(self, rows: Tensor) -> Tensor:
        """[B, H, C, N]: the rows of the heads that this process holds: all, unless a subclass spreads the heads."""
        return rows

    def finish(self, logits: Tensor, exponentials: bool) -> None:
        """What the model does to its logits, and their exponentials where they are wanted instead, in place."""
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if exponentials:
            logits.exp_()


def mix(weights: Tensor, values: Tensor, mass: Tensor | None, out: Tensor) -> None:
    """weights [B, H, C, N], values [B, E, N, D] -> out [B, H, C, D]: summed by weight, over `mass` [B, H, C, 1]."""
    batch, heads, rows, columns = weights.shape
    shape = (batch * values.shape[1], heads // values.shape[1] * rows, columns)
    grouped, shared = weights.reshape(shape), values.reshape(shape[0], columns, -1)
    if _narrow(values):
        mixed = torch.bmm(grouped.to(values.dtype), shared, weights.dtype)
    else:
        mixed = scratch("mixed", (*shape[:2], values.shape[3]), weights.dtype, weights.device)
        torch.bmm(grouped, shared.to(weights.dtype), out=mixed)
    mixed = mixed.view(batch, heads, rows, -1)
    if mass is None:
        out.copy_(mixed)
    elif out.dtype == mixed.dtype:
        torch.div(mixed, mass, out=out)
    else:
        out.copy_(mixed.div_(mass))


def _narrow(tensor: Tensor) -> bool:
    """Whether matmuls take its dtype as it is and add up in float32: much faster on a GPU than all in float32.

    Not float16: exponentials taken without a maximum would overflow in it.
    """
    return tensor.is_cuda and tensor.dtype == torch.bfloat16
