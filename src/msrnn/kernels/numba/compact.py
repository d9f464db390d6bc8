"""What happens to rows between matmuls, compiled for the CPU, each in one pass over memory.

`hide` and `compact` have the arguments and results of those in `eager`; the passes themselves work on one unit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ..torch.scan import NEVER, Vanished
from .scan import FAST, spread, units

_jit: Any = numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
_NEVER = np.int64(NEVER)
_WORD = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # rows move as words: NumPy has no bfloat16


def hide(weights: Tensor, births: Tensor, expiry: Tensor, steps: Tensor, sinks: Tensor | None) -> Tensor:
    """See `eager.hide`. A row of padding has no weights and a mass of 1."""
    mass = weights.new_empty(*weights.shape[:3], 1)
    if sinks is not None:
        mass.copy_(sinks.detach().to(mass.dtype).exp().view(-1, 1, 1).expand_as(mass))
    failed = np.zeros(births.shape[:2], np.bool_)
    arrays = (tensor.numpy() for tensor in (weights, mass, births, expiry, steps))
    spread(hide_unit, units(births), weights.numel(), *arrays, failed, sinks is not None)
    if failed.any():
        raise Vanished("a row's exponentials overflowed or vanished")
    return mass


def compact(
    births: Tensor, scores: Tensor | None, rows: tuple[Tensor, ...], expiry: Tensor, used: int, end: int
) -> None:
    """See `eager.compact`."""
    words = [row.view(_WORD[row.itemsize]).numpy() for row in rows]
    moved = (used - end) * rows[0].shape[:2].numel() * (rows[0].shape[3] + rows[1].shape[3])
    scored = np.empty((1, 1, 1), np.float32) if scores is None else scores.numpy()
    spread(
        compact_unit,
        units(births),
        moved,
        births.numpy(),
        scored,
        expiry.numpy(),
        *words,
        used,
        end,
        scores is not None,
    )


@_jit
def open_unit(  # type: ignore[no-untyped-def]
    b,
    u,
    births,
    scores,
    expiry,
    keys,
    values,
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
    """One unit's share of the tokens from `start` on: their keys and values go behind the `used` columns, their scaled
    queries into a place of their own. Expiry is set as for a policy that decides by age; a scan sets it anew."""
    rows, stored, heads = queries.shape[2], keys.shape[1] // births.shape[1], queries.shape[1] // births.shape[1]
    for c in range(rows):
        for h in range(u * stored, (u + 1) * stored):
            keys[b, h, used + c] = key[b, start + c, h]
            values[b, h, used + c] = value[b, start + c, h]
        for h in range(u * heads, (u + 1) * heads):
            for d in range(queries.shape[3]):
                queries[b, h, c, d] = query[b, start + c, h, d] * scale
        births[b, u, used + c] = steps[b, start + c]
        scores[b, u, used + c] = 0
    latest = steps[b, start : start + rows].max()
    for n in range(used + rows):
        birth = births[b, u, n]
        end = _NEVER if birth < first or last == _NEVER else birth + last
        end = end if window == _NEVER else min(end, birth + window - 1)
        expiry[b, u, n] = -1 if birth < 0 else end if end <= latest else _NEVER


@_jit
def hide_unit(b, u, weights, mass, births, expiry, steps, failed, sinking):  # type: ignore[no-untyped-def]
    """One unit's rows."""
    heads, columns, rows = weights.shape[1] // births.shape[1], weights.shape[3], steps.shape[1]
    alive = np.empty(columns, weights.dtype)
    born, last = births[b, u], expiry[b, u]
    for c in range(rows):
        now = steps[b, c]
        for n in range(columns):
            alive[n] = 1 if (born[n] >= 0) & (born[n] <= now) & (now <= last[n]) else 0
        for h in range(u * heads, (u + 1) * heads):
            left = mass[b, h, c, 0] if sinking else weights.dtype.type(0)
            row = weights[b, h, c]
            for n in range(columns):
                row[n] *= alive[n]
                left += row[n]
            if now < 0:
                left = weights.dtype.type(1)
            if not 1e-30 < left < 1e37:
                failed[b, u] = True
                return
            mass[b, h, c, 0] = left


@_jit
def compact_unit(b, u, births, scores, expiry, keys, values, used, end, scored):  # type: ignore[no-untyped-def]
    """One unit's columns, and the rows of the heads it decides for."""
    heads = keys.shape[1] // births.shape[1]
    born = births[b, u]
    for n in range(used):
        if expiry[b, u, n] != _NEVER:
            born[n] = -1
    free = 0
    for n in range(end, used if end > 0 else 0):
        if born[n] < 0:
            continue
        while born[free] >= 0:
            free += 1
        born[free] = born[n]
        if scored:
            scores[b, u, free] = scores[b, u, n]
        for h in range(u * heads, (u + 1) * heads):
            keys[b, h, free] = keys[b, h, n]
            values[b, h, free] = values[b, h, n]
