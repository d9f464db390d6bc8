"""A policy whose numbers differ from unit to unit: KV heads with budgets of their own that are read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ..policy import Policy


@dataclass(frozen=True)
class UnitPolicies(Policy):
    """The fields are those of the smallest unit: what fits there fits everywhere.

    `numbers` [U, 4], on the device: capacity, first, last, and the bits of momentum in float64.
    """

    numbers: Tensor | None = field(default=None, compare=False, repr=False)


def unit_policies(policies: Sequence[Policy], device: torch.device) -> UnitPolicies:
    """Policies of the same kind, as one; copies from the host."""
    whole = torch.tensor([[one.capacity or 0, one.first, one.last] for one in policies], dtype=torch.int64)
    momenta = torch.tensor([[one.momentum] for one in policies], dtype=torch.float64)
    least = min(policies, key=lambda one: one.capacity or 0)
    numbers = torch.cat([whole, momenta.view(torch.int64)], 1).to(device)
    return UnitPolicies(**{one.name: getattr(least, one.name) for one in fields(Policy)}, numbers=numbers)


def limits_of(policy: Policy) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """Capacity, first and last of a bounded policy, [U, 1] where units differ."""
    if isinstance(policy, UnitPolicies) and policy.numbers is not None:
        capacity, first, last, _ = policy.numbers[:, :, None].unbind(1)
        return capacity, first, last
    assert policy.capacity is not None
    return policy.capacity, policy.first, policy.last


def momentum_of(policy: Policy) -> float | Tensor:
    """The same of momentum."""
    if isinstance(policy, UnitPolicies) and policy.numbers is not None:
        return policy.numbers[:, 3:].contiguous().view(torch.float64)
    return policy.momentum
