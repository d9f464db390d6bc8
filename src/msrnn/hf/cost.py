"""What the state of a model costs under a policy, in bytes, computed before it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.slots import keeps_gains, keeps_scores, slot_count, stored_memory, unit_count
from ..policy import Plan
from .geometry import Geometry

_INT64 = 8  # bytes of a position


@dataclass(frozen=True)
class Cost:
    """Bytes of one sequence: its state, a full KV cache after `length` tokens, one token's slot in all layers."""

    state: int
    full: int
    slot: int
    length: int

    def largest_batch(self, available: int) -> tuple[int, int]:
        """How many sequences fit into so many bytes: with the bounded state, with a full cache."""
        return available // self.state, available // self.full


def cost(layers: Sequence[Geometry], plan: Plan, dtype: torch.dtype, length: int) -> Cost:
    """The cost of one sequence of `length` tokens under `plan`."""
    accumulation = torch.promote_types(dtype, torch.float32).itemsize
    state = full = 0
    for layer, policy in zip(layers, plan.policies, strict=True):
        tokens = min(length, layer.window or length)
        full += tokens * layer.slot_bytes(dtype)
        slots, units = slot_count(policy, layer.window), unit_count(policy, layer.heads, layer.kv_heads)
        stored = max(units, layer.kv_heads)
        per_slot = layer.slot_bytes(dtype, policy.scope, policy.kv) + units * _INT64  # keys, values, positions
        if keeps_scores(policy, layer.window):
            per_slot += units * accumulation
        per_slot += units * stored_memory(policy, layer.window) * accumulation
        if keeps_gains(policy, layer.window):
            per_slot += stored * accumulation
        state += (tokens if slots is None else slots) * per_slot + (units + 1) * _INT64  # next slots, tokens seen
    return Cost(state, full, sum(layer.slot_bytes(dtype) for layer in layers), length)
