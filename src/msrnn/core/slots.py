"""Slots: the memory of one layer. A cache's state, the engine's rows and a vLLM block are all this one type.

Slots have no order. Keys carry their rotary position, and `positions` says which token a slot holds (-1: none). There
is one slot more than the capacity, for the newest token while it is attended to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..policy import KV, Policy
from .formats import check_sizes, code_sizes, decode, scale_count
from .rules import memory_size

_outside_inference_mode = torch.inference_mode(False)  # slots outlive a caller's inference mode
_INITIAL = 256  # slots that unlimited slots start with, before they double
NEVER = torch.iinfo(torch.int64).max  # the expiry of a token that is still held
TENSORS = ("keys", "values", "scales", "positions", "scores", "gains", "memory", "residual", "next", "seen")
NO_SOFTCAP = "a residual needs logits without a soft cap, and this model has one; use fade instead of blend"


def slot_count(policy: Policy, window: int | None = None) -> int | None:
    """How many slots a layer needs: the capacity plus the newest token, or the model's window if that is less."""
    limits = [n for n in (policy.capacity and policy.capacity + 1, window) if n is not None]
    return min(limits) if limits else None


def unit_count(policy: Policy, heads: int, kv_heads: int) -> int:
    """How many units decide on their own in a layer."""
    return {"layer": 1, "kv_head": kv_heads, "query_head": heads}[policy.scope]


def decides_by_age(policy: Policy, window: int | None = None) -> bool:
    """Whether the step at which a token leaves follows from its position alone."""
    if window is not None and policy.capacity is not None and policy.capacity >= window - 1:
        return True  # the model's own window is the tighter bound
    return (
        policy.blind and not keeps_residual(policy) and (window is None or policy.first == 0 or policy.capacity is None)
    )


def age_limits(policy: Policy, window: int | None) -> tuple[int, int, int]:
    """first, last, window of a policy that decides by age, NEVER where there is no such limit.

    A position from `first` on is visible for `last` steps after its own, and any position for `window` steps in all.
    """
    reach = NEVER if window is None else window
    unlimited = policy.capacity is None or policy.capacity >= reach - 1
    return policy.first, NEVER if unlimited else policy.last, reach


def expiry_by_age(positions: Tensor, policy: Policy, window: int | None) -> Tensor:
    """[...]: the last step at which each position is visible, for a policy that decides by age; -1 for empty slots."""
    first, last, reach = age_limits(policy, window)
    expiry = torch.full_like(positions, NEVER)
    if last != NEVER:
        expiry = torch.where(positions < first, expiry, positions + last)
    if reach != NEVER:
        expiry = torch.minimum(expiry, positions + (reach - 1))
    return torch.where(positions < 0, -1, expiry)


def keeps_scores(policy: Policy, window: int | None = None) -> bool:
    """Whether scores outlive a step: attention is accumulated, or a research rule decides."""
    return (policy.momentum > 0 or policy.rule is not None) and not decides_by_age(policy, window)


def keeps_residual(policy: Policy, window: int | None = None) -> bool:
    """Whether what leaves is blended into a residual; the model's own window, where it is tighter, blends nothing."""
    bounded = policy.capacity is not None and (window is None or policy.capacity < window - 1)
    return policy.residual is not None and bounded


def keeps_gains(policy: Policy, window: int | None = None) -> bool:
    """Whether every slot has a factor on its attention weight."""
    return policy.gain is not None and not decides_by_age(policy, window)


def stored_memory(policy: Policy, window: int | None = None) -> int:
    """How many numbers a research rule stores with every slot of a unit."""
    return 0 if decides_by_age(policy, window) else memory_size(policy)


def gain_of(value: Tensor, dtype: torch.dtype) -> Tensor:
    """value [..., V] -> [...]: the value's norm, the one gain there is."""
    norm: Tensor = torch.linalg.vector_norm(value, dim=-1, dtype=dtype)
    return norm


class Columns(NamedTuple):
    """What the rows of a chunk can see. keys [B, G, N, D], values [B, G, N, V], positions [B, U, N] (-1: empty)."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None = None  # [B, U, N]
    gains: Tensor | None = None  # [B, G, N]
    memory: Tensor | None = None  # [B, U, N, F]
    residual: Tensor | None = None  # [B, G, D + V + 1]

    @property
    def attended(self) -> tuple[Tensor, Tensor]:
        """Keys and values with those of the residual, if any, behind them, in its precision."""
        if self.residual is None:
            return self.keys, self.values
        size = self.keys.shape[3]
        key, value = self.residual[:, :, None, :size], self.residual[:, :, None, size:-1]
        return torch.cat([self.keys.to(key.dtype), key], 2), torch.cat([self.values.to(value.dtype), value], 2)


@dataclass
class Slots:
    """keys [B, G, S, D], values [B, G, S, V], positions [B, U, S], next [B, U], seen [B].

    scores [B, U, S], gains [B, G, S] and a rule's memory [B, U, S, F] where the policy needs them; so is the residual
    [B, G, D + V + 1]: the mean key and value of what has left, and how many tokens are in them. Where keys and
    values are codes of fewer bits (`core/formats.py`), scales [B, G, S, n] belong to them, and values [B, G, S, V / 2]
    may hold two codes each. G counts the stored heads: the KV heads, or every query head where each decides on its own.
    `next` is the empty slot where the next token goes. `seen` counts the real tokens of each row, -1 for an idle row of
    a static batch. On the host: `limit` is the number of slots (None: grows), `fed` counts the columns so far, padding
    included, and where that is `packed_at` the last slot is empty, as after a read. With `rows` [B], sequence i is
    number rows[i] of all tensors but `seen`: a batch of vLLM's blocks.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    next: Tensor
    seen: Tensor
    scores: Tensor | None = None
    gains: Tensor | None = None
    memory: Tensor | None = None
    residual: Tensor | None = None
    scales: Tensor | None = None
    limit: int | None = None
    fed: int = 0
    packed_at: int = -1
    rows: Tensor | None = None

    @classmethod
    @_outside_inference_mode
    def empty(cls, policy: Policy, key: Tensor, value: Tensor, heads: int, window: int | None = None) -> Slots:
        """Slots for keys like `key` [B, G, T, D] and values like `value` [B, G, T, V]; all are empty."""
        batch, kv_heads = key.shape[:2]
        units, limit = unit_count(policy, heads, kv_heads), slot_count(policy, window)
        stored, size = max(kv_heads, units), _INITIAL if limit is None else limit
        dtype = torch.promote_types(key.dtype, torch.float32)
        remembered, blended = stored_memory(policy, window), (batch, stored, key.shape[3] + value.shape[3] + 1)
        return cls(
            **empty_rows(policy.kv, key, value, (batch, stored, size)),
            positions=torch.full((batch, units, size), -1, dtype=torch.int64, device=key.device),
            next=torch.zeros(batch, units, dtype=torch.int64, device=key.device),
            seen=torch.zeros(batch, dtype=torch.int64, device=key.device),
            scores=key.new_zeros(batch, units, size, dtype=dtype) if keeps_scores(policy, window) else None,
            gains=key.new_zeros(batch, stored, size, dtype=dtype) if keeps_gains(policy, window) else None,
            memory=key.new_zeros(batch, units, size, remembered, dtype=dtype) if remembered else None,
            residual=key.new_zeros(blended, dtype=dtype) if keeps_residual(policy, window) else None,
            limit=limit,
        )

    @property
    def kv(self) -> KV | None:
        """The format of keys and values; None: numbers of the model's dtype."""
        if self.scales is None:
            return None
        return "k8v4" if self.values.dtype == torch.uint8 else "int8"

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype of scores, gains, a rule's memory and the residual; None where there are none of them."""
        stored = (self.scores, self.gains, self.memory, self.residual)
        return next((tensor.dtype for tensor in stored if tensor is not None), None)

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """`dtype` itself if a model of it can go on from here, else the one that is stored.

        Codes fit a model of any dtype; what is summed up beside them does not.
        """
        if self.kv is None:
            return self.keys.dtype
        return dtype if self.sum_dtype in (None, torch.promote_types(dtype, torch.float32)) else self.sum_dtype

    @property
    def filled(self) -> int:
        """Slots at or past this one are empty in every row."""
        if self.limit is None:
            return self.fed
        return min(self.fed, self.limit - (self.packed_at == self.fed))

    @property
    def held(self) -> Tensor:
        """[B, U]: how many tokens each unit holds now."""
        return (self.positions >= 0).sum(-1)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def expand(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[B, KV heads, ...] for the stored heads: repeated where every query head has keys and values of its own."""
        share = self.keys.shape[1] // key.shape[1]
        return (key, value) if share == 1 else (key.repeat_interleave(share, 1), value.repeat_interleave(share, 1))

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """What is stored of every token: its key and value, and their scales where they are codes."""
        return (self.keys, self.values) if self.scales is None else (self.keys, self.values, self.scales)

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """The same where slots hold codes, nothing where they hold numbers."""
        return () if self.scales is None else self.stored

    @property
    def sizes(self) -> tuple[int, int]:
        """D and V: numbers of a key and of a value."""
        return self.keys.shape[3], self.values.shape[3] * (2 if self.kv == "k8v4" else 1)

    def decoded(self, dtype: torch.dtype, used: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys [B, G, S, D] and values [B, G, S, V] of the first `used` slots, as numbers."""
        keys, values = self.keys[:, :, :used], self.values[:, :, :used]
        if self.kv is None or self.scales is None:
            return keys, values
        return decode(keys, values, self.scales[:, :, :used], self.kv, dtype)

    @_outside_inference_mode
    def reserve(self, slots: int) -> None:
        """Room for `slots` slots where there is no limit; with one, all slots exist from the start."""
        missing = slots - self.positions.shape[2]
        if self.limit is not None or missing <= 0:
            return
        missing = max(missing, self.positions.shape[2])
        pad = torch.nn.functional.pad
        self.keys, self.values = (pad(rows, (0, 0, 0, missing)) for rows in (self.keys, self.values))
        self.positions = pad(self.positions, (0, missing), value=-1)
        self.scores = None if self.scores is None else pad(self.scores, (0, missing))
        self.gains = None if self.gains is None else pad(self.gains, (0, missing))
        self.scales = None if self.scales is None else pad(self.scales, (0, 0, 0, missing))
        self.memory = None if self.memory is None else pad(self.memory, (0, 0, 0, missing))

    @_outside_inference_mode
    def _map(self, change: Callable[[Tensor], Tensor]) -> Slots:
        tensors: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **tensors)

    def fork(self) -> Slots:
        """A copy that goes its own way."""
        return self._map(torch.clone)

    def to(self, device: torch.device | str) -> Slots:
        return self._map(lambda tensor: tensor.to(device))

    def select(self, index: Tensor) -> Slots:
        """Slots whose row i was row index[i]: reordered beams, repeated or dropped sequences."""
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))


def empty_rows(kv: KV | None, key: Tensor, value: Tensor, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Zeros for `shape` [B, G, S] slots of keys like `key` [..., D] and values like `value` [..., V]."""
    check_sizes(kv, value.shape[-1])
    key_size, value_size = code_sizes(kv, key.shape[-1], value.shape[-1])
    if kv is None:
        return {"keys": key.new_zeros(*shape, key_size), "values": value.new_zeros(*shape, value_size)}
    codes = torch.int8 if kv == "int8" else torch.uint8
    return {
        "keys": key.new_zeros(*shape, key_size, dtype=torch.int8),
        "values": value.new_zeros(*shape, value_size, dtype=codes),
        "scales": key.new_zeros(*shape, scale_count(kv, value.shape[-1]), dtype=torch.float16),
    }


def lowest_empty(positions: Tensor) -> Tensor:
    """[B, U, S] -> [B, U]: the first empty slot, -1 if there is none."""
    empty = positions < 0
    return torch.where(empty.any(-1), empty.to(torch.uint8).argmax(-1), -1)
