"""KV heads with slots of their own, read in groups: heads of similar size are the units of one read.

A scan is a chain of decisions that leaves most of a GPU idle, and a read is twenty launches: heads one after the other
would take as many times as long as heads together. So the slots of a group are copied side by side, filled up to the
longest with empty ones, read as those of one layer, and copied back. On a CPU every head is a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..policy import Policy
from .attention import Attention
from .slots import Slots
from .units import unit_policies

Layer = Sequence[Slots] | Mapping[int, Slots]  # by the number of the KV head
_SHORTEST = 256  # tokens: up to twice as many, a chunk's own columns are much of the work


@dataclass(frozen=True)
class Group:
    """Some KV heads of a layer, with the query heads that read them; or a layer whose heads share their slots."""

    policy: Policy  # of one head, or `UnitPolicies`
    heads: tuple[int, ...]  # their numbers among the layer's `stored`
    stored: int
    index: Tensor | None = None  # the same numbers; without it, `take` gives a view of the only head

    def take(self, rows: Tensor) -> Tensor:
        """rows [B, H or G, ...] of a layer -> those of this group."""
        if self.index is not None:
            return self._by_head(rows, self.stored)[:, self.index].flatten(1, 2)
        share = rows.shape[1] // self.stored
        return rows[:, self.heads[0] * share : (self.heads[0] + 1) * share]

    def put(self, output: Tensor, rows: Tensor) -> None:
        """The opposite of `take`."""
        if self.index is None:
            self.take(output).copy_(rows)
        else:
            self._by_head(output, self.stored)[:, self.index] = self._by_head(rows, len(self.heads))

    @staticmethod
    def _by_head(rows: Tensor, stored: int) -> Tensor:
        """[B, H, ...] -> [B, G, H / G, ...], a view."""
        return rows.view(len(rows), stored, -1, *rows.shape[2:])

    def attention(self, layer: Attention) -> Attention:
        return layer if layer.sinks is None else replace(layer, sinks=self.take(layer.sinks[None])[0])

    def join(self, layer: Layer) -> Slots:
        """The slots of these heads side by side; of one head, its own."""
        parts = [layer[head] for head in self.heads]
        first = parts[0]
        if len(parts) == 1:
            return first
        longest = max(part.positions.shape[2] for part in parts)
        rows: dict[str, Any] = {
            name: _side_by_side([getattr(part, name) for part in parts], longest, -1 if name == "positions" else 0)
            for name in _by_slot(first)
        }
        fed = max(part.fed for part in parts)
        packed = fed if all(part.packed_at == part.fed for part in parts) else -1
        rows |= {"next": torch.cat([part.next for part in parts], 1), "seen": first.seen.clone()}
        return Slots(**rows, limit=longest, fed=fed, packed_at=packed)

    def split(self, slots: Slots, layer: Layer) -> None:
        """The opposite of `join`, after a read: every head's tokens move to the front of its slots."""
        if slots is layer[self.heads[0]]:
            return
        empty = slots.positions < 0
        order, held = empty.to(torch.uint8).argsort(dim=-1, stable=True), (~empty).sum(-1)
        tensors = {name: _gather(getattr(slots, name), order) for name in _by_slot(slots)}
        for place, part in enumerate(layer[head] for head in self.heads):
            count = part.positions.shape[2]
            for name, rows in tensors.items():
                getattr(part, name).copy_(rows[:, place : place + 1, :count])
            part.positions[:, :, -1] = -1  # as after any read
            torch.clamp(held[:, place : place + 1], max=count - 1, out=part.next)
            part.seen.copy_(slots.seen)
            part.fed = part.packed_at = slots.fed


def groups(policies: Sequence[Policy], layer: Sequence[Slots]) -> list[Group]:
    """The KV heads of a layer, those of similar size together where that is faster; the longest group first."""
    members: dict[object, list[int]] = {}
    for head, (policy, slots) in enumerate(zip(policies, layer, strict=True)):
        alone = not _together(slots.keys.device) or not policy.runs_everywhere or policy.blind
        scored = (policy.momentum > 0, slots.scores is None, slots.gains is None)
        size = max(_SHORTEST, slots.positions.shape[2] - 2).bit_length()
        members.setdefault(head if alone else (policy.scope, policy.kv, *scored, size), []).append(head)
    order = sorted(members.values(), key=lambda heads: -max(layer[head].positions.shape[2] for head in heads))
    return [_group(policies, heads, layer[0].keys.device) for heads in order]


def single_groups(policies: Sequence[Policy]) -> list[Group]:
    """Every head by itself."""
    return [Group(policy, (head,), len(policies)) for head, policy in enumerate(policies)]


def whole_layer(policy: Policy) -> Group:
    """All heads, which share their slots."""
    return Group(policy, (0,), 1)


def _together(device: torch.device) -> bool:
    """Whether several heads at once are faster than one after the other."""
    return device.type == "cuda"


def _group(policies: Sequence[Policy], heads: list[int], device: torch.device) -> Group:
    if len(heads) == 1:
        return single_groups(policies)[heads[0]]
    policy = unit_policies([policies[head] for head in heads], device)
    return Group(policy, tuple(heads), len(policies), torch.tensor(heads, device=device))


def _by_slot(slots: Slots) -> list[str]:
    """Names of the tensors that have something for every slot."""
    return [name for name in slots.tensors() if name not in ("next", "seen")]


def _side_by_side(parts: list[Tensor], slots: int, empty: int) -> Tensor:
    """parts [B, 1, S, ...] of any S -> [B, heads, slots, ...]"""
    first = parts[0]
    rows = first.new_full((len(first), len(parts), slots, *first.shape[3:]), empty)
    for head, part in enumerate(parts):
        rows[:, head, : part.shape[2]] = part[:, 0]
    return rows


def _gather(rows: Tensor, order: Tensor) -> Tensor:
    """rows [B, heads, S, ...], order [B, heads, S] -> the same in this order."""
    index = order if rows.dim() == 3 else order[..., None].expand(-1, -1, -1, rows.shape[3])
    return rows.gather(2, index)
