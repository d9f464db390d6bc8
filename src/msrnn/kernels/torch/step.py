"""`step` in plain PyTorch: one token of every row through the recurrence, in place, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.attention import Attention
from ...policy import Policy
from .scan import NEVER, scan


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scores: Tensor | None,
    slot: Tensor,
    seen: Tensor,
    policy: Policy,
    attention: Attention,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """query [B, H, D], key [B, E, D], value [B, E, V] -> [B, H, V]; the rest is the state, changed in place.

    keys [B, E, S, D], values [B, E, S, V], positions [B, U, S] (-1: empty), scores [B, U, S] or None (no memory is
    needed), slot [B, U], seen [B]. Token `seen` goes into the empty `slot`, is attended to with all that is held, and
    what leaves is emptied; `slot` becomes the lowest empty one, where the next token goes, or -1 if there is none.
    A row whose `seen` or `slot` is -1 is inactive: nothing of it changes and its output is 0. Numbers in empty slots
    must be finite. `seen` stays as it is. With `rows` [B], states lie anywhere among more of them: that of batch row i
    is number rows[i] of `keys`, `values`, `positions`, `scores` and `slot`. The output goes to `out` if it is given.
    """
    if rows is not None:
        made = _elsewhere((query, key, value), (keys, values, positions, scores, slot), seen, policy, attention, rows)
        return made if out is None else out.copy_(made)
    active = (seen >= 0) & (slot >= 0).all(1)
    at = slot.clamp(min=0)[:, :, None]
    now = torch.where(active, seen, -1)[:, None]
    _put(positions[..., None], at, now[:, :, None].expand(*slot.shape, 1), active)
    _put(keys, at, key, active)
    _put(values, at, value, active)
    before = None if scores is None else scores.scatter(2, at, 0)
    logits = attention.logits(query[:, :, None], keys)
    scanned = scan(logits, positions, now, before, policy, attention.window, attention.sinks)
    here = active[:, None, None]
    positions.masked_fill_((scanned.expiry != NEVER) & here, -1)
    if scores is not None:
        scores.copy_(torch.where(here, scanned.scores, scores))
    slot.copy_(torch.where(active[:, None], _lowest_empty(positions), slot))
    grouped = scanned.weights.view(len(keys), keys.shape[1], -1, keys.shape[2])
    made = (grouped @ values.to(grouped.dtype)).view(*query.shape[:2], -1).to(values.dtype)
    return made if out is None else out.copy_(made)


def _elsewhere(
    new: tuple[Tensor, Tensor, Tensor],
    states: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    seen: Tensor,
    policy: Policy,
    attention: Attention,
    rows: Tensor,
) -> Tensor:
    """A step on copies of the states, which are then put back."""
    held = [None if tensor is None else tensor.index_select(0, rows) for tensor in states]
    output = step(*new, *held, seen, policy, attention)  # type: ignore[arg-type, call-arg]
    for tensor, copy in zip(states, held, strict=True):
        if tensor is not None and copy is not None:
            tensor.index_copy_(0, rows, copy)
    return output


def _put(rows: Tensor, at: Tensor, new: Tensor, active: Tensor) -> None:
    """rows [B, E, S, D], at [B, U, 1], new [B, E, D]: into the slot of the head's unit, for active rows."""
    place = at.repeat_interleave(rows.shape[1] // at.shape[1], 1)[..., None].expand(-1, -1, 1, rows.shape[3])
    rows.scatter_(2, place, torch.where(active[:, None, None, None], new[:, :, None], rows.gather(2, place)))


def _lowest_empty(positions: Tensor) -> Tensor:
    """[B, U]: the first slot that holds nothing, -1 if there is none."""
    empty = positions < 0
    return torch.where(empty.any(-1), empty.to(torch.uint8).argmax(-1), -1)
