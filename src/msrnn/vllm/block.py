"""A request's block in one layer: a state of msrnn, laid out in bytes.

vLLM hands out blocks and knows their size only. What the parts of a block are is settled here, once, for the size
that vLLM is told, the views that the recurrence works on, and what `msrnn serve` says a request costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ..core.slots import State, decides_by_age, slots, units
from ..policy import Policy

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size


@dataclass(frozen=True)
class Layout:
    """The state of one layer and one request: keys, values, positions, scores where there is memory, `slot`, `seen`.

    `slot` is where the next token goes, for every unit.
    """

    policy: Policy
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @cached_property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        room = slots(self.policy)
        if room is None:
            raise ValueError(f"{self.policy} is not bounded")
        deciders = units(self.policy, self.heads, self.kv_heads)
        stored = max(self.kv_heads, deciders)
        wide = torch.promote_types(self.dtype, torch.float32)
        parts = {
            "keys": ((stored, room, self.key_size), self.dtype),
            "values": ((stored, room, self.value_size), self.dtype),
            "positions": ((deciders, room), torch.int64),
            "slot": ((deciders,), torch.int64),
            "seen": ((), torch.int64),
        }
        if self.policy.momentum > 0 and not decides_by_age(self.policy, None):
            parts["scores"] = ((deciders, room), wide)
        return parts

    @property
    def nbytes(self) -> int:
        return sum(_aligned(shape, dtype) for shape, dtype in self.parts.values())

    def carve(self, blocks: Tensor) -> Blocks:
        """blocks [B, ..., bytes] of any dtype: the parts of all blocks, as views."""
        raw = blocks.view(torch.uint8).flatten(1)
        views, start = {}, 0
        for name, (shape, dtype) in self.parts.items():
            end = start + prod(shape) * dtype.itemsize
            views[name] = raw[:, start:end].view(dtype).view(len(raw), *(shape or (1,)))
            start += _aligned(shape, dtype)
        seen, scores = views["seen"][:, 0], views.get("scores")
        return Blocks(views["keys"], views["values"], views["positions"], views["slot"], seen, scores)


@dataclass(frozen=True)
class Blocks:
    """All blocks of a layer: keys [M, E, S, D], values [M, E, S, V], positions [M, U, S], slot [M, U], seen [M].

    scores [M, U, S], or None where there is no memory.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    slot: Tensor
    seen: Tensor
    scores: Tensor | None

    def clear(self, block: int | Tensor) -> None:
        """A new request begins here; what an earlier one left is forgotten."""
        self.positions[block] = -1
        self.slot[block] = 0
        if self.scores is not None:
            self.scores[block] = 0

    def clear_new(self, index: Tensor, seen: Tensor) -> None:
        """index, seen [B]: the same for those of many requests that begin, without asking the device which."""
        new = (seen == 0)[:, None, None]
        self.positions[index] = torch.where(new, -1, self.positions[index])
        self.slot[index] = torch.where(new[..., 0], 0, self.slot[index])
        if self.scores is not None:
            self.scores[index] = torch.where(new, 0, self.scores[index])

    def state(self, block: int, seen: int, coming: int) -> State:
        """One request's state, in place: what the recurrence writes, with `coming` tokens, is in the block."""
        one = slice(block, block + 1)
        self.seen[one] = seen
        scores = None if self.scores is None else self.scores[one]
        limit = self.positions.shape[2]
        self.slot[one] = min(seen + coming, limit - 1)  # after a chunk the empty slots are the last ones
        return State(self.keys[one], self.values[one], self.positions[one], scores, self.seen[one], limit, fed=seen)


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
