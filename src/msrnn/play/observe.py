"""Evictions of a layer with the score each token had when it left, and the scores of the tokens still held.

The kernels keep no score longer than the policy needs it (TOVA keeps none), so scores are computed here a second time,
from the queries and keys that the layer's attention sees: one more matmul per layer and piece. Row 0 of a batch only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.attention import Attention
from ..kernels import NEVER
from ..rnn import RNNState


class Evictions(NamedTuple):
    """What left in each step of a piece. positions int64 [U, C] (-1: nothing left), scores float32 [U, C]."""

    positions: Tensor
    scores: Tensor


class Held(NamedTuple):
    """What a layer holds now. positions int64 [U, S] (-1: empty slot), scores float32 [U, S]."""

    positions: Tensor
    scores: Tensor


class LayerObserver:
    """Stands between a cache layer and its attention; `evictions` and `held` describe the last piece read."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.policy = layer, layer.policy
        self.evictions: Evictions | None = None
        self.held: Held | None = None
        self.attention: Tensor | None = None  # [T], attention to each position so far; collected where it is a tensor
        self._expiry: list[tuple[Tensor, Tensor]] = []
        self._attend = layer.attend
        layer.attend, layer.on_evict = self.attend, self._on_evict

    def _on_evict(self, positions: Tensor, expiry: Tensor, *_: object) -> None:
        self._expiry.append((positions[0].clone(), expiry[0].clone()))

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        """The layer's own `attend`; the columns are copied before it, as the layer overwrites them."""
        columns = self._columns(query)
        self._expiry = []
        output: Tensor = self._attend(query, attention, real)
        self._record(query[0].float(), columns, attention)
        return output

    def _columns(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """keys [G, N, D], positions [U, N] and scores [U, N] of the slots and the new tokens."""
        new = self.layer.pending[0]
        units = _units(self.policy.scope, query.shape[1], new.shape[0])
        if self.policy.scope == "query_head":
            new = new.repeat_interleave(query.shape[1] // new.shape[0], 0)
        slots = self.layer.state
        start = 0 if slots is None else int(slots.seen[0])
        fresh = torch.arange(start, start + new.shape[1], device=new.device).expand(units, -1)
        if slots is None:
            return new.float(), fresh, fresh.new_zeros(fresh.shape, dtype=torch.float32)
        used = slots.positions.shape[2] if slots.limit is not None else slots.fed
        positions = slots.positions[0, :, :used].clone()
        old = torch.zeros_like(positions, dtype=torch.float32)
        if slots.scores is not None:
            old = slots.scores[0, :, :used].float().clone()
        keys = torch.cat([slots.keys[0, :, :used], new], 1).float()
        return keys, torch.cat([positions, fresh], 1), torch.cat([old, torch.zeros_like(fresh, dtype=old.dtype)], 1)

    def _record(self, query: Tensor, columns: tuple[Tensor, Tensor, Tensor], attention: Attention) -> None:
        keys, positions, old = columns
        count = query.shape[1]
        steps = torch.arange(count, device=query.device) + (positions.max() + 1 - count)
        expiry = self._lookup(positions, int(steps[-1]) + 1)
        weights = _weights(query, keys, positions, expiry, steps, attention)  # [U, C, N]
        if self.attention is not None:
            self._collect(weights, positions)
        scores = _accumulate(weights, old, float(self.policy.momentum))
        self.evictions = _left(positions, expiry, steps, scores)
        stays = (expiry > steps[-1]) & (positions >= 0)
        self.held = Held(torch.where(stays, positions, -1), torch.where(stays, scores[:, -1], 0.0))

    def _lookup(self, positions: Tensor, length: int) -> Tensor:
        """[U, N]: the last step at which each column is visible, as the layer reported it."""
        table = torch.full((positions.shape[0], length + 1), NEVER, dtype=torch.int64, device=positions.device)
        for born, expiry in self._expiry:
            leaving = (born >= 0) & (expiry != NEVER)
            unit, column = leaving.nonzero(as_tuple=True)
            table[unit, born[unit, column]] = expiry[unit, column].to(torch.int64)
        return table.gather(1, positions.clamp(min=0))

    def _collect(self, weights: Tensor, positions: Tensor) -> None:
        assert self.attention is not None
        inside = (positions >= 0) & (positions < len(self.attention))
        share = weights.sum(1) / weights.shape[0]
        self.attention.index_add_(0, positions[inside], share[inside])


def observe(state: RNNState) -> list[LayerObserver]:
    """An observer on every bounded layer of a state."""
    return [LayerObserver(layer) for layer in state.cache.bounded]


def fork(state: RNNState) -> RNNState:
    """A fork without the observers, which a copied layer would still report to."""
    twin = state.fork()
    for layer in twin.cache.bounded:
        layer.__dict__.pop("attend", None)
    return twin


def _units(scope: str, heads: int, kv_heads: int) -> int:
    return {"layer": 1, "kv_head": kv_heads, "query_head": heads}[scope]


def _weights(
    query: Tensor, keys: Tensor, positions: Tensor, expiry: Tensor, steps: Tensor, attention: Attention
) -> Tensor:
    """query [H, C, D], keys [G, N, D] -> [U, C, N]: each unit's attention, averaged over its heads."""
    heads, count, _ = query.shape
    units = positions.shape[0]
    logits = torch.einsum("gqcd,gnd->gqcn", query.view(keys.shape[0], -1, count, query.shape[2]), keys)
    logits = logits.reshape(heads, count, -1) * attention.scale
    if attention.softcap is not None:
        logits = torch.tanh(logits / attention.softcap) * attention.softcap
    visible = (positions >= 0)[:, None] & (positions[:, None] <= steps[:, None]) & (expiry[:, None] >= steps[:, None])
    logits = logits.view(units, heads // units, count, -1).masked_fill(~visible[:, None], -torch.inf)
    if attention.sinks is None:
        return logits.softmax(-1).mean(1)
    sinks = attention.sinks.float().view(units, -1, 1, 1).expand(-1, -1, count, 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1].mean(1)


def _accumulate(weights: Tensor, old: Tensor, momentum: float) -> Tensor:
    """weights [U, C, N], old [U, N] -> the scores after every step, [U, C, N]: momentum x score + weight."""
    if momentum == 0:
        return weights
    scores, last = torch.empty_like(weights), old
    for step in range(weights.shape[1]):
        last = torch.add(weights[:, step], last, alpha=momentum)
        scores[:, step] = last
    return scores


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
