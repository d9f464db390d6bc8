"""A referee for low precision: a layer's run is replayed in float64 with the evictions that it decided itself.

Near-ties fall either way once a dtype rounds, so positions cannot be compared with the definition one by one. What must
hold: outputs are those of the tokens held at that step, each eviction takes exactly what the capacity asks for, and no
free token had a clearly lower score than the one that left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from msrnn.core import formats
from msrnn.core.attention import Attention
from msrnn.policy import Policy


@dataclass
class Verdict:
    """`regret`: by how much the score of a victim exceeded the lowest free one, at worst."""

    outputs: Tensor
    regret: float


def decoded(key: Tensor, value: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """What the slots stand for, in float64: each token encoded once, in the dtype in which it came."""
    if policy.kv is None:
        return key.double(), value.double()
    return formats.decode(*formats.encode(key, value, policy.kv), policy.kv, torch.float64)


def replay(query: Tensor, key: Tensor, value: Tensor, deaths: Tensor, policy: Policy, attention: Attention) -> Verdict:
    """query [H, T, D], key [G, T, D], value [G, T, V] in float64, deaths [U, T] -> outputs [H, T, V]."""
    heads, length, units = query.shape[0], query.shape[1], deaths.shape[0]
    key, value = (rows.repeat_interleave(heads // len(rows), 0) for rows in (key, value))
    positions, scores, worst = torch.arange(length), torch.zeros(units, length, dtype=torch.float64), 0.0
    outputs = torch.empty(heads, length, value.shape[-1], dtype=torch.float64)
    for now in range(length):
        held = (positions <= now) & (deaths >= now)  # [U, T]
        logits = (key @ query[:, now, :, None])[..., 0] * attention.scale
        seen = held.repeat_interleave(heads // units, 0)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs[:, now] = (weights[:, None] @ value)[:, 0]
        scores = policy.momentum * scores + weights.view(units, heads // units, length).mean(1)
        for unit in range(units):
            worst = max(worst, _regret(scores[unit], held[unit], deaths[unit], now, policy))
    return Verdict(outputs, worst)


def _regret(scores: Tensor, held: Tensor, deaths: Tensor, now: int, policy: Policy) -> float:
    """Of the eviction after step `now`, if there is one; a wrong number of victims or a protected one fails."""
    victims = (held & (deaths == now)).nonzero().flatten().tolist()
    assert policy.capacity is not None
    assert len(victims) == max(0, int(held.sum()) - policy.capacity), (now, victims)
    positions = torch.arange(len(held))
    free = held & (positions >= policy.first) & (positions <= now - policy.last)
    assert all(free[victim] for victim in victims), (now, victims)
    return max((float(scores[victim] - scores[free].min()) for victim in victims), default=0.0)
