"""A request's block in one layer: the byte layout of its slots.

vLLM allocates blocks and knows only their size. The layout is defined here alone: for the size that vLLM is given, for
the slots that the recurrence works on, and for what `msrnn serve` says a request costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.heads import LayerSlots, check_heads, join
from ..core.slots import TENSORS, Slots, empty_rows, keeps_gains, keeps_residual, keeps_scores, slot_count, unit_count
from ..plan import LayerPolicy, parts
from ..policy import Policy

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size


@dataclass(frozen=True)
class PartLayout:
    """The slots of what goes through the recurrence on its own, a layer or one KV head of it, for one request."""

    policy: Policy
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int | None = None

    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of a request's slots."""
        slots = slot_count(self.policy, self.window)
        if slots is None or self.policy.capacity is None:
            raise ValueError(f"{self.policy} is not bounded")
        units = unit_count(self.policy, self.heads, self.kv_heads)
        stored, accumulation = max(self.kv_heads, units), torch.promote_types(self.dtype, torch.float32)
        key, value = (torch.empty(0, n, dtype=self.dtype, device="meta") for n in (self.key_size, self.value_size))
        rows = empty_rows(self.policy.kv, key, value, (1, stored, slots))
        tensors = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in rows.items()} | {
            "positions": ((units, slots), torch.int64),
            "next": ((units,), torch.int64),
            "seen": ((), torch.int64),
        }
        if keeps_scores(self.policy, self.window):
            tensors["scores"] = ((units, slots), accumulation)
        if keeps_gains(self.policy, self.window):
            tensors["gains"] = ((stored, slots), accumulation)
        if keeps_residual(self.policy, self.window):
            tensors["residual"] = ((stored, self.key_size + self.value_size + 1), accumulation)
        return {name: tensors[name] for name in TENSORS if name in tensors}

    @property
    def nbytes(self) -> int:
        return sum(_aligned(shape, dtype) for shape, dtype in self.tensors.values())

    @cached_property
    def places(self) -> list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Name, dtype, shape, strides and first byte of every tensor."""
        places, start = [], 0
        for name, (shape, dtype) in self.tensors.items():
            strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
            places.append((name, dtype, shape, strides, start))
            start += _aligned(shape, dtype)
        return places

    def carve(self, blocks: Tensor, first: int = 0) -> Slots:
        """blocks [M, ..., bytes] of any dtype: the slots of all blocks, as views, from their byte `first` on."""
        typed = {dtype: blocks.view(dtype) for dtype in {dtype for _, dtype, *_ in self.places}}
        views: dict[str, Any] = {}
        for name, dtype, shape, strides, start in self.places:
            memory = typed[dtype]
            begin = memory.storage_offset() + (first + start) // dtype.itemsize
            views[name] = memory.as_strided((len(blocks), *shape), (memory.stride(0), *strides), begin)
        return Slots(**views, limit=slot_count(self.policy, self.window))


@dataclass(frozen=True)
class Layout:
    """The block of one layer and one request: the slots of its parts, one after the other.

    heads, kv_heads: those of this process. `window`: the model's own, in this layer.
    """

    policy: LayerPolicy
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int | None = None

    @cached_property
    def parts(self) -> tuple[PartLayout, ...]:
        check_heads(self.policy, self.kv_heads)
        together = isinstance(self.policy, Policy)
        heads, kv_heads = (self.heads, self.kv_heads) if together else (self.heads // self.kv_heads, 1)
        return tuple(
            PartLayout(policy, heads, kv_heads, self.key_size, self.value_size, self.dtype, self.window)
            for policy in parts(self.policy)
        )

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first byte of every part."""
        return tuple(accumulate((part.nbytes for part in self.parts[:-1]), initial=0))

    @cached_property
    def tables(self) -> dict[object, Any]:
        """What kernels have worked out about these slots: the views are new in every batch, their places are not."""
        return {}

    def carve(self, blocks: Tensor) -> LayerSlots:
        """blocks [M, ..., bytes] of any dtype: the slots of all blocks, as views. Cheap, as every batch does it."""
        parts = [part.carve(blocks, first) for part, first in zip(self.parts, self.starts, strict=True)]
        return join(parts, self.policy, self.tables)


def clear(blocks: Slots, index: Tensor, seen: Tensor) -> None:
    """index, seen [B]: empty the blocks of requests that begin (seen is 0), without a wait for the device."""
    new = (seen == 0)[:, None, None]
    blocks.positions[index] = torch.where(new, -1, blocks.positions[index])
    blocks.next[index] = torch.where(new[..., 0], 0, blocks.next[index])
    if blocks.scores is not None:
        blocks.scores[index] = torch.where(new, 0, blocks.scores[index])
    if blocks.residual is not None:
        blocks.residual[index] = torch.where(new, 0, blocks.residual[index])


def empty(blocks: Slots, index: Tensor) -> None:
    """index [R]: empty the blocks of requests that begin.

    Values there (or the scales of codes) become 0: a step multiplies those of empty slots by 0, and NaN that an earlier
    request has left would remain.
    """
    blocks.positions.index_fill_(0, index, -1)
    for rows in (blocks.stored[-1], blocks.gains, blocks.residual):
        if rows is not None:
            rows.index_fill_(0, index, 0)


def empty_new(slots: Slots) -> None:
    """Empty the slots of requests that begin; memory that was never written may hold anything."""
    new = (slots.seen == 0)[:, None, None]
    slots.positions.masked_fill_(new, -1)
    if slots.residual is not None:
        slots.residual.masked_fill_(new, 0)


def zero_empty(slots: Slots) -> None:
    """What lies in empty slots becomes 0: finite, so that a weight of 0 hides it."""
    empty = slots.positions < 0
    stored = empty.repeat_interleave(slots.keys.shape[1] // empty.shape[1], 1)
    for rows in slots.stored:
        rows.masked_fill_(stored[..., None], 0)
    if slots.scores is not None:
        slots.scores.masked_fill_(empty, 0)
    if slots.gains is not None:
        slots.gains.masked_fill_(stored, 0)


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
