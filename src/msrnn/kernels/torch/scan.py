"""`scan` in plain PyTorch: who leaves after each row of a chunk, and the attention weights. On any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.attention import Attention
from ...core.rules import score_by_rule
from ...core.slots import NEVER, NO_SOFTCAP, Columns
from ...core.units import limits_of, momentum_of
from ...policy import Policy
from .residual import Shares


class Scan(NamedTuple):
    """`weights` over `total` is the softmax; a scan that has normalised already gives no total."""

    weights: Tensor  # [B, H, C, N], 0 where a column is not visible; with a residual, N + 1
    total: Tensor | None  # [B, H, C, 1]
    expiry: Tensor  # [B, U, N], the last step at which a column is visible; NEVER if it outlives the chunk
    scores: Tensor  # [B, U, N], after the chunk
    memory: Tensor | None = None  # [B, U, N, F], a rule's, after the chunk
    residual: Tensor | None = None  # [B, G, D + V + 1], after the chunk


def scan(logits: Tensor, columns: Columns, steps: Tensor, policy: Policy, attention: Attention) -> Scan:
    """logits [B, H, C, N], steps [B, C] (-1: padding).

    A column is visible to a row from the step of its own position to its expiry. After each row the policy may evict
    one column of every unit; what falls out of the model's own window leaves by itself. With a residual, the last
    logit of a row is that of the residual before the chunk, and so are the weights.
    """
    positions, window = columns.positions, attention.window
    scores = logits.new_zeros(positions.shape) if columns.scores is None else columns.scores.clone()
    expiry = torch.where(positions < 0, -1, NEVER)
    if window is not None:
        expiry = torch.minimum(expiry, torch.where(positions < 0, -1, positions + window - 1))
    if policy.rule is not None:
        columns = columns._replace(keys=columns.keys.to(logits.dtype), values=columns.values.to(logits.dtype))
    weights, memory, shares = torch.empty_like(logits), columns.memory, shares_of(columns, logits, attention)
    for row in range(logits.shape[2]):
        now = steps[:, row, None, None]  # [B, 1, 1]
        visible = (positions <= now) & (now <= expiry) & (positions >= 0)
        held = _attend(logits[:, :, row], weights[:, :, row], visible, now, attention.sinks, shares)
        new, noted = _score(policy, held, columns, visible, now, scores, memory)
        scores = torch.where(now >= 0, new, scores)
        memory = None if memory is None or noted is None else torch.where(now[..., None] >= 0, noted, memory)
        victim = _victim(scores, positions, visible & (now < expiry), now, policy) & (now >= 0)
        expiry = torch.where(victim, now, expiry)
        if shares is not None:
            shares.add(victim, policy.residual or 0.0)
    latest = steps.amax(1)[:, None, None]
    residual = None if shares is None else shares.residual()
    return Scan(weights, None, torch.where(expiry <= latest, expiry, NEVER), scores, memory, residual)


def shares_of(columns: Columns, logits: Tensor, attention: Attention) -> Shares | None:
    """Where a chunk begins with a residual, or may: who is in it."""
    if columns.residual is None:
        return None
    if attention.softcap is not None:
        raise ValueError(NO_SOFTCAP)
    return Shares(columns, logits.dtype)


def _attend(
    logits: Tensor, out: Tensor, visible: Tensor, now: Tensor, sinks: Tensor | None, shares: Shares | None
) -> Tensor:
    """logits [B, H, N] -> the weights of visible columns; `out` [B, H, N] becomes the weights of all.

    A residual is one column more, and its weight goes to the columns in it.
    """
    heads = logits.shape[1]
    if shares is None:
        return out.copy_(_softmax(logits, _by_head(visible, heads), sinks))
    row = torch.cat([logits[..., :-1], shares.logit(logits)], -1)
    blended = (shares.number > 0) & (now >= 0)
    weights = _softmax(row, _by_head(torch.cat([visible, blended], -1), heads), sinks)
    held = weights[..., :-1]
    out.copy_(weights[..., -1:] * shares.of(heads))
    out[..., :-1] += held
    return held


def _score(
    policy: Policy,
    weights: Tensor,
    columns: Columns,
    visible: Tensor,
    now: Tensor,
    scores: Tensor,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """weights [B, H, N], scores [B, U, N] and memory [B, U, N, F] before this step -> after it."""
    if policy.rule is not None:
        rows = (columns.keys, columns.values, columns.positions)
        return score_by_rule(policy, weights, *rows, visible, now, scores, memory)
    if columns.gains is not None:
        weights = weights * _by_head(columns.gains, weights.shape[1]).to(weights.dtype)
    batch, units, size = scores.shape
    return (momentum_of(policy) * scores).to(scores.dtype) + weights.view(batch, units, -1, size).mean(2), None


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """rows [B, G, N] of units or KV heads -> [B, H, N], one for every query head."""
    return rows.repeat_interleave(heads // rows.shape[1], 1)


def _softmax(logits: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """[B, H, N]: over visible columns only (an evicted one may hold the maximum); 0 everywhere if there is none."""
    masked = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, -1, 1).expand(len(logits), -1, 1)
        return torch.cat([masked, sink], -1).softmax(-1)[..., :-1]
    return masked.softmax(-1).masked_fill(~visible, 0)


def _victim(scores: Tensor, positions: Tensor, staying: Tensor, now: Tensor, policy: Policy) -> Tensor:
    """[B, U, N], true at the free column with the lowest score, the older of equals, where too many are held.

    A score that is no number counts as the highest.
    """
    if policy.capacity is None:
        return torch.zeros_like(staying)
    capacity, first, last = limits_of(policy)
    full = staying.sum(-1, keepdim=True) > capacity
    free = staying & (positions >= first) & (positions <= now - last)
    free = torch.where(free.any(-1, keepdim=True), free, staying)  # positions that no text has: the bound still holds
    ranked = scores.masked_fill(~free | scores.isnan(), torch.inf)
    lowest = free & (ranked == ranked.amin(-1, keepdim=True))
    oldest = positions.masked_fill(~lowest, NEVER).argmin(-1, keepdim=True)
    return torch.zeros_like(staying).scatter_(-1, oldest, True) & full
