"""`step` in plain PyTorch: one token of every row through the recurrence, in place, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...core.attention import Attention
from ...core.formats import encode
from ...core.slots import NEVER, Columns, Slots, gain_of, lowest_empty
from ...policy import Policy
from .scan import Scan, scan

_BY_HEAD = ("keys", "values", "scales", "gains")


def step(slots: Slots, query: Tensor, key: Tensor, value: Tensor, policy: Policy, attention: Attention) -> Tensor:
    """query [B, H, D], key [B, G, D], value [B, G, V] -> [B, H, V]; the slots change in place, but for `seen`.

    Token `seen` goes into the empty slot `next` and is attended to with all that is held. What leaves is emptied, and
    `next` becomes the lowest empty slot, or -1 if there is none. A row is idle if its `seen` is -1, or its `next` or
    its number in `rows` out of range: nothing of it changes and its output is 0. Empty slots may hold anything.
    """
    if slots.rows is not None:
        return _indexed(slots, slots.rows, query, key, value, policy, attention)
    at = slots.next.clamp(0, slots.keys.shape[2] - 1)[:, :, None]
    active = (slots.seen >= 0) & (at[:, :, 0] == slots.next).all(1)
    now = torch.where(active, slots.seen, -1)[:, None]
    _put(slots.positions[..., None], at, now[:, :, None].expand(*slots.next.shape, 1), active)
    for rows, new in zip(slots.stored, _stored(slots, key, value), strict=True):
        _put(rows, at, new, active)
    keys, values = slots.decoded(query.dtype)
    if slots.gains is not None:
        _put(slots.gains[..., None], at, gain_of(_newest(values, at), slots.gains.dtype)[..., None], active)
    result, values = _scan(slots, _held(slots, keys, values), query, at, now, policy, attention)
    expiry, scores, memory = result.expiry, result.scores, result.memory
    here = active[:, None, None]
    slots.positions.masked_fill_((expiry != NEVER) & here, -1)
    if slots.scores is not None:
        slots.scores.copy_(torch.where(here, scores, slots.scores))
    if slots.memory is not None and memory is not None:
        slots.memory.copy_(torch.where(here[..., None], memory, slots.memory))
    if slots.residual is not None and result.residual is not None:
        slots.residual.copy_(torch.where(here, result.residual, slots.residual))
    slots.next.copy_(torch.where(active[:, None], lowest_empty(slots.positions), slots.next))
    grouped = attention.local(result.weights)[:, :, 0].reshape(len(key), key.shape[1], -1, values.shape[2])
    return (grouped @ values.to(grouped.dtype)).view(*query.shape[:2], -1).to(value.dtype)


def _scan(
    slots: Slots,
    rows: tuple[Tensor, Tensor],
    query: Tensor,
    at: Tensor,
    now: Tensor,
    policy: Policy,
    attention: Attention,
) -> tuple[Scan, Tensor]:
    """What all heads that decide together come to, and the values that are attended to."""
    before = None if slots.scores is None else slots.scores.scatter(2, at, 0)
    memory = slots.memory
    if memory is not None:
        memory = memory.scatter(2, at[..., None].expand(-1, -1, 1, memory.shape[3]), 0)
    gains = None if slots.gains is None else attention.gather(slots.gains)
    columns = Columns(*rows, slots.positions, before, gains, memory, slots.residual)
    keys, values = columns.attended
    query = query if slots.residual is None else query.to(keys.dtype)
    logits = attention.gather(attention.logits(query[:, :, None], keys))
    return scan(logits, columns, now, policy, attention), values


def _indexed(
    slots: Slots, rows: Tensor, query: Tensor, key: Tensor, value: Tensor, policy: Policy, attention: Attention
) -> Tensor:
    """A step on copies of some rows; what it changed is written back.

    Without a wait for the device nothing can be left out, so a row out of range writes once more what a valid one does.
    """
    names = [name for name in slots.tensors() if name != "seen"]
    home = rows.clamp(0, len(slots.keys) - 1)
    valid, number = home == rows, torch.arange(len(rows), device=rows.device)
    copies = {name: getattr(slots, name).index_select(0, home) for name in names}
    copy = replace(slots, rows=None, seen=torch.where(valid, slots.seen, -1), **copies)
    place = copy.next.clamp(0, slots.keys.shape[2] - 1).repeat_interleave(slots.keys.shape[1] // copy.next.shape[1], 1)
    output = step(copy, query, key, value, policy, attention)
    source = torch.where(valid, number, valid.to(torch.uint8).argmax())
    home, place, head = home[source], place[source], torch.arange(place.shape[1], device=rows.device)
    for name in names:
        whole, part = getattr(slots, name), getattr(copy, name)
        if name in _BY_HEAD:
            whole[home[:, None], head, place] = part[source[:, None], head, place]
        else:
            whole.index_copy_(0, home, part.index_select(0, source))
    return output


def _stored(slots: Slots, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The new key and value as the slots hold them."""
    return (key, value) if slots.kv is None else encode(key, value, slots.kv)


def _held(slots: Slots, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Both with 0 in empty slots: NaN that a request of vLLM's has left would outlive a weight of 0."""
    empty = slots.positions < 0
    hidden = empty.repeat_interleave(keys.shape[1] // empty.shape[1], 1)[..., None]
    in_logits = slots.residual is not None  # whose logit is a mean over all columns; others are hidden one by one
    return keys.masked_fill(hidden, 0) if in_logits else keys, values.masked_fill(hidden, 0)


def _newest(rows: Tensor, at: Tensor) -> Tensor:
    """rows [B, G, S, D], at [B, U, 1] -> [B, G, D]: what stands in the slot of the head's unit."""
    place = at.repeat_interleave(rows.shape[1] // at.shape[1], 1)[..., None].expand(-1, -1, 1, rows.shape[3])
    return rows.gather(2, place)[:, :, 0]


def _put(rows: Tensor, at: Tensor, new: Tensor, active: Tensor) -> None:
    """rows [B, G, S, D], at [B, U, 1], new [B, G, D]: into the slot of the head's unit, for active rows."""
    place = at.repeat_interleave(rows.shape[1] // at.shape[1], 1)[..., None].expand(-1, -1, 1, rows.shape[3])
    rows.scatter_(2, place, torch.where(active[:, None, None, None], new[:, :, None], rows.gather(2, place)))
