"""Before vLLM knows how much memory is left for blocks: the largest read, once, on blocks of its own.

vLLM measures the memory of a run without attention. A read takes gigabytes for a moment, and Triton compiles kernels
when they are first used: both happen here, so that neither comes as a surprise to a request.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import kernels
from ..core.attention import Attention
from ..core.heads import layer_parts
from ..core.slots import Slots
from .batch import StaticInputs, attend_part, batch_of, sizes_of
from .block import Layout, PartLayout
from .read_graphs import capture, without_graphs
from .reads import TAILS, graph_shapes

_rehearsed: dict[tuple[object, ...], int] = {}
seconds: defaultdict[str, float] = defaultdict(float)  # what rehearsals took so far, by part


def rehearse(
    layout: Layout, query: Tensor, key: Tensor, value: Tensor, attention: Attention, requests: int, kinds: int = 1
) -> None:
    """query [tokens, H, D] ...: of a run with as many tokens as a batch may have; `requests` may run at once.

    Layers, or KV heads, alike have the same kernels and memory: only the first is rehearsed. `kinds`: how many there
    are that are not alike.
    """
    for own, part in zip(layout.parts, layer_parts(layout.policy, layout.heads), strict=True):
        new = query[:, part.queries], key[:, part.own], value[:, part.own]
        _rehearse(own, *new, part.attention(attention), requests, kinds)


def _rehearse(
    layout: PartLayout, query: Tensor, key: Tensor, value: Tensor, attention: Attention, requests: int, kinds: int
) -> None:
    alike = (layout, attention.scale, attention.softcap, attention.window, attention.sinks is None, attention.sharded)
    tokens = len(query)
    if _rehearsed.get(alike, 0) >= tokens:
        return
    _rehearsed[alike] = tokens
    device, chunk, new = query.device, TAILS[-1], (query, key, value)
    output = query.new_empty(*query.shape[:2], value.shape[2])
    sizes = sizes_of(_blocks(layout, 1, device), query, layout.policy, attention)
    rows = max(1, min(sizes.rows_at_once(chunk), tokens // chunk, requests))
    reads = ((rows, chunk), *((count, tail) for tail in TAILS for count in {1, rows}))
    shapes = [shape for shape in graph_shapes(tokens, kinds) if shape[0] <= min(rows, sizes.graph_rows())]
    if query.is_cuda and kernels.compiled("cuda"):
        from ..kernels.triton.compilation import compiling_only

        with _timed("compiling", device), compiling_only():
            for count, size in sorted({*reads, *(shape for shape in shapes if shape[1] == chunk)}):
                _read(_blocks(layout, count, device), layout, new, attention, output, size)
            _step(_blocks(layout, 1, device), layout, new, attention, output, min(requests, tokens))
    with _timed("graphs", device):
        capture(_blocks(layout, 1, device), new, layout.policy, attention, shapes, chunk)
    with _timed("reads", device), without_graphs():  # some pieces fit no graph
        for count, size in reads:
            _read(_blocks(layout, count, device), layout, new, attention, output, size)
    with _timed("steps", device):
        _step(_blocks(layout, 1, device), layout, new, attention, output, min(requests, tokens))


@contextmanager
def _timed(part: str, device: torch.device) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[part] += time.perf_counter() - begin


def _blocks(layout: PartLayout, count: int, device: torch.device) -> Slots:
    """Blocks whose slots are all in use but the last."""
    blocks = layout.carve(torch.zeros(count, layout.nbytes, dtype=torch.uint8, device=device))
    slots = blocks.positions.shape[2]
    blocks.positions.copy_(torch.arange(slots, device=device).expand_as(blocks.positions))
    blocks.positions[:, :, -1] = -1
    blocks.next.fill_(slots - 1)
    return blocks


def _read(
    blocks: Slots,
    layout: PartLayout,
    new: tuple[Tensor, Tensor, Tensor],
    attention: Attention,
    output: Tensor,
    size: int,
) -> None:
    """Every block's request reads `size` tokens: as one that begins, and as one that has read many."""
    device, count, tokens = output.device, len(blocks.keys), len(output)
    size = max(2, min(size, tokens // count)) if tokens > 1 else 1
    starts = [min(tokens, size * row) for row in range(count + 1)]
    index = torch.arange(count, device=device)
    for before in (0, blocks.positions.shape[2]):
        seen = [before] * count
        batch = batch_of(index, torch.tensor(seen, device=device), starts, seen)
        attend_part(blocks, batch, *new, layout.policy, attention, output)


def _step(
    blocks: Slots,
    layout: PartLayout,
    new: tuple[Tensor, Tensor, Tensor],
    attention: Attention,
    output: Tensor,
    most: int,
) -> None:
    """One token of so many requests, for every number that may get kernels of its own; all of them in one block."""
    device, seen = output.device, blocks.positions.shape[2]
    inputs = StaticInputs(most, device)
    for count in sorted({*range(1, min(most, 300) + 1), most}):
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        rows = inputs.put(zeros, zeros + seen)
        batch = batch_of(*rows, list(range(count + 1)), [seen] * count)
        attend_part(blocks, batch, *new, layout.policy, attention, output)
