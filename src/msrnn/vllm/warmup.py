"""Warm-up before vLLM knows how much memory is left for blocks: the largest read, once, on blocks of its own.

vLLM measures the memory of a run without attention. A read takes gigabytes for a moment, and Triton compiles kernels
when they are first used: both happen here, so that neither comes as a surprise to a request.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from .. import kernels
from ..core.attention import Attention
from ..core.heads import LayerSlots, layer_parts, parts_of, read_groups
from ..core.slots import Slots
from .batch import StaticInputs, attend, batch_of, sizes_of
from .block import Layout, PartLayout
from .lanes import PIECE
from .read_graphs import capture, without_graphs
from .reads import GRAPHS, ROWS, TAILS, graph_shapes

_token_counts: dict[tuple[object, ...], int] = {}  # the most tokens of a warm-up, by what layers alike share
seconds: defaultdict[str, float] = defaultdict(float)  # what the warm-up took so far, by part


def warm_up(
    layout: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention,
    requests: int,
    kinds: int = 1,
    lanes: int = 0,
) -> None:
    """query [tokens, H, D] ...: of a run with as many tokens as a batch may have; `requests` may run at once.

    Layers, or KV heads, alike have the same kernels and memory: only the first is warmed up. `kinds`: how many there
    are that are not alike; `lanes`: on how many streams pieces of a prompt run beside each other.
    """
    groups = read_groups(layout.carve(_memory(layout, 1, query.device)), layout.policy)
    together = any(group.index is not None for group in groups)
    for own, part in zip(layout.parts, layer_parts(layout.policy), strict=True):
        new = part.take(query), part.take(key), part.take(value)
        if not together and _is_new(own, attention, len(query)):
            _warm_up_reads(own, *new, part.attention(attention), requests, kinds)
            _capture_lanes(own, *new, part.attention(attention), lanes)
    if _is_new(layout, attention, len(query)):
        if together:
            _warm_up_groups(layout, query, key, value, attention, requests)
        _warm_up_steps(layout, query, key, value, attention, min(requests, len(query)))


def _is_new(layout: Layout | PartLayout, attention: Attention, tokens: int) -> bool:
    """Whether nothing alike was warmed up with as many tokens; from now on it was."""
    alike = (layout, attention.scale, attention.softcap, attention.window, attention.sinks is None, attention.sharded)
    before = _token_counts.get(alike, 0)
    _token_counts[alike] = max(before, tokens)
    return before < tokens


def _warm_up_steps(layout: Layout, query: Tensor, key: Tensor, value: Tensor, attention: Attention, most: int) -> None:
    new, output = (query, key, value), query.new_empty(*query.shape[:2], value.shape[2])
    with _timed("compiling", query.device), _compiling(query):
        _step(_blocks(layout, 1, query.device), layout, new, attention, output, most)
    with _timed("steps", query.device):
        _step(_blocks(layout, 1, query.device), layout, new, attention, output, most)


def _warm_up_groups(
    layout: Layout, query: Tensor, key: Tensor, value: Tensor, attention: Attention, requests: int
) -> None:
    """Reads of a layer whose KV heads are read in groups; they have no CUDA graphs, as one is a long read already."""
    new, output = (query, key, value), query.new_empty(*query.shape[:2], value.shape[2])
    tokens, chunk, device = len(query), TAILS[-1], query.device
    rows = max(1, min(ROWS[-1], tokens // chunk, requests))
    reads = sorted({(rows, chunk), *((count, tail) for tail in TAILS for count in (1, rows))})
    for part, context in (("compiling", _compiling(query)), ("reads", without_graphs())):
        with _timed(part, device), context:
            for count, size in reads:
                _read(_blocks(layout, count, device), layout, new, attention, output, size)


def _compiling(query: Tensor) -> AbstractContextManager[object]:
    """Inside, kernels are compiled and not launched, where there are any."""
    return kernels.compiling_only() if query.is_cuda else nullcontext()


def _warm_up_reads(
    layout: PartLayout, query: Tensor, key: Tensor, value: Tensor, attention: Attention, requests: int, kinds: int
) -> None:
    tokens = len(query)
    device, chunk, new = query.device, TAILS[-1], (query, key, value)
    output = query.new_empty(*query.shape[:2], value.shape[2])
    sizes = sizes_of(_slots(layout, 1, device), query, layout.policy, attention)
    rows = max(1, min(sizes.rows_at_once(chunk), tokens // chunk, requests))
    reads = ((rows, chunk), *((count, tail) for tail in TAILS for count in {1, rows}))
    shapes = [shape for shape in graph_shapes(tokens, kinds) if shape[0] <= min(rows, sizes.graph_rows())]
    if query.is_cuda and kernels.compiled("cuda"):
        with _timed("compiling", device), _compiling(query):
            for count, size in sorted({*reads, *(shape for shape in shapes if shape[1] == chunk)}):
                _read(_slots(layout, count, device), layout, new, attention, output, size)
    with _timed("graphs", device):
        capture(_slots(layout, 1, device), new, layout.policy, attention, shapes, chunk)
    with _timed("reads", device), without_graphs():  # some pieces fit no graph
        for count, size in reads:
            _read(_slots(layout, count, device), layout, new, attention, output, size)


def _capture_lanes(
    layout: PartLayout, query: Tensor, key: Tensor, value: Tensor, attention: Attention, lanes: int
) -> None:
    """Graphs of the pieces of one prompt, for every lane its own."""
    shapes = [(1, width) for width in (TAILS[0], *GRAPHS) if width <= min(PIECE, len(query))]
    with _timed("lanes", query.device), _beside_each_other(lanes, query):
        for lane in range(lanes):
            blocks = _slots(layout, 1, query.device)
            capture(blocks, (query, key, value), layout.policy, attention, shapes, TAILS[-1], lane)


def _beside_each_other(lanes: int, query: Tensor) -> AbstractContextManager[object]:
    """Inside, scans leave SMs to those of the other lanes."""
    return kernels.concurrent_scans(lanes) if lanes > 1 and query.is_cuda else nullcontext()


@contextmanager
def _timed(part: str, device: torch.device) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[part] += time.perf_counter() - begin


def _slots(layout: PartLayout, count: int, device: torch.device) -> Slots:
    """Blocks whose slots are all in use but the last."""
    return _in_use(layout.carve(_memory(layout, count, device)))


def _blocks(layout: Layout, count: int, device: torch.device) -> LayerSlots:
    """The same of a layer, all parts of it."""
    blocks = layout.carve(_memory(layout, count, device))
    for part in parts_of(blocks):
        _in_use(part)
    return blocks


def _memory(layout: Layout | PartLayout, count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, layout.nbytes, dtype=torch.uint8, device=device)


def _in_use(blocks: Slots) -> Slots:
    slots = blocks.positions.shape[2]
    blocks.positions.copy_(torch.arange(slots, device=blocks.positions.device).expand_as(blocks.positions))
    blocks.positions[:, :, -1] = -1
    blocks.next.fill_(slots - 1)
    return blocks


def _read(
    blocks: LayerSlots,
    layout: Layout | PartLayout,
    new: tuple[Tensor, Tensor, Tensor],
    attention: Attention,
    output: Tensor,
    size: int,
) -> None:
    """Every block's request reads `size` tokens: as one that begins, and as one that has read many."""
    parts = parts_of(blocks)
    device, count, tokens = output.device, len(parts[0].keys), len(output)
    size = max(2, min(size, tokens // count)) if tokens > 1 else 1
    starts = [min(tokens, size * row) for row in range(count + 1)]
    index = torch.arange(count, device=device)
    for before in (0, max(part.positions.shape[2] for part in parts)):
        seen = [before] * count
        batch = batch_of(index, torch.tensor(seen, device=device), starts, seen)
        attend(blocks, batch, *new, layout.policy, attention, output)


def _step(
    blocks: LayerSlots,
    layout: Layout,
    new: tuple[Tensor, Tensor, Tensor],
    attention: Attention,
    output: Tensor,
    most: int,
) -> None:
    """One token of so many requests, for every number that may get kernels of its own; all of them in one block."""
    device, seen = output.device, parts_of(blocks)[0].positions.shape[2]
    inputs = StaticInputs(most, device)
    for count in sorted({*range(1, min(most, 300) + 1), most}):
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        rows = inputs.put(zeros, zeros + seen)
        batch = batch_of(*rows, list(range(count + 1)), [seen] * count)
        attend(blocks, batch, *new, layout.policy, attention, output)
