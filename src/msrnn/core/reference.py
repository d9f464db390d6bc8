"""The definition: a bounded multi-state RNN, one token at a time, to be checked by eye against the paper.

One sequence, one layer, plain Python lists; slow on purpose. Every faster path is held to this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..policy import Policy
from .attention import Attention
from .slots import units

Prompt = Literal["recurrent", "oneshot"]


@dataclass(eq=False)
class Row:
    """One token of the state. key [G, D], value [G, V]."""

    position: int
    key: Tensor
    value: Tensor
    score: float = 0.0


@dataclass
class Reference:
    """The state of one layer: for each unit, the rows it holds and the step after which each lost token left."""

    rows: list[list[Row]]
    deaths: list[dict[int, int]] = field(default_factory=list)
    seen: int = 0


def start(policy: Policy, heads: int, kv_heads: int) -> Reference:
    deciders = units(policy, heads, kv_heads)
    return Reference(rows=[[] for _ in range(deciders)], deaths=[{} for _ in range(deciders)])


def run(
    state: Reference,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    prompt: Prompt = "recurrent",
) -> Tensor:
    """query [H, T, D], key [G, T, D], value [G, T, V] -> [H, T, V]; the state moves on by T tokens."""
    outputs = []
    for t in range(query.shape[1]):
        outputs.append(_attend(state, query[:, t], key[:, t], value[:, t], policy, attention))
        if prompt == "recurrent" or t == query.shape[1] - 1:
            _evict(state, policy)
        state.seen += 1
    return torch.stack(outputs, dim=1)


def _attend(
    state: Reference, query: Tensor, key: Tensor, value: Tensor, policy: Policy, attention: Attention
) -> Tensor:
    """The newcomer joins every unit, is attended to with the rest, and all scores move on."""
    heads, kv_heads, now = query.shape[0], key.shape[0], state.seen
    output = value.new_zeros(heads, value.shape[-1])
    for unit, rows in enumerate(state.rows):
        rows.append(Row(now, key, value))
        total = query.new_zeros(len(rows))
        members = range(unit * heads // len(state.rows), (unit + 1) * heads // len(state.rows))
        for head in members:
            group = head * kv_heads // heads
            weights = _softmax(query[head], torch.stack([row.key[group] for row in rows]), head, attention)
            output[head] = weights @ torch.stack([row.value[group] for row in rows])
            total += weights
        for row, weight in zip(rows, (total / len(members)).tolist(), strict=True):
            row.score = policy.momentum * row.score + weight
        if attention.window is not None:  # what the next query cannot see leaves now, before any choice
            _leave(state, unit, [row for row in rows if row.position <= now + 1 - attention.window], now)
    return output


def _softmax(query: Tensor, keys: Tensor, head: int, attention: Attention) -> Tensor:
    logits = keys @ query * attention.scale
    if attention.softcap is not None:
        logits = torch.tanh(logits / attention.softcap) * attention.softcap
    if attention.sinks is None:
        return logits.softmax(0)
    return torch.cat([logits, attention.sinks[head : head + 1]]).softmax(0)[:-1]


def _evict(state: Reference, policy: Policy) -> None:
    """Free tokens with the lowest score leave, the older of equals, until `capacity` are left."""
    now = state.seen
    for unit, rows in enumerate(state.rows):
        while policy.capacity is not None and len(rows) > policy.capacity:
            free = [row for row in rows if policy.first <= row.position <= now - policy.last]
            _leave(state, unit, [min(free, key=lambda row: (row.score, row.position))], now)


def _leave(state: Reference, unit: int, leaving: list[Row], last_step: int) -> None:
    for row in leaving:
        state.deaths[unit][row.position] = last_step
        state.rows[unit].remove(row)
