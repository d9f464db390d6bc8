"""`compact` in plain PyTorch: close the gaps that a chunk's evictions left. On any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.slots import NEVER


def compact(
    positions: Tensor, scores: Tensor | None, rows: tuple[Tensor, ...], expiry: Tensor, used: int, end: int
) -> None:
    """positions, scores [B, U, N], rows [B, G, N, ...], expiry [B, U, used]: evicted columns become empty (-1), and
    those that stay at or past `end` move into the empty places before it, in order; where there is no room, they are
    dropped (logits that are NaN may leave too many)."""
    positions = positions[:, :, :used]
    positions.masked_fill_(expiry != NEVER, -1)
    if end in (0, used):
        return
    held, staying = positions[:, :, :end] >= 0, positions[:, :, end:] >= 0
    rank = staying.cumsum(-1) - 1
    staying &= rank < end - held.sum(-1, keepdim=True)
    free = held.to(torch.uint8).argsort(dim=-1, stable=True)  # free places first
    place = free.gather(2, rank.clamp(0, end - 1))
    place = torch.where(staying, place, torch.arange(end, used, device=positions.device))
    positions.scatter_(2, place, positions[:, :, end:].clone())
    if scores is not None:
        scores.scatter_(2, place, scores[:, :, end:used].clone())
    for row in rows:
        _put(row, place, row[:, :, end:used].clone())


def _put(rows: Tensor, place: Tensor, new: Tensor) -> None:
    """rows [B, G, S, D], place [B, U, C], new [B, G, C, D]: each unit's rows go to its own places, in place."""
    if place.shape[:2] == (1, 1):
        rows.index_copy_(2, place[0, 0], new)
        return
    index = place.repeat_interleave(rows.shape[1] // place.shape[1], 1)
    rows.scatter_(2, index[..., None].expand(-1, -1, -1, rows.shape[3]), new)
