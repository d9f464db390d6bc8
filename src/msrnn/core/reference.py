"""The definition: a bounded multi-state RNN, one token at a time, to be checked by eye against the paper.

One sequence, one layer, plain Python lists; slow on purpose. Every faster path is held to this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..policy import Policy
from .attention import Attention
from .formats import decode, encode
from .rules import View, load_rule, memory_size
from .slots import unit_count


@dataclass(eq=False)
class Row:
    """One token of the state. key [G, D], value [G, V]; memory [F]: what a research rule stores with it."""

    position: int
    key: Tensor
    value: Tensor
    memory: Tensor
    score: float = 0.0


@dataclass
class Residual:
    """The mean of the tokens that a unit has evicted, older ones counting less. key [G, D], value [G, V]."""

    key: Tensor
    value: Tensor
    number: float = 1.0

    def add(self, row: Row, decay: float) -> None:
        self.number = decay * self.number + 1
        self.key = self.key + (row.key - self.key) / self.number
        self.value = self.value + (row.value - self.value) / self.number


@dataclass
class Reference:
    """The state of one layer: for each unit, the rows it holds and the step after which each lost token left."""

    rows: list[list[Row]]
    deaths: list[dict[int, int]] = field(default_factory=list)
    residuals: list[Residual | None] = field(default_factory=list)
    seen: int = 0


def start(policy: Policy, heads: int, kv_heads: int) -> Reference:
    units = unit_count(policy, heads, kv_heads)
    return Reference(rows=[[] for _ in range(units)], deaths=[{} for _ in range(units)], residuals=[None] * units)


def run(
    state: Reference,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    oneshot: bool = False,
) -> Tensor:
    """query [H, T, D], key [G, T, D], value [G, T, V] -> [H, T, V]; the state moves on by T tokens.

    `oneshot`: nothing leaves before the last token, as in the paper's released code.
    """
    if policy.kv is not None:  # each token is stored in fewer bits, once, and seen so from then on
        key, value = decode(*encode(key, value, policy.kv), policy.kv, key.dtype)
    outputs = []
    for t in range(query.shape[1]):
        outputs.append(_attend(state, query[:, t], key[:, t], value[:, t], policy, attention))
        if not oneshot or t == query.shape[1] - 1:
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
        rows.append(Row(now, key, value, value.new_zeros(memory_size(policy))))
        members = range(unit * heads // len(state.rows), (unit + 1) * heads // len(state.rows))
        groups = [head * kv_heads // heads for head in members]
        weights, residual = [], state.residuals[unit]
        attended = rows if residual is None else [*rows, residual]
        for head, group in zip(members, groups, strict=True):
            keys, values = (torch.stack([getattr(row, name)[group] for row in attended]) for name in ("key", "value"))
            number = 1.0 if residual is None else residual.number
            attention_to = _softmax(query[head], keys, number, head, attention)
            output[head] = attention_to @ values
            weights.append(attention_to[: len(rows)])
        for row, score in zip(rows, _scores(policy, rows, groups, torch.stack(weights), now).tolist(), strict=True):
            row.score = score
        if attention.window is not None:  # what the next query cannot see leaves now, before any choice
            _leave(state, unit, [row for row in rows if row.position <= now + 1 - attention.window], now)
    return output


def _scores(policy: Policy, rows: list[Row], groups: list[int], weights: Tensor, now: int) -> Tensor:
    """weights [heads of the unit, rows] -> [rows]: momentum x old score + mean of weight (x gain)."""
    before = torch.tensor([row.score for row in rows], dtype=weights.dtype)
    if policy.rule is not None:
        scores, memory = load_rule(policy.rule)(_view(policy, rows, groups, weights, now, before))
        for row, numbers in zip(rows, memory[0, 0], strict=True):
            row.memory = numbers
        return scores[0, 0]
    if policy.gain == "value_norm":
        weights = weights * torch.stack([torch.stack([row.value[group].norm() for row in rows]) for group in groups])
    return policy.momentum * before + weights.mean(0)


def _view(policy: Policy, rows: list[Row], groups: list[int], weights: Tensor, now: int, before: Tensor) -> View:
    """What a research rule sees of one unit, as a batch of one."""
    own = sorted(set(groups))
    keys, values = (torch.stack([getattr(row, name)[own] for row in rows], 1)[None, None] for name in ("key", "value"))
    positions = torch.tensor([[[row.position for row in rows]]])
    visible = torch.ones_like(positions, dtype=torch.bool)
    step, scores, memory = torch.tensor([[[now]]]), before[None, None], torch.stack([row.memory for row in rows])
    return View(weights[None, None], keys, values, positions, visible, step, scores, memory[None, None], policy)


def _softmax(query: Tensor, keys: Tensor, number: float, head: int, attention: Attention) -> Tensor:
    """The last key counts as so many: a residual has the weight of all tokens in it."""
    logits = keys @ query * attention.scale
    if attention.softcap is not None:
        logits = torch.tanh(logits / attention.softcap) * attention.softcap
    logits[-1] += math.log(number)
    if attention.sinks is None:
        return logits.softmax(0)
    return torch.cat([logits, attention.sinks[head : head + 1]]).softmax(0)[:-1]


def _evict(state: Reference, policy: Policy) -> None:
    """Free tokens with the lowest score leave, the older of equals, until `capacity` are left."""
    now = state.seen
    for unit, rows in enumerate(state.rows):
        while policy.capacity is not None and len(rows) > policy.capacity:
            free = [row for row in rows if policy.first <= row.position <= now - policy.last]
            victim = min(free, key=lambda row: (row.score, row.position))
            _leave(state, unit, [victim], now)
            if policy.residual is not None:
                _blend(state, unit, victim, policy.residual)


def _blend(state: Reference, unit: int, victim: Row, decay: float) -> None:
    """A token that leaves joins the residual."""
    residual = state.residuals[unit]
    if residual is None:
        state.residuals[unit] = Residual(victim.key, victim.value)
    else:
        residual.add(victim, decay)


def _leave(state: Reference, unit: int, leaving: list[Row], last_step: int) -> None:
    for row in leaving:
        state.deaths[unit][row.position] = last_step
        state.rows[unit].remove(row)
