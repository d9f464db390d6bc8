"""What the state of a model costs under a policy, in bytes, computed before it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..core.slots import keeps_gains, keeps_residual, keeps_scores, slot_count, stored_memory, unit_count
from ..plan import HeadPolicies, Plan
from ..policy import Policy
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
    state = full = 0
    for layer, policy in zip(layers, plan.policies, strict=True):
        tokens = min(length, layer.window or length)
        full += tokens * layer.slot_bytes(dtype)
        if isinstance(policy, HeadPolicies):
            head = replace(layer, heads=layer.heads // layer.kv_heads, kv_heads=1)
            state += sum(_state(head, own, dtype, tokens) for own in policy.heads)
        else:
            state += _state(layer, policy, dtype, tokens)
    return Cost(state, full, sum(layer.slot_bytes(dtype) for layer in layers), length)


def _state(layer: Geometry, policy: Policy, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of the slots of a layer, or of one KV head of it."""
    accumulation = torch.promote_types(dtype, torch.float32).itemsize
    slots, units = slot_count(policy, layer.window), unit_count(policy, layer.heads, layer.kv_heads)
    stored = max(units, layer.kv_heads)
    per_slot = layer.slot_bytes(dtype, policy.scope, policy.kv) + units * _INT64  # keys, values, positions
    if keeps_scores(policy, layer.window):
        per_slot += units * accumulation
    per_slot += units * stored_memory(policy, layer.window) * accumulation
    if keeps_gains(policy, layer.window):
        per_slot += stored * accumulation
    whole = (units + 1) * _INT64  # next slots, tokens seen
    if keeps_residual(policy, layer.window):
        whole += stored * (2 * layer.head_size + 1) * accumulation
    return (tokens if slots is None else slots) * per_slot + whole
