"""A layer's memory as all who run a model see it: slots that its heads share, or slots of its own for every KV head.

Where KV heads have budgets of their own, each goes through the recurrence alone, with the query heads that read it; the
recurrence knows nothing of that. Compiled kernels take one token of all heads at once; a GPU reads prompts by groups of
heads (`head_groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from .. import kernels
from ..plan import HeadPolicies, LayerPolicy
from ..policy import KV, Policy
from . import recurrence
from .attention import Attention
from .head_groups import Group, single_groups, whole_layer
from .head_groups import groups as head_groups
from .recurrence import Prompt
from .slots import Slots, unit_count
from .streams import side_by_side
from .trace import Recorder


@dataclass
class HeadSlots:
    """The slots of every KV head of a layer, [B, 1, S, D] each; S differs from head to head. All have read the same.

    `tables`: what kernels have worked out about these slots.
    """

    heads: tuple[Slots, ...]
    tables: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy works its tables out anew: they hold addresses of these slots."""
        return {"heads": self.heads, "tables": {}}

    @property
    def seen(self) -> Tensor:
        return self.heads[0].seen

    @property
    def fed(self) -> int:
        return self.heads[0].fed

    @property
    def held(self) -> Tensor:
        """[B, G]: how many tokens each KV head holds now."""
        return torch.cat([slots.held for slots in self.heads], 1)

    @property
    def nbytes(self) -> int:
        return sum(slots.nbytes for slots in self.heads)

    @property
    def kv(self) -> KV | None:
        return self.heads[0].kv

    @property
    def sizes(self) -> tuple[int, int]:
        return self.heads[0].sizes

    def fork(self) -> HeadSlots:
        return HeadSlots(tuple(slots.fork() for slots in self.heads))

    def to(self, device: torch.device | str) -> HeadSlots:
        return HeadSlots(tuple(slots.to(device) for slots in self.heads))

    def select(self, index: Tensor) -> HeadSlots:
        return HeadSlots(tuple(slots.select(index) for slots in self.heads))


LayerSlots = Slots | HeadSlots


def parts_of(slots: LayerSlots) -> tuple[Slots, ...]:
    """The slots of a layer: its own, or those of its KV heads."""
    return slots.heads if isinstance(slots, HeadSlots) else (slots,)


def join(slots: Sequence[Slots], like: LayerPolicy, tables: dict[object, Any] | None = None) -> LayerSlots:
    """The opposite of `parts_of`, for a layer with this policy; `tables`: those of the slots in the same places."""
    return HeadSlots(tuple(slots), {} if tables is None else tables) if isinstance(like, HeadPolicies) else slots[0]


def with_parts(slots: LayerSlots, parts: Sequence[Slots]) -> LayerSlots:
    """A layer whose parts' tensors are where those of `slots` are."""
    return HeadSlots(tuple(parts), slots.tables) if isinstance(slots, HeadSlots) else parts[0]


def empty_slots(policy: LayerPolicy, key: Tensor, value: Tensor, heads: int, window: int | None = None) -> LayerSlots:
    """Slots for keys like `key` [B, G, T, D] and values like `value` [B, G, T, V]; all are empty."""
    if isinstance(policy, Policy):
        return Slots.empty(policy, key, value, heads, window)
    check_heads(policy, key.shape[1])
    share, own = heads // key.shape[1], range(key.shape[1])
    slots = [Slots.empty(policy.heads[g], key[:, g : g + 1], value[:, g : g + 1], share, window) for g in own]
    return HeadSlots(tuple(slots))


def units_of(policy: LayerPolicy, heads: int, kv_heads: int) -> int:
    """How many units decide on their own in a layer."""
    return len(policy.heads) if isinstance(policy, HeadPolicies) else unit_count(policy, heads, kv_heads)


def check_heads(policy: LayerPolicy, kv_heads: int) -> None:
    """Refuse budgets for another number of KV heads than a layer has."""
    if isinstance(policy, HeadPolicies) and len(policy.heads) != kv_heads:
        raise ValueError(
            f"the budgets are for {len(policy.heads)} KV heads in a layer that has {kv_heads}; use a profile made for "
            "this model"
        )


def layer_parts(policy: LayerPolicy) -> list[Group]:
    """What has slots of its own: a layer, or each KV head of it with the query heads that read it."""
    return [whole_layer(policy)] if isinstance(policy, Policy) else single_groups(policy.heads)


def read(
    slots: LayerSlots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: LayerPolicy,
    attention: Attention,
    real: Tensor | None = None,
    chunk: int | None = None,
    on_evict: LayerRecorder | None = None,
    prompt: Prompt = "recurrent",
) -> Tensor:
    """The arguments of `recurrence.read`, for any layer; `prompt` chooses between it and `read_oneshot`."""
    run = recurrence.read if prompt == "recurrent" else recurrence.read_oneshot
    if isinstance(slots, Slots) and isinstance(policy, Policy):
        assert not isinstance(on_evict, HeadRecorder)
        return run(slots, query, key, value, policy, attention, real, chunk, on_evict)
    assert isinstance(slots, HeadSlots)
    assert isinstance(policy, HeadPolicies)
    if query.shape[2] == 1 and on_evict is None:
        return _one_token(slots, query, key, value, policy, attention, real)
    shape = (len(query), query.shape[2], query.shape[1], value.shape[3])
    output = value.new_empty(shape).transpose(1, 2)  # the memory layout that the output projection expects
    recorders = on_evict.heads if isinstance(on_evict, HeadRecorder) else (None,) * len(slots.heads)
    alone = prompt != "recurrent" or on_evict is not None or attention.sharded
    groups = single_groups(policy.heads) if alone else read_groups(slots, policy)
    with side_by_side(query.device, len(groups)) as streams:
        for group, stream in zip(groups, streams, strict=True):
            with stream:
                one, recorder = group.join(slots.heads), recorders[group.heads[0]]
                tokens = (group.take(query), group.take(key), group.take(value))
                mixed = run(one, *tokens, group.policy, group.attention(attention), real, chunk, recorder)
                group.put(output, mixed)
                group.split(one, slots.heads)
    return output


def read_groups(slots: LayerSlots, policy: LayerPolicy) -> list[Group]:
    """What is read together: a layer, or some of its KV heads. Worked out once, as it copies to the device."""
    if isinstance(slots, Slots) or isinstance(policy, Policy):
        assert isinstance(policy, Policy)
        return [whole_layer(policy)]
    key = ("groups", policy)
    if key not in slots.tables:
        slots.tables[key] = head_groups(policy.heads, slots.heads)
    return cast("list[Group]", slots.tables[key])


def _one_token(
    slots: HeadSlots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: LayerPolicy,
    attention: Attention,
    real: Tensor | None,
) -> Tensor:
    """query [B, H, 1, D] ... -> [B, H, 1, V]: a step of all heads, counted."""
    numbers = recurrence.step_numbers(slots.heads[0], real, 1)[:, 0]
    rows = slots if real is None else with_parts(slots, [replace(one, seen=numbers) for one in slots.heads])
    output = step(rows, query[:, :, 0], key[:, :, 0], value[:, :, 0], policy, attention)
    arrived = (numbers >= 0).to(slots.seen.dtype)
    torch._foreach_add_([one.seen for one in slots.heads], [arrived] * len(slots.heads))
    for one in slots.heads:
        one.fed += 1
    return output[:, :, None]


def step(
    slots: LayerSlots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: LayerPolicy,
    attention: Attention,
    out: Tensor | None = None,
) -> Tensor:
    """The arguments of `recurrence.step`, for any layer."""
    if isinstance(slots, Slots) and isinstance(policy, Policy):
        return recurrence.step(slots, query, key, value, policy, attention, out)
    assert isinstance(slots, HeadSlots)
    assert isinstance(policy, HeadPolicies)
    whole = kernels.step_heads(slots.heads, query, key, value, policy.heads, attention, slots.tables, out)
    if whole is not None:
        return whole
    output = value.new_empty(*query.shape[:2], value.shape[2]) if out is None else out
    for one, part in zip(parts_of(slots), layer_parts(policy), strict=True):
        tokens = (part.take(query), part.take(key), part.take(value))
        recurrence.step(one, *tokens, part.policy, part.attention(attention), out=part.take(output))
    return output


@dataclass
class HeadRecorder:
    """Collects the evictions of every KV head of a layer."""

    heads: tuple[Recorder, ...]

    @property
    def deaths(self) -> Tensor | None:
        """[B, G, T]: as one recorder of a layer has them."""
        deaths = [one.deaths[..., : one.length] for one in self.heads if one.deaths is not None]
        return torch.cat(deaths, 1) if deaths else None

    @property
    def length(self) -> int:
        return self.heads[0].length

    def select(self, index: Tensor) -> None:
        for one in self.heads:
            one.select(index)


LayerRecorder = Recorder | HeadRecorder


def recorder(policy: LayerPolicy) -> LayerRecorder:
    """A recorder for a layer with this policy."""
    return HeadRecorder(tuple(Recorder() for _ in policy.heads)) if isinstance(policy, HeadPolicies) else Recorder()
