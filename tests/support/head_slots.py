"""KV heads with slots of their own, on random tokens: how to make them, to step each alone, and to compare them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msrnn.core import heads
from msrnn.core.attention import Attention
from msrnn.core.slots import Slots
from msrnn.plan import HeadPolicies, per_layer
from msrnn.vllm.block import Layout

Layer = tuple[Slots, ...]


def apart(
    policy: HeadPolicies,
    states: int,
    query_heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    window: int | None = None,
) -> Layer:
    """Every head's slots in memory of their own."""
    key, value = (torch.zeros(states, len(policy.heads), 1, n, dtype=dtype) for n in sizes)
    return heads.parts_of(heads.empty_slots(policy, key, value, query_heads, window))


def in_blocks(
    policy: HeadPolicies,
    states: int,
    query_heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    window: int | None = None,
) -> Layer:
    """All heads' slots in one block per state, as in vLLM."""
    layout = Layout(policy, query_heads, len(policy.heads), *sizes, dtype, window)
    parts = heads.parts_of(layout.carve(torch.zeros(states, layout.nbytes, dtype=torch.uint8)))
    for part in parts:
        part.positions.fill_(-1)
    return parts


def copy_of(layer: Layer) -> Layer:
    return tuple(one.fork() for one in layer)


def alone(step: Any, layer: Layer, new: list[Tensor], policy: HeadPolicies, attention: Attention) -> Tensor:
    """Every head by itself."""
    outputs, share = [], new[0].shape[1] // len(layer)
    for g, (one, own) in enumerate(zip(layer, policy.heads, strict=True)):
        queries = slice(g * share, (g + 1) * share)
        sinks = None if attention.sinks is None else attention.sinks[queries]
        mine = new[0][:, queries], new[1][:, g : g + 1], new[2][:, g : g + 1]
        outputs.append(step(one, *mine, own, replace(attention, sinks=sinks)))
    return torch.cat(outputs, 1)


def put_tokens(layer: Layer, count: int, generator: torch.Generator) -> None:
    """As many of so many random tokens as each head holds, as if they had been read."""
    for one in layer:
        size = min(count, one.positions.shape[2] - 1)
        for rows in one.stored:
            numbers = torch.randn(rows[:, :, :size].shape, generator=generator, dtype=torch.float64)
            rows[:, :, :size] = (
                numbers if rows.dtype.is_floating_point else (50 * numbers).clamp(-127, 127).long() & 255
            )
        if one.scales is not None:
            one.scales.div_(50)
        if one.gains is not None:
            one.gains[:, :, :size] = 1 + torch.rand(one.gains[:, :, :size].shape, generator=generator)
        if one.scores is not None:
            one.scores[:, :, :size] = torch.rand(one.scores[:, :, :size].shape, generator=generator)
        one.positions[:, :, :size] = torch.arange(count - size, count)
        one.next.fill_(size)


def copy_into(source: Layer, target: Layer) -> Layer:
    for ours, theirs in zip(target, source, strict=True):
        for name, tensor in ours.tensors().items():
            tensor.copy_(getattr(theirs, name))
    return target


def assert_same(one: Slots, two: Slots) -> None:
    """But for a rounding."""
    for name, tensor in one.tensors().items():
        other: Tensor = two.tensors()[name]
        if name == "scores":  # the score of an empty slot means nothing
            tensor, other = (scores.masked_fill(one.positions < 0, 0) for scores in (tensor, other))
        torch.testing.assert_close(other, tensor, rtol=0, atol=1e-9 if tensor.dtype == torch.float64 else 1e-5)


def unequal(text: str, *capacities: int) -> HeadPolicies:
    policy = per_layer(text, [capacities])[0]
    assert isinstance(policy, HeadPolicies)
    return policy
