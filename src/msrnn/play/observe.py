"""Evictions of a layer with the score each token had when it left, and the scores of the tokens still held.

The kernels keep no score longer than the policy needs it (TOVA keeps none), so scores are computed here a second time,
from the queries and keys that the layer's attention sees: one more matmul per layer and piece. Row 0 of a batch only.
Where KV heads have slots of their own, each is observed alone, and they are the units of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import kernels
from ..core.attention import Attention
from ..core.head_groups import Group
from ..core.heads import HeadRecorder, layer_parts, parts_of
from ..core.rules import memory_size, score_by_rule
from ..core.slots import NEVER, Columns, Slots, gain_of, keeps_residual, unit_count
from ..core.trace import Recorder
from ..kernels.torch.residual import Shares
from ..plan import HeadPolicies, parts
from ..policy import Policy
from ..rnn import RNNState


class Evictions(NamedTuple):
    """What left in each step of a piece. positions int64 [U, C] (-1: nothing left), scores float32 [U, C]."""

    positions: Tensor
    scores: Tensor


class Held(NamedTuple):
    """What a layer holds now. positions int64 [U, S] (-1: empty slot), scores float32 [U, S]."""

    positions: Tensor
    scores: Tensor


class Expiries(Recorder):
    """Keeps what the recurrence reports about one call's columns: positions and expiry, [U, N] each."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[tuple[Tensor, Tensor]] = []

    def __call__(self, positions: Tensor, expiry: Tensor) -> None:
        self.chunks.append((positions[0].clone(), expiry[0].clone()))

    def of(self, positions: Tensor, length: int) -> Tensor:
        """[U, N]: the last step at which each of these columns is visible, as the recurrence reported it."""
        table = torch.full((positions.shape[0], length + 1), NEVER, dtype=torch.int64, device=positions.device)
        for reported, expiry in self.chunks:
            unit, column = ((reported >= 0) & (expiry != NEVER)).nonzero(as_tuple=True)
            table[unit, reported[unit, column]] = expiry[unit, column].to(torch.int64)
        return table.gather(1, positions.clamp(min=0))


class LayerObserver:
    """Stands between a cache layer and its attention; `evictions` and `held` describe the last piece read."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.evictions: Evictions | None = None
        self.held: Held | None = None
        self.attention: Tensor | None = None  # [T], squared weights by position so far; collected where it is a tensor
        self._expiries = tuple(Expiries() for _ in parts(layer.policy))
        self._attend = layer.attend
        by_head = isinstance(layer.policy, HeadPolicies)
        layer.attend, layer.recorder = self.attend, HeadRecorder(self._expiries) if by_head else self._expiries[0]

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        """The layer's own `attend`; the columns are copied before it, as the layer overwrites them."""
        key, value = self.layer.pending
        own = layer_parts(self.layer.policy)
        queries = [part.take(query[:1]) for part in own]
        slots = [None] * len(own) if self.layer.slots is None else parts_of(self.layer.slots)
        columns = [
            _columns(part.policy, one, rows, part.take(key[:1]), part.take(value[:1]), attention.window)
            for part, one, rows in zip(own, slots, queries, strict=True)
        ]
        for expiries in self._expiries:
            expiries.chunks.clear()
        output: Tensor = self._attend(query, attention, real)
        self._record(own, [rows[0].float() for rows in queries], columns, attention)
        return output

    def _record(
        self, own: Sequence[Group], queries: Sequence[Tensor], columns: Sequence[Columns], attention: Attention
    ) -> None:
        """Observe every part; the units of all of them are those of the layer."""
        evictions, held = [], []
        for part, query, seen, expiries in zip(own, queries, columns, self._expiries, strict=True):
            positions, count = seen.positions[0], query.shape[1]
            steps = torch.arange(count, device=query.device) + (positions.max() + 1 - count)
            now, expiry = steps[:, None], expiries.of(positions, int(steps[-1]) + 1)
            visible = (positions >= 0)[:, None] & (positions[:, None] <= now) & (expiry[:, None] >= now)  # [U, C, N]
            leaves = visible & (expiry[:, None] == now)
            weights = _weights(part.policy, query, seen, visible, leaves, part.attention(attention))
            if self.attention is not None:
                self._collect(weights, positions, sum(map(len, queries)))
            scores = _scores(part.policy, weights, seen, visible, steps)
            evictions.append(_left(positions, expiry, steps, scores))
            stays = (expiry > steps[-1]) & (positions >= 0)
            held.append(Held(torch.where(stays, positions, -1), torch.where(stays, scores[:, -1], 0.0)))
        self.evictions = Evictions(*(torch.cat(rows) for rows in zip(*evictions, strict=True)))
        self.held = _join(held)

    def _collect(self, weights: Tensor, positions: Tensor, heads: int) -> None:
        """weights [H, C, N]: add their squares: heads that look at one place count more than those that look around."""
        assert self.attention is not None
        by_unit = weights.square().sum(1).view(positions.shape[0], -1, weights.shape[2]).sum(1) / heads
        inside = (positions >= 0) & (positions < len(self.attention))
        self.attention.index_add_(0, positions[inside], by_unit[inside])


def observe(state: RNNState) -> list[LayerObserver]:
    """An observer on every bounded layer of a state."""
    return [LayerObserver(layer) for layer in state.cache.bounded]


def fork(state: RNNState) -> RNNState:
    """A fork without the observers, which a copied layer would still report to."""
    twin = state.fork()
    for layer in twin.cache.bounded:
        layer.__dict__.pop("attend", None)
        layer.recorder = None
    return twin


def _columns(
    policy: Policy, slots: Slots | None, query: Tensor, key: Tensor, value: Tensor, window: int | None
) -> Columns:
    """The slots and the new tokens, in float32; scores as after the last step, 0 for new tokens."""
    key, value = key.float(), value.float()
    units = unit_count(policy, query.shape[1], key.shape[1])
    share = max(units, key.shape[1]) // key.shape[1]  # every query head that decides alone has keys of its own
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    if policy.kv is not None:
        *_, key, value = kernels.encode(key, value, policy.kv)
    start = 0 if slots is None else int(slots.seen[0])
    positions = torch.arange(start, start + key.shape[2], device=key.device).expand(1, units, -1)
    scores = torch.zeros_like(positions, dtype=torch.float32)
    memory = scores.new_zeros(*scores.shape, memory_size(policy))
    if slots is None:
        residual = key.new_zeros(*key.shape[:2], key.shape[3] + value.shape[3] + 1)
        held = residual if keeps_residual(policy, window) else None
        return Columns(key, value, positions, scores, memory=memory, residual=held)
    used = slots.fed if slots.limit is None else slots.positions.shape[2]
    old = slots.positions[:1, :, :used]
    before = torch.zeros_like(old, dtype=torch.float32) if slots.scores is None else slots.scores[:1, :, :used]
    keys, values = (rows[:1].float() for rows in slots.decoded(query.dtype, used))
    return Columns(
        torch.cat([keys, key], 2),
        torch.cat([values, value], 2),
        torch.cat([old, positions], 2),
        torch.cat([before.float(), scores], 2),
        memory=memory if slots.memory is None else torch.cat([slots.memory[:1, :, :used].float(), memory], 2),
        residual=None if slots.residual is None else slots.residual[:1].to(torch.float32, copy=True),
    )


def _weights(
    policy: Policy, query: Tensor, columns: Columns, visible: Tensor, leaves: Tensor, attention: Attention
) -> Tensor:
    """query [H, C, D]; visible, leaves [U, C, N] -> every head's attention weights, [H, C, N], but the residual's."""
    heads, count, _ = query.shape
    keys = columns.attended[0][0]  # [G, N, D], and behind them the residual
    logits = torch.einsum("gqcd,gnd->gqcn", query.view(keys.shape[0], -1, count, query.shape[2]), keys)
    logits = logits.reshape(heads, count, -1) * attention.scale
    if attention.softcap is not None:
        logits = torch.tanh(logits / attention.softcap) * attention.softcap
    size = visible.shape[2]
    hidden = ~visible.repeat_interleave(heads // visible.shape[0], 0)
    terms = [logits[..., :size].masked_fill(hidden, -torch.inf)]
    if columns.residual is not None:
        terms.append(_residual_logits(policy, logits, columns, leaves, attention.window))
    if attention.sinks is not None:
        terms.append(attention.sinks.float().view(-1, 1, 1).expand(-1, count, 1))
    return torch.cat(terms, -1).softmax(-1)[..., :size]


def _residual_logits(policy: Policy, logits: Tensor, columns: Columns, leaves: Tensor, window: int | None) -> Tensor:
    """logits [H, C, N + 1] -> the residual's in every step, [H, C, 1]; what the model's own window hides joins none."""
    shares, rows = Shares(columns, logits.dtype), []
    first = columns.positions[0].max() + 1 - logits.shape[1]
    for step in range(logits.shape[1]):
        rows.append(shares.logit(logits[None, :, step]))
        victim = leaves[None, :, step]
        if window is not None:
            victim = victim & (columns.positions != first + step - window + 1)
        shares.add(victim, policy.residual or 0.0)
    return torch.cat(rows).transpose(0, 1)


def _scores(policy: Policy, weights: Tensor, columns: Columns, visible: Tensor, steps: Tensor) -> Tensor:
    """weights [H, C, N] -> the scores after every step, [U, C, N]: momentum x score + mean weight (x gain)."""
    assert columns.scores is not None
    if policy.rule is not None:
        return _rule_scores(policy, weights, columns, visible, steps)
    if policy.gain is not None:
        gains = gain_of(columns.values[0], torch.float32)  # [G, N]
        weights = weights * gains.repeat_interleave(weights.shape[0] // gains.shape[0], 0)[:, None]
    weights = weights.view(visible.shape[0], -1, *weights.shape[1:]).mean(1)
    if policy.momentum == 0:
        return weights
    scores, last = torch.empty_like(weights), columns.scores[0]
    for step in range(weights.shape[1]):
        last = torch.add(weights[:, step], last, alpha=policy.momentum)
        scores[:, step] = last
    return scores


def _rule_scores(policy: Policy, weights: Tensor, columns: Columns, visible: Tensor, steps: Tensor) -> Tensor:
    """The same for a research rule, which is asked step by step."""
    scores, last, memory = [], columns.scores, columns.memory
    assert last is not None
    for step, now in enumerate(steps):
        seen = (weights[None, :, step], columns.keys, columns.values, columns.positions, visible[None, :, step])
        last, memory = score_by_rule(policy, *seen, now.view(1, 1, 1), last, memory)
        scores.append(last[0])
    return torch.stack(scores, 1)


def _left(positions: Tensor, expiry: Tensor, steps: Tensor, scores: Tensor) -> Evictions:
    """Who left after which step; at most one token leaves a unit in a step."""
    units, count = positions.shape[0], len(steps)
    who = positions.new_full((units, count), -1)
    score = scores.new_zeros(units, count)
    unit, column = ((expiry <= steps[-1]) & (positions >= 0)).nonzero(as_tuple=True)
    step = (expiry[unit, column] - steps[0]).to(torch.int64)
    who[unit, step] = positions[unit, column]
    score[unit, step] = scores[unit, step, column]
    return Evictions(who, score)


def _join(held: Sequence[Held]) -> Held:
    """The units of all parts; those with fewer slots end in empty ones."""
    width = max(one.positions.shape[1] for one in held)
    positions = [pad(one.positions, (0, width - one.positions.shape[1]), value=-1) for one in held]
    scores = [pad(one.scores, (0, width - one.scores.shape[1])) for one in held]
    return Held(torch.cat(positions), torch.cat(scores))
