"""Reads of one request as CUDA graphs: a chunk is some twenty small launches, which take the host longer than the GPU.

A graph reads fixed addresses, so a request's slots and new tokens are copied there first, and back after it. Layers
alike share the graphs. On other devices the same copies and the same read run as they are. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

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
        most, (query, _, value) = max(widths), new
        self.policy, self.attention, self.chunk = policy, attention, chunk
        rows: dict[str, Any] = {name: tensor[:1].clone() for name, tensor in blocks.tensors().items()}
        self.slots = replace(blocks, **rows)
        self.tokens = tuple(tensor.new_zeros(most, *tensor.shape[1:]) for tensor in new)
        self.output = query.new_zeros(most, query.shape[1], value.shape[2])
        self.real = torch.ones(1, most, dtype=torch.bool, device=query.device)
        self.pool = torch.cuda.graph_pool_handle() if query.is_cuda else None
        # the largest first: the others then find room in its memory
        self.replays = {width: self._captured(width) for width in sorted(widths, reverse=True)}

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
        for place, tensor in zip(self.tokens, new, strict=True):
            torch.index_select(tensor, 0, segment.tokens[0], out=place[:width])
        if segment.real is None:
            self.real[:, :width] = True
        else:
            self.real[:, :width] = segment.real
        self.replays[width]()
        output[segment.places] = self.output[: len(segment.places)]
        for name, tensor in ours.items():
            theirs[name].index_copy_(0, segment.blocks, tensor)

    def _read(self, width: int) -> None:
        """The read that a graph holds: whatever the slots are, also those of a request that begins."""
        slots = replace(self.slots, fed=self.slots.positions.shape[2], packed_at=-1)
        empty_new(slots)
        zero_empty(slots)
        query, key, value = (tensor[:width].transpose(0, 1)[None] for tensor in self.tokens)
        mixed = read(slots, query, key, value, self.policy, self.attention, self.real[:, :width], self.chunk)
        self.output[:width] = mixed[0].transpose(0, 1)

    def _captured(self, width: int) -> Callable[[], object]:
        if self.pool is None:
            return lambda: self._read(width)
        stream = torch.cuda.Stream(self.output.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._read(width)  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # torch.cuda.graph() would collect garbage every time, which takes longer
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            self._read(width)
            graph.capture_end()
        return graph.replay
