"""`compact` in Triton: the same as `kernels/torch/compact.py`, in a launch or three instead of twenty."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.slots import NEVER
from ..torch import compact as torch_compact

_jit: Any = triton.jit
_NEVER = tl.constexpr(NEVER)
_MOVED = 16  # rows that a program moves
_MOST_COLUMNS = 2**15  # that one program can hold


def compact(
    positions: Tensor, scores: Tensor | None, rows: tuple[Tensor, ...], expiry: Tensor, used: int, end: int
) -> None:
    """See `kernels/torch/compact.py`. Nothing waits for the device, and a CUDA graph can hold it."""
    batch, units, columns = positions.shape
    last = all(tensor.stride(-1) == 1 for tensor in (positions, *rows)) and positions.is_contiguous()
    if end in (0, used) or used > _MOST_COLUMNS or not last or (scores is not None and not scores.is_contiguous()):
        torch_compact.compact(positions, scores, rows, expiry, used, end)
        return
    moves = torch.empty(batch * units, 2, used - end, dtype=torch.int32, device=positions.device)
    pairs[(batch * units,)](
        *(positions, positions if scores is None else scores, expiry.contiguous(), moves, columns, used, end),
        SCORES=scores is not None,
        WIDE=triton.next_power_of_2(used),
        num_warps=8,
    )
    for row in rows:
        stored, size = row.shape[1], row.shape[3]
        move[(batch * stored, triton.cdiv(used - end, _MOVED))](
            *(row, moves, *row.stride()[:3], stored, stored // units, used - end, size),
            SIZE=triton.next_power_of_2(size),
            MOVED=_MOVED,
        )


@_jit(do_not_specialize=["columns", "used", "end"])
def pairs(positions, scores, expiry, moves, columns, used, end, SCORES: tl.constexpr, WIDE: tl.constexpr):
    """One unit: who has left becomes empty; the places that are empty before `end`, and who stays past it, in order."""
    unit = tl.program_id(0).to(tl.int64)
    positions += unit * columns
    scores += unit * columns
    expiry += unit * used
    places = moves + unit * 2 * (used - end)
    sources = places + used - end
    n = tl.arange(0, WIDE)
    inside = n < used
    position = tl.load(positions + n, mask=inside, other=-1)
    position = tl.where(tl.load(expiry + n, mask=inside, other=-1) == _NEVER, position, -1)
    free = inside & (n < end) & (position < 0)
    staying = inside & (n >= end) & (position >= 0)
    # as many as there is room for: logits that are not numbers may leave more, who must not be written just anywhere
    count = tl.minimum(tl.sum(staying.to(tl.int32), 0), tl.sum(free.to(tl.int32), 0))
    rank = tl.cumsum(free.to(tl.int32), 0) - 1
    turn = tl.cumsum(staying.to(tl.int32), 0) - 1
    tl.store(places + rank, n, mask=free & (rank < count))
    tl.store(sources + turn, n, mask=staying & (turn < count))
    tl.store(sources + n, tl.full([WIDE], -1, tl.int32), mask=(n >= count) & (n < used - end))
    tl.store(positions + n, position, mask=inside)
    tl.debug_barrier()
    moved = n < count
    place = tl.load(places + n, mask=moved, other=0)
    source = tl.load(sources + n, mask=moved, other=0)
    tl.store(positions + place, tl.load(positions + source, mask=moved, other=-1), mask=moved)
    if SCORES:
        tl.store(scores + place, tl.load(scores + source, mask=moved, other=0.0), mask=moved)


@_jit(do_not_specialize=["most"])
def move(rows, moves, by_batch, by_head, by_row, stored, share, most, size, SIZE: tl.constexpr, MOVED: tl.constexpr):
    """Rows of one stored head, from the columns past the end to their places."""
    head = tl.program_id(0).to(tl.int64)
    rows += head // stored * by_batch + head % stored * by_head
    moves += head // share * 2 * most
    turn = tl.program_id(1) * MOVED + tl.arange(0, MOVED)
    source = tl.load(moves + most + turn, mask=turn < most, other=-1)
    moved = source >= 0
    place = tl.load(moves + turn, mask=moved, other=0)
    d = tl.arange(0, SIZE)
    theirs = moved[:, None] & (d < size)[None, :]
    row = tl.load(rows + source.to(tl.int64)[:, None] * by_row + d[None, :], mask=theirs, other=0.0)
    tl.store(rows + place.to(tl.int64)[:, None] * by_row + d[None, :], row, mask=theirs)
