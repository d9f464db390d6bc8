"""Reads of a few requests as CUDA graphs: a chunk is some twenty launches, which take the host longer than the GPU.

A graph reads fixed addresses: slots and new tokens are copied there before it, slots and outputs back after it. Layers
alike share the graphs. On other devices the same copies and the same read run as they are. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..core.attention import Attention
from ..core.recurrence import read
from ..core.slots import Slots
from ..policy import Policy
from .block import empty_new, zero_empty
from .reads import ROWS, Segment

_MOST_SLOTS = 16384  # a chunk of larger states keeps the GPU busy, and the largest are scanned by plain PyTorch
Kind = tuple[object, ...]
_graphs: dict[Kind, ReadGraphs] = {}


def can_be_captured(blocks: Slots, policy: Policy, attention: Attention) -> bool:
    """Not where layers differ in more than their tokens, what waits for other processes, or what is not compiled."""
    alike = policy.rule is None and attention.sinks is None and not attention.sharded
    device, slots = blocks.keys.device.type, blocks.positions.shape[2]
    return alike and slots <= _MOST_SLOTS and (device != "cuda" or kernels.compiled(device))


def kind_of(blocks: Slots, query: Tensor, policy: Policy, attention: Attention) -> Kind:
    """What layers alike have in common."""
    shapes = blocks.keys.shape[1:], blocks.values.shape[1:], blocks.positions.shape[1:]
    return policy, attention, query.shape[1:], query.dtype, query.device, *shapes


def capture(
    blocks: Slots,
    new: tuple[Tensor, Tensor, Tensor],
    policy: Policy,
    attention: Attention,
    shapes: Sequence[tuple[int, int]],
    chunk: int,
) -> None:
    """Capture reads of so many rows and tokens for all layers like this one; the first block's slots must be in use.

    What the graphs hold stays taken, and vLLM's memory profile counts what is not free.
    """
    if shapes and can_be_captured(blocks, policy, attention):
        _graphs[kind_of(blocks, new[0], policy, attention)] = ReadGraphs(blocks, new, policy, attention, shapes, chunk)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Inside this context every read is launched kernel by kernel."""
    graphs = dict(_graphs)
    _graphs.clear()
    try:
        yield
    finally:
        _graphs.update(graphs)


def graphs_of(blocks: Slots, query: Tensor, policy: Policy, attention: Attention) -> ReadGraphs | None:
    if not _graphs or not can_be_captured(blocks, policy, attention):
        return None
    return _graphs.get(kind_of(blocks, query, policy, attention))


class Addresses(NamedTuple):
    """Where graphs find new tokens, query [n, H, D], key [n, G, D], value [n, G, V], and leave the output [n, H, V]."""

    tokens: tuple[Tensor, Tensor, Tensor]
    output: Tensor
    real: Tensor  # [n]
    stream: Any = None
    pool: Any = None

    def rows(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """query, key, value, output, real of a read of this shape, [B, T, ...] each."""
        count = shape[0] * shape[1]
        return tuple(
            tensor[:count].view(*shape, *tensor.shape[1:]) for tensor in (*self.tokens, self.output, self.real)
        )


@cache
def _addresses(
    count: int, query: torch.Size, key: torch.Size, value: torch.Size, dtype: torch.dtype, device: torch.device
) -> Addresses:
    """Shared by all graphs for tokens of these shapes: only one of them runs at a time."""

    def rows(shape: torch.Size) -> Tensor:
        return torch.zeros(count, *shape, dtype=dtype, device=device)

    gpu = device.type == "cuda"
    return Addresses(
        (rows(query), rows(key), rows(value)),
        rows(torch.Size((query[0], value[1]))),
        torch.zeros(count, dtype=torch.bool, device=device),
        torch.cuda.Stream(device) if gpu else None,  # type: ignore[no-untyped-call]
        torch.cuda.graph_pool_handle() if gpu else None,
    )


class ReadGraphs:
    """Reads of a few requests; shapes: their rows and tokens; new: query [n, H, D], key [n, G, D], value [n, G, V]."""

    def __init__(
        self,
        blocks: Slots,
        new: tuple[Tensor, Tensor, Tensor],
        policy: Policy,
        attention: Attention,
        shapes: Sequence[tuple[int, int]],
        chunk: int,
    ) -> None:
        self.policy, self.attention, self.chunk = policy, attention, chunk
        self.slots = _slots(blocks, max(rows for rows, _ in shapes))
        most = max(rows * width for rows, width in shapes)
        self.at = _addresses(most, *(tensor.shape[1:] for tensor in new), new[0].dtype, new[0].device)
        self.replays = self._captured(shapes)

    def run(self, blocks: Slots, segment: Segment, new: tuple[Tensor, Tensor, Tensor], output: Tensor) -> bool:
        """Read a segment, in blocks of any layer alike; false, and nothing done, if no graph is large enough."""
        count, width = segment.tokens.shape
        rows = next((rows for rows in ROWS if rows >= count and (rows, width) in self.replays), None)
        if rows is None:
            return False
        ours, theirs = self._first(count).tensors(), blocks.tensors()
        for name, tensor in ours.items():
            torch.index_select(theirs[name], 0, segment.blocks, out=tensor)
        ours["seen"].copy_(segment.seen)
        *places, results, real = self.at.rows((rows, width))
        for place, tensor in zip(places, new, strict=True):
            place[:count] = segment.rows_of(tensor)
        real[:count] = True if segment.real is None else segment.real
        if rows > count:
            real[count:] = False
            self.slots.positions[count:rows] = -1  # what lies there is another layer's
        self.replays[rows, width]()
        segment.put(output, results[:count])
        for name, tensor in ours.items():
            theirs[name].index_copy_(0, segment.blocks, tensor)
        return True

    def _first(self, count: int) -> Slots:
        rows: dict[str, Any] = {name: tensor[:count] for name, tensor in self.slots.tensors().items()}
        return replace(self.slots, **rows, fed=self.slots.positions.shape[2], packed_at=-1)

    def _read(self, shape: tuple[int, int]) -> None:
        """The read that a graph holds: whatever the slots are, also those of a request that begins."""
        slots = self._first(shape[0])
        empty_new(slots)
        zero_empty(slots)
        *tokens, output, real = self.at.rows(shape)
        query, key, value = (tensor.transpose(1, 2) for tensor in tokens)
        output.copy_(read(slots, query, key, value, self.policy, self.attention, real, self.chunk).transpose(1, 2))

    def _captured(self, shapes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Callable[[], object]]:
        """By shape, what runs its read."""
        if self.at.stream is None:
            return {shape: partial(self._read, shape) for shape in shapes}
        self.at.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.at.stream):
            for shape in shapes:
                if shape[1] <= self.chunk:
                    self._read(shape)  # compiles; longer reads have the same chunks
            torch.cuda.synchronize()
            # the largest first: the others find room in its memory, where blocks may be split (not in vLLM's profile)
            order = sorted(shapes, key=lambda shape: (-shape[0], -shape[1]))
            return {shape: self._graph(shape).replay for shape in order}

    def _graph(self, shape: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """torch.cuda.graph() would collect garbage every time, which takes longer than the capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.at.pool, capture_error_mode="thread_local")
        self._read(shape)
        graph.capture_end()
        return graph


_memory: dict[torch.device, Tensor] = {}


def _slots(blocks: Slots, count: int) -> Slots:
    """Slots for so many rows, each as the first block is. Layers of all kinds have them in the same memory."""
    parts = {name: (count, *tensor.shape[1:]) for name, tensor in blocks.tensors().items()}
    sizes = {name: -(-prod(shape) * getattr(blocks, name).itemsize // 64) * 64 for name, shape in parts.items()}
    device = blocks.keys.device
    if device not in _memory or _memory[device].numel() < sum(sizes.values()):
        _memory[device] = torch.zeros(sum(sizes.values()), dtype=torch.uint8, device=device)
    rows: dict[str, Any] = {}
    for name, memory in zip(
        parts, torch.split(_memory[device][: sum(sizes.values())], list(sizes.values())), strict=True
    ):
        first = getattr(blocks, name)[:1]
        rows[name] = memory[: prod(parts[name]) * first.itemsize].view(first.dtype).view(parts[name]).copy_(first)
    return replace(blocks, **rows)
