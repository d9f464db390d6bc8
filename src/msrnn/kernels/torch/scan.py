"""The hot operations in plain PyTorch, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...policy import Policy

NEVER = torch.iinfo(torch.int64).max


class Vanished(ArithmeticError):
    """Logits too large or too small to take exponentials of as they are."""


class Scanned(NamedTuple):
    """`weights` over `mass` is the softmax; a scan that has divided already gives no mass."""

    weights: Tensor  # [B, H, C, N], 0 where a column is not visible
    mass: Tensor | None  # [B, H, C, 1]
    expiry: Tensor  # [B, U, N], the last step a column is visible at; NEVER if it outlives the chunk
    scores: Tensor  # [B, U, N], after the chunk


def scan(
    logits: Tensor,
    births: Tensor,
    steps: Tensor,
    scores: Tensor | None,
    policy: Policy,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Scanned:
    """logits [B, H, C, N], births [B, U, N] (-1: empty), steps [B, C] (-1: padding), scores [B, U, N], sinks [H].

    A column is visible to a row from the step of its birth to its expiry. After each row the policy may condemn one
    column of every unit; what falls out of the model's own `window` leaves by itself.
    """
    batch, heads, rows, columns = logits.shape
    deciders = births.shape[1]
    scores = logits.new_zeros(births.shape) if scores is None else scores.clone()
    expiry = torch.where(births < 0, -1, NEVER)
    if window is not None:
        expiry = torch.minimum(expiry, torch.where(births < 0, -1, births + window - 1))
    weights = torch.empty_like(logits)
    for row in range(rows):
        now = steps[:, row, None, None]  # [B, 1, 1]
        visible = (births <= now) & (now <= expiry) & (births >= 0)
        weight = _softmax(logits[:, :, row], visible.repeat_interleave(heads // deciders, 1), sinks)
        weights[:, :, row] = weight
        mean = weight.view(batch, deciders, heads // deciders, columns).mean(2)
        scores = torch.where(now >= 0, policy.momentum * scores + mean, scores)
        victim = _victim(scores, births, visible & (now < expiry), now, policy)
        expiry = torch.where(victim & (now >= 0), now, expiry)
    latest = steps.amax(1)[:, None, None]
    return Scanned(weights, None, torch.where(expiry <= latest, expiry, NEVER), scores)


def _softmax(logits: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """[B, H, N]: over visible columns only (a dead one may hold the maximum); 0 everywhere if there is none."""
    masked = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, -1, 1).expand(len(logits), -1, 1)
        return torch.cat([masked, sink], -1).softmax(-1)[..., :-1]
    return masked.softmax(-1).masked_fill(~visible, 0)


def _victim(scores: Tensor, births: Tensor, staying: Tensor, now: Tensor, policy: Policy) -> Tensor:
    """[B, U, N], true at the free column with the lowest score, the older of equals, where too many are held."""
    if policy.capacity is None:
        return torch.zeros_like(staying)
    full = staying.sum(-1, keepdim=True) > policy.capacity
    free = staying & (births >= policy.first) & (births <= now - policy.last)
    ranked = scores.masked_fill(~free, torch.inf)
    lowest = free & (ranked == ranked.amin(-1, keepdim=True))
    oldest = births.masked_fill(~lowest, NEVER).argmin(-1, keepdim=True)
    return torch.zeros_like(staying).scatter_(-1, oldest, True) & full


def mask(births: Tensor, expiry: Tensor, steps: Tensor) -> Tensor:
    """births, expiry [B, U, N], steps [B, C] -> [B, U, C, N]: which columns each row sees.

    A row of padding sees everything, so that it stays finite.
    """
    now = steps[:, None, :, None]
    born = (births[:, :, None] >= 0) & (births[:, :, None] <= now)
    return (born & (now <= expiry[:, :, None])) | (now < 0)


def hide(weights: Tensor, births: Tensor, expiry: Tensor, steps: Tensor, sinks: Tensor | None) -> Tensor:
    """weights [B, H, C, N], exponentials, become 0 where a column is not visible -> mass [B, H, C, 1], sinks in it."""
    seen = mask(births, expiry, steps)
    weights.view(len(seen), seen.shape[1], -1, *seen.shape[2:]).mul_(seen[:, :, None].to(weights.dtype))
    mass = weights.sum(-1, keepdim=True)
    if sinks is not None:
        mass += sinks.detach().to(mass.dtype).exp().view(-1, 1, 1)
    low, high = torch.aminmax(mass)
    if not bool((low > 1e-30) & (high < 1e37)):
        raise Vanished("a row's exponentials overflowed or vanished")
    return mass


def compact(
    births: Tensor, scores: Tensor | None, rows: tuple[Tensor, ...], expiry: Tensor, used: int, end: int
) -> None:
    """births, scores [B, U, N], rows [B, E, N, D], expiry [B, U, used]: columns that have left become empty (-1), and
    those that stay at or past `end` move into the empty places before it, in order."""
    births = births[:, :, :used]
    births.masked_fill_(expiry != NEVER, -1)
    if end in (0, used):
        return
    staying = births[:, :, end:] >= 0
    free = (births[:, :, :end] >= 0).to(torch.uint8).argsort(dim=-1, stable=True)  # free places first
    place = free.gather(2, (staying.cumsum(-1) - 1).clamp(0, end - 1))
    place = torch.where(staying, place, torch.arange(end, used, device=births.device))
    births.scatter_(2, place, births[:, :, end:].clone())
    if scores is not None:
        scores.scatter_(2, place, scores[:, :, end:used].clone())
    for row in rows:
        put(row, place, row[:, :, end:used].clone())


def put(rows: Tensor, place: Tensor, new: Tensor) -> None:
    """rows [B, E, S, D], place [B, U, C], new [B, E, C, D]: each unit's rows go to its own places, in place."""
    if place.shape[:2] == (1, 1):
        rows.index_copy_(2, place[0, 0], new)
        return
    index = place.repeat_interleave(rows.shape[1] // place.shape[1], 1)
    rows.scatter_(2, index[..., None].expand(-1, -1, -1, rows.shape[3]), new)
