"""Chunks of a prompt on the CPU with little between their matmuls.

After a pass over megabytes a small PyTorch operation takes 60 to 120 us, because its code has left the cache. So what
does not change from chunk to chunk is made once per call, and compiled passes do what stands between two matmuls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.attention import Attention
from ...core.buffers import buffer
from ...core.slots import NEVER, age_limits, decides_by_age
from ...core.workspace import Workspace
from ...policy import Policy
from .compact import move_unit, plan_unit, words_of
from .compile import FAST_MATH, jit
from .encode import encode_in_buffers
from .mask import mask_unit
from .scan import limits_of, scan_unit
from .threads import parallel_for, units_of

ROWS = 64  # of a chunk at most: with 9 heads and 512 slots its weights just fit into a core's L2 cache
_NEVER = np.int64(NEVER)
_jit = jit(FAST_MATH)


class _Views(NamedTuple):
    """The tensors of a chunk of C rows and N columns, as PyTorch and as compiled passes see them."""

    logits: list[tuple[Tensor, Tensor, Tensor]]  # of each stored head: queries, keys, logits
    weights: Tensor  # [B * G, H / G * C, N], all the logits
    values: Tensor  # [B * G, N, V]
    mixed: Tensor  # [B * G, H / G * C, V]
    outputs: Tensor  # [B, H, C, V], the same
    total: Tensor  # [B, H, C, 1]
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]  # queries, weights, totals as [B, H, C, ...]


class Chunks:
    """The chunks of one `read`; has the methods of `core.recurrence.Chunks`. tokens: query, key and value of all T."""

    rows = ROWS

    def __init__(
        self,
        space: Workspace,
        tokens: tuple[Tensor, Tensor, Tensor],
        steps: Tensor,
        policy: Policy,
        attention: Attention,
        output: Tensor,
    ) -> None:
        self.space, self.attention, self.output = space, attention, output
        codes: list[Tensor] = []
        if space.slots.kv is not None:
            *codes, key, value = encode_in_buffers(tokens[1], tokens[2], space.slots.kv)
            tokens = tokens[0], key, value
        self.tokens = [token.transpose(1, 2).contiguous().numpy() for token in tokens]  # the order that models have
        self.steps = steps.contiguous().numpy()
        number = self.tokens[0].dtype
        self.positions, self.units = space.positions.numpy(), units_of(space.positions)
        self.expiry = np.empty(self.positions.shape, np.int64)
        self.has_scores = space.scores is not None
        self.scores = np.zeros(self.positions.shape, number) if space.scores is None else space.scores.numpy()
        self.bits = self.scores.view(np.int32 if self.scores.itemsize == 4 else np.int64)
        self.gains = None if space.gains is None else space.gains.numpy()
        apart = {id(row) for row in space.codes}
        self.rows_by_head = [words_of(row) for row in space.moving if id(row) not in apart]
        self.codes = tuple(words_of(row) for row in space.codes)
        self.incoming = tuple(words_of(rows) for rows in codes)
        self.failed = np.zeros(self.positions.shape[:2], np.bool_)
        self.moves = np.empty((*self.positions.shape[:2], self.positions.shape[2], 2), np.int64)
        self.counts = np.empty(self.positions.shape[:2], np.int64)
        self.views: dict[tuple[int, int], _Views] = {}
        self.by_age = decides_by_age(policy, attention.window)
        self.opening = (number.type(attention.scale), *age_limits(policy, attention.window))
        self.limits = limits_of(policy, attention, number.type)

    def attend(self, part: slice) -> Tensor | None:
        """The chunk joins the workspace, its outputs are written -> expiry [B, U, N].

        None, and nothing changed, if exponentials were out of range: then the chunk needs max subtraction.
        """
        size, before = part.stop - part.start, self.space.used
        used = before + size
        scores = self.scores.copy() if self.has_scores else None
        views = self._views_of(size, used)
        queries, weights, totals = views.arrays
        rows = (self.space.keys.numpy(), self.space.values.numpy(), self.gains)
        places = (self.positions, self.scores, self.expiry, *rows, queries)
        parallel_for(open_unit, self.units, 0, *places, *self.tokens, self.steps, part.start, before, *self.opening)
        if self.codes:
            parallel_for(
                copy_codes, self.units, 0, *self.codes, *self.incoming, self.positions, part.start, before, size
            )
        for query, keys, logits in views.logits:
            self.attention.finish(torch.mm(query, keys, out=logits), True)
        self._weigh(weights, totals, views.total, np.ascontiguousarray(self.steps[:, part]))
        if self.failed.any():
            self.failed[:] = False
            if scores is not None:
                self.scores[:] = scores
            return None
        torch.bmm(views.weights, views.values, out=views.mixed)
        torch.div(views.outputs, views.total, out=self.output[:, :, part])
        self.space.used = used
        return torch.from_numpy(self.expiry[:, :, :used])

    def evict(self, expiry: Tensor) -> None:
        """What left makes room for the survivors past the slots' end."""
        used, limit = self.space.used, self.space.slots.limit
        assert limit is not None
        end = min(used, limit - 1)
        plan = (self.positions, self.scores, self.expiry, used, end, self.has_scores)
        parallel_for(plan_unit, self.units, 0, *plan, self.moves, self.counts)
        for rows in self.rows_by_head:
            parallel_for(move_unit, self.units, 0, rows, self.moves, self.counts)
        if self.codes:
            parallel_for(move_codes, self.units, 0, *self.codes, self.moves, self.counts)
        self.space.used = end

    def _weigh(self, weights: np.ndarray, totals: np.ndarray, total: Tensor, steps: np.ndarray) -> None:
        """What is not visible gets no weight; a policy that looks at weights chooses victims."""
        sinks = self.attention.sinks
        if sinks is not None:
            total.copy_(sinks.detach().to(total.dtype).exp().view(-1, 1, 1).expand_as(total))
        if self.by_age:
            visible = (self.positions, self.expiry, steps)
            parallel_for(mask_unit, self.units, weights.size, weights, totals, *visible, self.failed, sinks is not None)
            return
        state: tuple[Any, ...] = (self.positions, steps, self.scores, self.bits, self.expiry, self.failed, totals[0])
        how = (self.gains, None, totals, sinks is not None, False, *self.limits)
        parallel_for(scan_unit, self.units, weights.size, weights, weights, totals, *state, *how)

    def _views_of(self, size: int, used: int) -> _Views:
        if (size, used) not in self.views:
            self.views = {(size, used): self._make_views(size, used)}
        return self.views[size, used]

    def _make_views(self, size: int, used: int) -> _Views:
        (batch, _, heads, width), space = self.tokens[0].shape, self.space
        stored, value_width = space.keys.shape[1], space.values.shape[3]
        shape = (batch * stored, heads // stored * size)
        queries, mixed = self._buffer("query", *shape, width), self._buffer("mixed", *shape, value_width)
        weights, total = self._buffer("logits", *shape, used), self._buffer("total", batch, heads, size, 1)
        keys = space.keys[:, :, :used].reshape(shape[0], used, width)
        values = space.values[:, :, :used].reshape(shape[0], used, value_width)
        grid = (batch, heads, size, -1)
        arrays = (queries.view(grid).numpy(), weights.view(grid).numpy(), total.numpy())
        logits = list(zip(queries, keys.mT, weights, strict=True))
        return _Views(logits, weights, values, mixed, mixed.view(grid), total, arrays)

    def _buffer(self, name: str, *shape: int) -> Tensor:
        return buffer(name, shape, self.space.keys.dtype, self.space.keys.device)


@_jit
def copy_codes(  # type: ignore[no-untyped-def]
    b, u, keys, values, scales, new_keys, new_values, new_scales, positions, start, used, count
):
    """Codes of `count` tokens from `start` on go behind the `used` columns, for the heads of one unit."""
    stored = keys.shape[1] // positions.shape[1]
    for h in range(u * stored, (u + 1) * stored):
        keys[b, h, used : used + count] = new_keys[b, h, start : start + count]
        values[b, h, used : used + count] = new_values[b, h, start : start + count]
        scales[b, h, used : used + count] = new_scales[b, h, start : start + count]


@_jit
def move_codes(b, u, keys, values, scales, moves, counts):  # type: ignore[no-untyped-def]
    """One call for all three: between matmuls a call costs more than what it moves."""
    move_unit(b, u, keys, moves, counts)
    move_unit(b, u, values, moves, counts)
    move_unit(b, u, scales, moves, counts)


@_jit
def open_unit(  # type: ignore[no-untyped-def]
    b,
    u,
    positions,
    scores,
    expiry,
    keys,
    values,
    gains,
    queries,
    query,
    key,
    value,
    steps,
    start,
    used,
    scale,
    first,
    last,
    window,
):
    """One unit's share of the tokens from `start` on: keys and values go behind the `used` columns, scaled queries into
    a place of their own. Expiry is set as for a policy that decides by age; a scan sets it anew."""
    rows, stored, heads = queries.shape[2], keys.shape[1] // positions.shape[1], queries.shape[1] // positions.shape[1]
    for c in range(rows):
        for h in range(u * stored, (u + 1) * stored):
            keys[b, h, used + c] = key[b, start + c, h]
            values[b, h, used + c] = value[b, start + c, h]
            if gains is not None:
                gains[b, h, used + c] = np.sqrt(np.sum(value[b, start + c, h] ** 2))
        for h in range(u * heads, (u + 1) * heads):
            for d in range(queries.shape[3]):
                queries[b, h, c, d] = query[b, start + c, h, d] * scale
        positions[b, u, used + c] = steps[b, start + c]
        scores[b, u, used + c] = 0
    latest = steps[b, start : start + rows].max()
    for n in range(used + rows):
        position = positions[b, u, n]
        end = _NEVER if position < first or last == _NEVER else position + last
        end = end if window == _NEVER else min(end, position + window - 1)
        expiry[b, u, n] = -1 if position < 0 else end if end <= latest else _NEVER
