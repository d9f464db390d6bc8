"""Chunk after chunk on the CPU: the recurrence with little between its matmuls.

After a pass over megabytes a small operation takes 60 to 120 us, because its code has left the cache. So whatever
does not change from chunk to chunk is made once per call, and compiled passes do what stands between two matmuls.
Logits too large for exponentials as they are end it; `recurrence` goes on from there with care. Needs Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.attention import Attention
from ...core.buffers import scratch
from ...core.slots import decides_by_age
from ...core.workspace import Columns
from ...policy import Policy
from .. import NEVER
from .compact import compact_unit, hide_unit, open_unit
from .scan import scan_unit, spread, units

ROWS = 64  # of a chunk at most: with 9 heads and 512 slots its weights just fit into a core's own cache


class _Views(NamedTuple):
    """What a chunk of C rows and N columns is worked out in, as PyTorch sees it and as compiled passes do."""

    logits: list[tuple[Tensor, Tensor, Tensor]]  # of each stored head: queries, keys, logits
    weights: Tensor  # [B * E, H / E * C, N], all the logits
    values: Tensor  # [B * E, N, V]
    mixed: Tensor  # [B * E, H / E * C, V]
    outputs: Tensor  # [B, H, C, V], the same
    mass: Tensor  # [B, H, C, 1]
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]  # queries, weights, mass as [B, H, C, ...]


class Reader:
    """The tokens of one call: query [B, H, T, D], key [B, E, T, D], value [B, E, T, V] behind open `columns`."""

    def __init__(
        self,
        columns: Columns,
        rows: tuple[Tensor, Tensor, Tensor],
        steps: Tensor,
        policy: Policy,
        attention: Attention,
        output: Tensor,
    ) -> None:
        self.columns, self.attention, self.output = columns, attention, output
        self.rows = [row.transpose(1, 2).contiguous().numpy() for row in rows]  # models have them in this order
        self.steps = steps.contiguous().numpy()
        self.keys, self.values, births, scores = columns.buffers
        self.births, self.expiry, self.units = births.numpy(), np.empty(births.shape, np.int64), units(births)
        self.scored = scores is not None
        self.scores = np.zeros(births.shape, self.rows[0].dtype) if scores is None else scores.numpy()
        self.slots = (self.births, self.scores, self.expiry, self.keys.numpy(), self.values.numpy())
        self.bits = self.scores.view(np.int32 if self.scores.itemsize == 4 else np.int64)
        self.failed = np.zeros(births.shape[:2], np.bool_)
        self.views: dict[tuple[int, int], _Views] = {}
        number = self.rows[0].dtype.type
        window = NEVER if attention.window is None else attention.window
        capacity = NEVER if policy.capacity is None else policy.capacity
        self.by_age = decides_by_age(policy, attention.window)
        self.limits = (number(attention.scale), policy.first, NEVER if capacity >= window - 1 else policy.last, window)
        self.choice = (policy.first, policy.last, capacity, window, number(policy.momentum))

    def read(self, start: int, chunk: int, on_evict: Callable[[Tensor, Tensor], None] | None) -> int:
        """The tokens from `start` on -> where it ended: behind the last, or before a chunk that needs care."""
        columns, state, total = self.columns, self.columns.state, self.steps.shape[1]
        assert state.limit is not None  # else nobody would leave
        while start < total:
            size = min(chunk, ROWS, total - start)
            used = columns.used + size
            before = self.scores.copy() if self.scored else None
            if not self._attend(start, size, used):
                state.careful = True
                if before is not None:
                    self.scores[:] = before
                break
            if on_evict is not None:
                on_evict(torch.from_numpy(self.births[:, :, :used]), torch.from_numpy(self.expiry[:, :, :used]))
            columns.used = min(used, state.limit - 1)
            spread(compact_unit, self.units, 0, *self.slots, used, columns.used, self.scored)
            state.fed += size
            start += size
        return start

    def _attend(self, start: int, size: int, used: int) -> bool:
        """One chunk's outputs and expiry; false, and nothing done, if its exponentials are no numbers to divide by."""
        if (size, used) not in self.views:
            self.views = {(size, used): self._views(size, used)}
        views = self.views[size, used]
        queries, weights, mass = views.arrays
        opened = (*self.slots, queries, *self.rows, self.steps, start, self.columns.used)
        spread(open_unit, self.units, 0, *opened, *self.limits)
        for query, keys, logits in views.logits:
            self.attention.finish(torch.mm(query, keys, out=logits), True)
        sinks = self.attention.sinks
        if sinks is not None:
            views.mass.copy_(sinks.detach().to(views.mass.dtype).exp().view(-1, 1, 1).expand_as(views.mass))
        self._weigh(weights, mass, np.ascontiguousarray(self.steps[:, start : start + size]), sinks is not None)
        if self.failed.any():
            return False
        torch.bmm(views.weights, views.values, out=views.mixed)
        torch.div(views.outputs, views.mass, out=self.output[:, :, start : start + size])
        return True

    def _weigh(self, weights: np.ndarray, mass: np.ndarray, steps: np.ndarray, sinking: bool) -> None:
        """What is not visible gets no weight; a policy that looks at weights says who leaves."""
        if self.by_age:
            visible = (self.births, self.expiry, steps)
            spread(hide_unit, self.units, weights.size, weights, mass, *visible, self.failed, sinking)
            return
        scored: tuple[Any, ...] = (self.births, steps, self.scores, self.bits, self.expiry, self.failed, mass[0])
        spread(scan_unit, self.units, weights.size, weights, weights, mass, *scored, sinking, False, *self.choice)

    def _views(self, size: int, used: int) -> _Views:
        batch, _, heads, width = self.rows[0].shape
        stored, wide = self.keys.shape[1], self.values.shape[3]
        shape = (batch * stored, heads // stored * size)
        queries, mixed = self._scratch("query", *shape, width), self._scratch("mixed", *shape, wide)
        weights, mass = self._scratch("logits", *shape, used), self._scratch("mass", batch, heads, size, 1)
        keys = self.keys[:, :, :used].reshape(shape[0], used, width)
        values = self.values[:, :, :used].reshape(shape[0], used, wide)
        grid = (batch, heads, size, -1)
        arrays = (queries.view(grid).numpy(), weights.view(grid).numpy(), mass.numpy())
        logits = list(zip(queries, keys.mT, weights, strict=True))
        return _Views(logits, weights, values, mixed, mixed.view(grid), mass, arrays)

    def _scratch(self, name: str, *shape: int) -> Tensor:
        return scratch(name, shape, self.keys.dtype, self.keys.device)
