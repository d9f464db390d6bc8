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
from .reads import ROWS, TAILS, Segment

_WORD = 8  # bytes: blocks are copied as numbers of 8 bytes
_MOST_SLOTS = 16384  # a chunk of larger states keeps the GPU busy, and the largest are scanned by plain PyTorch
_MOST_BLENDED = 2**13 - TAILS[-1]  # the same with a residual, whose scan holds fewer columns
Kind = tuple[object, ...]
_graphs: dict[tuple[int | None, Kind], ReadGraphs] = {}  # by lane and kind
_replaced: list[ReadGraphs] = []  # kept: destroying a graph frees the matmul workspace of all on its capture stream


def can_be_captured(blocks: Slots, policy: Policy, attention: Attention) -> bool:
    """Only layers without a rule, sinks and tensor parallelism; on a GPU only compiled kernels, as others wait."""
    alike = policy.rule is None and attention.sinks is None and not attention.sharded
    device, slots = blocks.keys.device.type, blocks.positions.shape[2]
    return alike and slots <= most_slots(policy) and (device != "cuda" or kernels.compiled(device))


def most_slots(policy: Policy) -> int:
    """The slots of the largest state that graphs read."""
    return _MOST_SLOTS if policy.residual is None else _MOST_BLENDED


def kind_of(blocks: Slots, query: Tensor, policy: Policy, attention: Attention) -> Kind:
    """What layers alike have in common."""
    shapes = blocks.keys.shape[1:], blocks.values.shape[1:], blocks.positions.shape[1:]
    return policy, attention, query.shape[1:], query.dtype, query.device, blocks.keys.dtype, *shapes


def capture(
    blocks: Slots,
    new: tuple[Tensor, Tensor, Tensor],
    policy: Policy,
    attention: Attention,
    shapes: Sequence[tuple[int, int]],
    chunk: int,
    lane: int | None = None,
) -> None:
    """Capture reads of so many rows and tokens for all layers like this one; the first block's slots must be in use.

    Graphs of different lanes may run at the same time. They keep their memory, which vLLM's memory profile counts.
    """
    if shapes and can_be_captured(blocks, policy, attention):
        key = lane, kind_of(blocks, new[0], policy, attention)
        if key in _graphs:  # another engine's, of smaller batches
            if _graphs[key].replays.keys() >= set(shapes):
                return
            _replaced.append(_graphs[key])
        _graphs[key] = ReadGraphs(blocks, new, policy, attention, shapes, chunk, lane)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Inside this context every read is launched kernel by kernel."""
    graphs = dict(_graphs)
    _graphs.clear()
    try:
        yield
    finally:
        _graphs.update(graphs)


def graphs_of(
    blocks: Slots, query: Tensor, policy: Policy, attention: Attention, lane: int | None = None
) -> BlockReads | None:
    if not _graphs or not can_be_captured(blocks, policy, attention):
        return None
    graphs = _graphs.get((lane, kind_of(blocks, query, policy, attention)))
    return None if graphs is None else BlockReads(graphs, blocks)


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
    count: int,
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    lane: int | None,
) -> Addresses:
    """Shared by all graphs of a lane for tokens of these shapes: only one of them runs at a time."""

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
        lane: int | None = None,
    ) -> None:
        self.policy, self.attention, self.chunk = policy, attention, chunk
        self.slots = _slots(blocks, max(rows for rows, _ in shapes), lane)
        most = max(rows * width for rows, width in shapes)
        self.at = _addresses(most, *(tensor.shape[1:] for tensor in new), new[0].dtype, new[0].device, lane)
        self.places = {shape: self.at.rows(shape) for shape in shapes}
        self.replays = self._captured(shapes)

    def first(self, count: int) -> Slots:
        rows: dict[str, Any] = {name: tensor[:count] for name, tensor in self.slots.tensors().items()}
        return replace(self.slots, **rows, fed=self.slots.positions.shape[2], packed_at=-1)

    def _read(self, shape: tuple[int, int]) -> None:
        """The read that a graph holds: whatever the slots are, also those of a request that begins."""
        slots = self.first(shape[0])
        empty_new(slots)
        zero_empty(slots)
        *tokens, output, real = self.places[shape]
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


class BlockReads:
    """Graphs on the blocks of one layer. They hold views of its memory, so they live no longer than a batch."""

    def __init__(self, graphs: ReadGraphs, blocks: Slots) -> None:
        self.graphs, self.blocks = graphs, blocks
        self._pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def run(self, segment: Segment, new: tuple[Tensor, Tensor, Tensor], output: Tensor) -> bool:
        """Read a segment; false, and nothing done, if no graph is large enough."""
        count, width = segment.tokens.shape
        replays, slots = self.graphs.replays, self.graphs.slots
        rows = next((rows for rows in ROWS if rows >= count and (rows, width) in replays), None)
        if rows is None:
            return False
        pairs = self.pairs(count)
        for ours, theirs in pairs:
            torch.index_select(theirs, 0, segment.blocks, out=ours)
        slots.seen[:count].copy_(segment.seen)
        *places, results, real = self.graphs.places[rows, width]
        for place, tensor in zip(places, new, strict=True):
            place[:count].copy_(segment.rows_of(tensor))
        real[:count] = True if segment.real is None else segment.real
        if rows > count:
            real[count:] = False
            slots.positions[count:rows] = -1  # what lies there is another layer's
        replays[rows, width]()
        segment.put(output, results[:count])
        for ours, theirs in pairs:
            theirs.index_copy_(0, segment.blocks, ours)
        return True

    def pairs(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Tensors of so many rows of the graphs' slots, and those of all blocks: one pair where a row is a block."""
        if count not in self._pairs:
            ours, theirs = self.graphs.first(count).tensors(), self.blocks.tensors()
            whole = _whole(ours, theirs) if count == 1 else None
            self._pairs[count] = [(ours[name], theirs[name]) for name in ours] if whole is None else [whole]
        return self._pairs[count]


def _whole(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The bytes of one row and of all blocks, [1, n] and [blocks, n], where the tensors lie alike in both."""
    places = [{name: tensor.data_ptr() for name, tensor in tensors.items()} for tensors in (ours, theirs)]
    starts = [min(place.values()) for place in places]
    if any(places[0][name] - starts[0] != places[1][name] - starts[1] for name in ours):
        return None
    last = max(ours, key=lambda name: places[0][name])
    size = -(-(places[0][last] - starts[0] + ours[last].nbytes) // _WORD) * _WORD
    keys, blocks = ours["keys"], theirs["keys"]
    stride = blocks.stride(0) * blocks.itemsize
    if starts != [keys.data_ptr(), blocks.data_ptr()] or stride < size or stride % _WORD:
        return None
    return _words(keys, (1, size), size), _words(blocks, (len(blocks), size), stride)


def _words(tensor: Tensor, shape: tuple[int, int], stride: int) -> Tensor:
    """Rows of so many bytes from a tensor's first on, as numbers of 8 bytes."""
    whole = torch.empty(0, dtype=torch.int64, device=tensor.device).set_(tensor.untyped_storage())
    begin = tensor.storage_offset() * tensor.itemsize // _WORD
    return whole.as_strided((shape[0], shape[1] // _WORD), (stride // _WORD, 1), begin)


_memory: dict[tuple[torch.device, int | None], Tensor] = {}  # by device and lane


def _slots(blocks: Slots, count: int, lane: int | None) -> Slots:
    """Slots for so many rows, each as the first block is. Layers of all kinds have them in the same memory, by lane."""
    parts = {name: (count, *tensor.shape[1:]) for name, tensor in blocks.tensors().items()}
    sizes = {name: -(-prod(shape) * getattr(blocks, name).itemsize // 64) * 64 for name, shape in parts.items()}
    key, total = (blocks.keys.device, lane), sum(sizes.values())
    if key not in _memory or _memory[key].numel() < total:
        _memory[key] = torch.zeros(total, dtype=torch.uint8, device=blocks.keys.device)
    rows: dict[str, Any] = {}
    for name, memory in zip(parts, torch.split(_memory[key][:total], list(sizes.values())), strict=True):
        first = getattr(blocks, name)[:1]
        rows[name] = memory[: prod(parts[name]) * first.itemsize].view(first.dtype).view(parts[name]).copy_(first)
    return replace(blocks, **rows)
