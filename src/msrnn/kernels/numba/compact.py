"""`compact` compiled for the CPU: the same arguments and results as `kernels/torch/compact.py`, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core.slots import NEVER
from .compile import FAST_MATH, jit
from .threads import parallel_for, units_of

_jit = jit(FAST_MATH)
_NEVER = np.int64(NEVER)
_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # rows move as words: NumPy has no bfloat16


def compact(
    positions: Tensor, scores: Tensor | None, rows: tuple[Tensor, ...], expiry: Tensor, used: int, end: int
) -> None:
    """See `kernels/torch/compact.py`."""
    moves = np.empty((*positions.shape[:2], max(used - end, 0), 2), np.int64)
    counts = np.empty(positions.shape[:2], np.int64)
    units, score = units_of(positions), np.empty((1, 1, 1), np.float32) if scores is None else scores.numpy()
    parallel_for(
        plan_unit, units, 0, positions.numpy(), score, expiry.numpy(), used, end, scores is not None, moves, counts
    )
    for row in rows:
        parallel_for(move_unit, units, (used - end) * row[0, :, 0].numel() * len(row), words_of(row), moves, counts)


def words_of(rows: Tensor) -> np.ndarray:
    """Rows as whole numbers of the same bytes."""
    words: np.ndarray = rows.view(_WORD[rows.itemsize]).numpy()
    return words


@_jit
def plan_unit(b, u, positions, scores, expiry, used, end, has_scores, moves, counts):  # type: ignore[no-untyped-def]
    """One unit: evicted columns become empty; survivors past `end` are matched with empty places before it."""
    position = positions[b, u]
    for n in range(used):
        if expiry[b, u, n] != _NEVER:
            position[n] = -1
    free, count = 0, 0
    for n in range(end, used if end > 0 else 0):
        if position[n] < 0:
            continue
        while free < end and position[free] >= 0:
            free += 1
        if free == end:  # more survivors than room: logits that are no numbers; nothing is written past the slots
            break
        position[free] = position[n]
        if has_scores:
            scores[b, u, free] = scores[b, u, n]
        moves[b, u, count, 0], moves[b, u, count, 1] = n, free
        count += 1
    counts[b, u] = count


@_jit
def move_unit(b, u, rows, moves, counts):  # type: ignore[no-untyped-def]
    """Rows of the heads that a unit decides for, from and to the columns of its plan."""
    heads = rows.shape[1] // counts.shape[1]
    for h in range(u * heads, (u + 1) * heads):
        for m in range(counts[b, u]):
            rows[b, h, moves[b, u, m, 1]] = rows[b, h, moves[b, u, m, 0]]
