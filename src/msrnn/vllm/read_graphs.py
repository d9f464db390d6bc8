"""Reads of one request as CUDA graphs: a chunk is some twenty small launches, which take the host longer than the GPU.

A graph reads fixed addresses, so a request's slots and new tokens are copied there first, and back after it. Layers
alike share the graphs. On other devices the same copies and the same read run as they are. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.attention import Attention
from ..core.recurrence import read
from ..core.slots import Slots
from ..policy import Policy
from .block import empty_new, zero_empty
from .reads import Segment

Kind = tuple[object, ...]
_graphs: dict[Kind, ReadGraphs] = {}


def can_be_captured(policy: Policy, attention: Attention) -> bool:
    """Not where layers differ in more than their tokens, and not what waits for other processes."""
    return policy.rule is None and attention.sinks is None and not attention.sharded


def kind_of(blocks: Slots, query: Tensor, policy: Policy, attention: Attention) -> Kind:
    """What layers alike have in common."""
    shapes = blocks.keys.shape[1:], blocks.values.shape[1:], blocks.positions.shape[1:]
    return policy, attention, query.shape[1:], query.dtype, query.device, *shapes


def capture(
    blocks: Slots,
    new: tuple[Tensor, Tensor, Tensor],
    policy: Policy,
    attention: Attention,
    widths: Sequence[int],
    chunk: int,
) -> int:
    """Capture reads of so many tokens for all layers like this one; the first block's slots must be in use.

    -> bytes that the graphs hold and that PyTorch does not count as allocated.
    """
    if not can_be_captured(policy, attention):
        return 0
    before = _uncounted(blocks.keys.device)
    _graphs[kind_of(blocks, new[0], policy, attention)] = ReadGraphs(blocks, new, policy, attention, widths, chunk)
    return max(0, _uncounted(blocks.keys.device) - before)


def _uncounted(device: torch.device) -> int:
    """Bytes that PyTorch has taken and in which no tensor lies."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def graphs_of(blocks: Slots, query: Tensor, policy: Policy, attention: Attention) -> ReadGraphs | None:
    if not _graphs or not can_be_captured(policy, attention):
        return None
    return _graphs.get(kind_of(blocks, query, policy, attention))


class Addresses(NamedTuple):
    """Where graphs find new tokens, query [T, H, D], key [T, G, D], value [T, G, V], and leave the output [T, H, V]."""

    tokens: tuple[Tensor, Tensor, Tensor]
    output: Tensor
    real: Tensor  # [1, T]
    stream: Any = None
    pool: Any = None


@cache
def _addresses(
    width: int, query: torch.Size, key: torch.Size, value: torch.Size, dtype: torch.dtype, device: torch.device
) -> Addresses:
    """Shared by all graphs for tokens of these shapes: only one of them runs at a time."""

    def rows(shape: torch.Size) -> Tensor:
        return torch.zeros(width, *shape, dtype=dtype, device=device)

    gpu = device.type == "cuda"
    return Addresses(
        (rows(query), rows(key), rows(value)),
        rows(torch.Size((query[0], value[1]))),
        torch.ones(1, width, dtype=torch.bool, device=device),
        torch.cuda.Stream(device) if gpu else None,  # type: ignore[no-untyped-call]
        torch.cuda.graph_pool_handle() if gpu else None,
    )


class ReadGraphs:
    """Reads of one request, as many tokens as one of `widths`; new: query [T, H, D], key [T, G, D], value [T, G, V]."""

    def __init__(
        self,
        blocks: Slots,
        new: tuple[Tensor, Tensor, Tensor],
        policy: Policy,
        attention: Attention,
        widths: Sequence[int],
        chunk: int,
    ) -> None:
        self.policy, self.attention, self.chunk = policy, attention, chunk
        rows: dict[str, Any] = {name: tensor[:1].clone() for name, tensor in blocks.tensors().items()}
        self.slots = replace(blocks, **rows)
        self.at = _addresses(max(widths), *(tensor.shape[1:] for tensor in new), new[0].dtype, new[0].device)
        self.replays = self._captured(sorted(widths))

    def fits(self, segment: Segment) -> bool:
        rows, width = segment.tokens.shape
        return rows == 1 and width in self.replays

    def run(self, blocks: Slots, segment: Segment, new: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Read a segment that fits; blocks: those of any layer alike."""
        width = segment.tokens.shape[1]
        ours, theirs = self.slots.tensors(), blocks.tensors()
        for name, tensor in ours.items():
            torch.index_select(theirs[name], 0, segment.blocks, out=tensor)
        self.slots.seen.copy_(segment.seen)
        for place, tensor in zip(self.at.tokens, new, strict=True):
            torch.index_select(tensor, 0, segment.tokens[0], out=place[:width])
        if segment.real is None:
            self.at.real[:, :width] = True
        else:
            self.at.real[:, :width] = segment.real
        self.replays[width]()
        output[segment.places] = self.at.output[: len(segment.places)]
        for name, tensor in ours.items():
            theirs[name].index_copy_(0, segment.blocks, tensor)

    def _read(self, width: int) -> None:
        """The read that a graph holds: whatever the slots are, also those of a request that begins."""
        slots = replace(self.slots, fed=self.slots.positions.shape[2], packed_at=-1)
        empty_new(slots)
        zero_empty(slots)
        query, key, value = (tensor[:width].transpose(0, 1)[None] for tensor in self.at.tokens)
        mixed = read(slots, query, key, value, self.policy, self.attention, self.at.real[:, :width], self.chunk)
        self.at.output[:width] = mixed[0].transpose(0, 1)

    def _captured(self, widths: list[int]) -> dict[int, Callable[[], object]]:
        """By width, what runs its read."""
        if self.at.stream is None:
            return {width: partial(self._read, width) for width in widths}
        self.at.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.at.stream):
            for width in widths:
                if width <= self.chunk:
                    self._read(width)  # compiles; longer reads have the same chunks
            torch.cuda.synchronize()
            # the longest first: the others then find room in its memory
            return {width: self._graph(width).replay for width in reversed(widths)}

    def _graph(self, width: int) -> torch.cuda.CUDAGraph:
        """torch.cuda.graph() would collect garbage every time, which takes longer than the capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.at.pool, capture_error_mode="thread_local")
        self._read(width)
        graph.capture_end()
        return graph
