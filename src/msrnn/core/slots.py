"""The state of one layer: at most `capacity` tokens' keys and values, where they came from, what they scored.

Slots have no order: keys carry their rotary position, `positions` says which token a slot holds (-1: empty). One
slot more than the capacity exists, for the newcomer while it is attended to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..policy import Policy

_normal = torch.inference_mode(False)  # states outlive a caller's inference mode, and are written in place later
_GROWTH = 256  # slots a state without capacity starts with, before it doubles


def slots(policy: Policy, window: int | None = None) -> int | None:
    """How many slots a layer needs: the capacity and the newcomer, or the model's own window if that is less."""
    limits = [n for n in (policy.capacity and policy.capacity + 1, window) if n is not None]
    return min(limits) if limits else None


def units(policy: Policy, heads: int, kv_heads: int) -> int:
    """How many deciders a layer has."""
    return {"layer": 1, "kv_head": kv_heads, "query_head": heads}[policy.scope]


def decides_by_age(policy: Policy, window: int | None) -> bool:
    """Whether the step at which a token leaves follows from its position alone."""
    if window is not None and policy.capacity is not None and policy.capacity >= window - 1:
        return True  # the model's own window is the tighter bound
    return policy.blind and (window is None or policy.first == 0 or policy.capacity is None)


@dataclass
class State:
    """keys [B, E, S, D], values [B, E, S, V], positions [B, U, S], scores [B, U, S] or None, seen [B].

    E stored heads: the KV heads, or every query head where each decides alone. `fed` counts the columns that came,
    padding included; `seen` the real tokens of each row. `limit` is the number of slots, None for no limit. `packed`
    says that the empty slot is the last one, as it is after a chunk; a step leaves it anywhere. `careful` says that
    this layer's logits have been too large for the quick scan.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None
    seen: Tensor
    limit: int | None
    fed: int = 0
    packed: bool = False
    careful: bool = False

    @classmethod
    @_normal
    def empty(cls, policy: Policy, key: Tensor, value: Tensor, heads: int, window: int | None = None) -> State:
        """A state for keys like `key` [B, G, T, D] and values like `value` [B, G, T, V]; nothing is held yet."""
        batch, kv_heads = key.shape[:2]
        deciders = units(policy, heads, kv_heads)
        limit = slots(policy, window)
        shape = (batch, max(kv_heads, deciders), _GROWTH if limit is None else limit)
        wide = torch.promote_types(key.dtype, torch.float32)
        scored = policy.momentum > 0 and not decides_by_age(policy, window)
        return cls(
            keys=key.new_zeros(*shape, key.shape[-1]),
            values=value.new_zeros(*shape, value.shape[-1]),
            positions=torch.full((batch, deciders, shape[2]), -1, dtype=torch.int64, device=key.device),
            scores=key.new_zeros((batch, deciders, shape[2]), dtype=wide) if scored else None,
            seen=torch.zeros(batch, dtype=torch.int64, device=key.device),
            limit=limit,
        )

    @property
    def filled(self) -> int:
        """Slots at or past this one are empty in every row."""
        return self.fed if self.limit is None else min(self.fed, self.limit - self.packed)

    @property
    def held(self) -> Tensor:
        """[B, U]: how many tokens each unit holds now."""
        return (self.positions >= 0).sum(-1)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        named = {"keys": self.keys, "values": self.values, "positions": self.positions, "scores": self.scores}
        return {name: tensor for name, tensor in (named | {"seen": self.seen}).items() if tensor is not None}

    @_normal
    def reserve(self, slots: int) -> None:
        """Room for `slots` slots in a state without limit; one with a limit has all it will ever have."""
        missing = slots - self.positions.shape[2]
        if self.limit is not None or missing <= 0:
            return
        missing = max(missing, self.positions.shape[2])
        pad = torch.nn.functional.pad
        self.keys = pad(self.keys, (0, 0, 0, missing))
        self.values = pad(self.values, (0, 0, 0, missing))
        self.positions = pad(self.positions, (0, missing), value=-1)
        self.scores = None if self.scores is None else pad(self.scores, (0, missing))

    @_normal
    def _map(self, change: object) -> State:
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})  # type: ignore[operator]

    def fork(self) -> State:
        """A copy that goes its own way."""
        return self._map(torch.clone)

    def to(self, device: torch.device | str) -> State:
        return self._map(lambda tensor: tensor.to(device))

    def rows(self, index: Tensor) -> State:
        """The state whose row i was row index[i]: reordered beams, repeated or dropped sequences."""
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))
