"""`scan` in plain PyTorch: a chunk's softmaxes, scores and evictions, one row at a time, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..policy import Policy

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
