"""One layer's attention for a batch of requests as vLLM schedules it. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import kernels
from ..core.attention import Attention
from ..core.formats import decode
from ..core.head_groups import Group
from ..core.heads import LayerSlots, layer_parts, parts_of, read_groups, step, with_parts
from ..core.recurrence import read
from ..core.slots import Slots, gain_of
from ..plan import LayerPolicy
from ..policy import KV, Policy
from .block import clear, empty, empty_new, zero_empty
from .lanes import Turns
from .read_graphs import BlockReads, graphs_of
from .reads import Fit, Reads, Row, Segment, Sizes, plan

Keep = Callable[[Any], object]  # with a layer


@dataclass
class Batch:
    """The first `steps` requests have one new token (decode); `rows` are the others, with more (prefill).

    blocks [R], seen [R] (tokens before this batch), on the device. `begins`: one of the steps may be a request's first
    token, so its block must be emptied. On the host: `seen_list` is `seen`, where it is known there, and `sizes` the
    number of new tokens of each request. A piece of a prompt that is read beside others has its `lane`, whose CUDA
    graphs it runs, its `turns`, in which the pieces take every layer, and perhaps `keep`: what is done with a layer
    that has read it.
    """

    steps: int
    begins: bool
    blocks: Tensor
    seen: Tensor
    rows: list[Row]
    seen_list: list[int]
    sizes: list[int]
    plans: dict[Sizes, Reads] = field(default_factory=dict)
    lane: int | None = None
    turns: Turns | None = None
    keep: Keep | None = None

    def reads(self, sizes: Sizes) -> Reads:
        """The indices that a part of a layer needs, shared by all alike."""
        shared = sizes.shared(len(self.rows))
        if shared not in self.plans:
            self.plans[shared] = plan(self.blocks, self.rows, sizes)
        return self.plans[shared]

    @property
    def token_count(self) -> int:
        return self.steps + sum(row.size for row in self.rows)

    def pieces(
        self, size: int, turns: Turns, lanes: int, stops: Mapping[int, Keep] | None = None
    ) -> list[tuple[slice, Self]]:
        """The only prompt in pieces: the tokens of each, and a batch of them. Steps go with the first.

        They have at most `size` tokens, and end at `stops`: after so many tokens of the text its value is called.
        """
        (row,) = self.rows
        pieces: list[tuple[slice, Self]] = []
        stops, begin = stops or {}, 0
        while begin < row.size:
            inside = (stop - row.seen for stop in stops if stop > row.seen + begin)
            end = min(begin + size, row.size, *inside)
            first = row.start + begin if begin else 0
            own = Row(row.number, row.start + begin - first, end - begin, row.seen + begin)
            keep = stops.get(row.seen + end)
            piece = replace(self, rows=[own], plans={}, lane=len(pieces) % lanes, turns=turns, keep=keep)
            if begin:
                piece.steps, piece.begins = 0, False
            pieces.append((slice(first, row.start + end), piece))
            begin = end
        return pieces


class StaticInputs:
    """Where `blocks` and `seen` of every batch lie on the device: a CUDA graph reads the addresses of its capture."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.memory = torch.zeros(2, -(-rows // 16) * 16, dtype=torch.int64, device=device)

    def put(self, blocks: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """blocks, seen [R] of the next batch -> copies at the same addresses for every batch of R requests."""
        rows = self.memory[:, : len(blocks)]
        return rows[0].copy_(blocks), rows[1].copy_(seen)


def batch_of(blocks: Tensor, seen: Tensor, starts: list[int], seen_list: list[int] | None = None) -> Batch:
    """blocks, seen [R], on the device; starts [R + 1], where each request's tokens begin, and seen_list on the host.

    Without seen_list, `seen` is read back where the batch has prompts; steps on a GPU never wait for it.
    """
    lengths = [end - start for start, end in pairwise(starts)]
    steps = next((row for row, length in enumerate(lengths) if length > 1), len(lengths))
    if seen_list is None:
        known = steps < len(lengths) or blocks.device.type == "cpu"
        seen_list = seen.tolist() if known else []
    begins = any(length and not before for length, before in zip(lengths[:steps], seen_list, strict=False))
    begins = begins or (steps > 0 and not seen_list)
    rows = [
        Row(number, starts[number], lengths[number], seen_list[number])
        for number in range(steps, len(lengths))
        if lengths[number]
    ]
    return Batch(steps, begins, blocks, seen, rows, seen_list, lengths)


def attend(
    blocks: LayerSlots,
    batch: Batch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: LayerPolicy,
    attention: Attention,
    output: Tensor,
) -> None:
    """query [tokens, H, D], key [tokens, G, D], value [tokens, G, V] -> output [tokens, H, V], filled in place."""
    if batch.steps:
        rows = slice(0, batch.steps)
        index, seen = batch.blocks[rows], batch.seen[rows]
        parts = parts_of(blocks)
        if batch.begins:
            for slots in parts:
                clear(slots, index, seen)
        active = with_parts(blocks, [replace(slots, rows=index, seen=seen) for slots in parts])
        step(active, query[rows], key[rows], value[rows], policy, attention, out=output[rows])
    if batch.rows:
        own = list(zip(parts_of(blocks), layer_parts(policy), strict=True))
        for group in read_groups(blocks, policy):
            if group.index is not None:
                _read_group(group, [own[head] for head in group.heads], batch, query, key, value, attention, output)
                continue
            slots, part = own[group.heads[0]]
            new = part.take(query), part.take(key), part.take(value)
            reader = Reader(slots, new[0], part.policy, part.attention(attention))
            reader.read(batch, *new, part.take(output))


def attend_piece(
    layer: object,
    blocks: Callable[[], LayerSlots],
    piece: Batch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: LayerPolicy,
    attention: Attention,
    output: Tensor,
) -> None:
    """`attend` for a piece of a prompt, when the layer is done with the one before; one reader serves all of them."""
    assert piece.turns is not None
    assert isinstance(policy, Policy), "budgets by KV head have no lanes"
    readers = piece.turns.readers
    with piece.turns.take(layer):
        if piece.steps:
            attend(blocks(), piece, query, key, value, policy, attention, output)
        else:
            if layer not in readers:
                (slots,) = parts_of(blocks())
                readers[layer] = Reader(slots, query, policy, attention)
            readers[layer].read(piece, query, key, value, output)
        if piece.keep is not None:
            piece.keep(layer)


def _read_group(
    group: Group,
    parts: list[tuple[Slots, Group]],
    batch: Batch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention,
    output: Tensor,
) -> None:
    """The prompts of KV heads that have blocks of their own and are read together."""
    reads = batch.reads(group_sizes([slots for slots, _ in parts], parts[0][1], group, query, attention))
    for fit in reads.fits:
        for slots, part in parts:
            new = part.take(query), part.take(key), part.take(value)
            _attend_fitting(slots, fit, *new, part.attention(attention), part.take(output))
    for segment in reads.segments:
        rows = [_gather(slots, segment) for slots, _ in parts]
        whole = group.join(dict(zip(group.heads, rows, strict=True)))
        zero_empty(whole)  # the shorter heads' last slots are among the others
        q, k, v = (group.take(segment.rows_of(tensor).transpose(1, 2)) for tensor in (query, key, value))
        mixed = read(whole, q, k, v, group.policy, group.attention(attention), segment.real, reads.chunk)
        group.split(whole, dict(zip(group.heads, rows, strict=True)))
        outputs = torch.split(mixed.transpose(1, 2), mixed.shape[1] // len(parts), 2)
        for (slots, part), own, out in zip(parts, rows, outputs, strict=True):
            segment.put(part.take(output), out)
            _put_back(slots, segment, own)


def group_sizes(parts: list[Slots], first: Group, group: Group, query: Tensor, attention: Attention) -> Sizes:
    """`sizes_of` for heads that are read together: what fits into the smallest fits into all."""
    longest = max(parts, key=lambda slots: slots.positions.shape[2])
    one = sizes_of(longest, first.take(query), group.policy, attention)
    return one._replace(heads=one.heads * len(parts), slot_bytes=one.slot_bytes * len(parts))


class Reader:
    """Reads the prompts of a part of a layer, in any number of pieces; query [tokens, H, D], like those that come."""

    def __init__(self, blocks: Slots, query: Tensor, policy: Policy, attention: Attention) -> None:
        self.blocks, self.policy, self.attention = blocks, policy, attention
        self.sizes = sizes_of(blocks, query, policy, attention)
        self.graphs: dict[int | None, BlockReads | None] = {}  # by lane

    def read(self, batch: Batch, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Heads may be views of the layer's."""
        reads, graphs = batch.reads(self.sizes), self._graphs(batch.lane, query)
        for fit in reads.fits:
            _attend_fitting(self.blocks, fit, query, key, value, self.attention, output)
        for segment in reads.segments:
            if graphs is None or not graphs.run(segment, (query, key, value), output):
                new = query, key, value
                _read_segment(self.blocks, segment, *new, self.policy, self.attention, output, reads.chunk)

    def _graphs(self, lane: int | None, query: Tensor) -> BlockReads | None:
        if lane not in self.graphs:
            self.graphs[lane] = graphs_of(self.blocks, query, self.policy, self.attention, lane)
        return self.graphs[lane]


def sizes_of(blocks: Slots, query: Tensor, policy: Policy, attention: Attention) -> Sizes:
    """What the plan of a part's reads depends on."""
    keys = blocks.keys
    stored, slots = keys.shape[1:3]
    size, width = blocks.sizes
    ordinary = attention.plain and attention.window is None and blocks.scores is None
    half = query.is_cuda and query.dtype.itemsize == 2
    flash = half and size == width and size <= 256 and size % 8 == 0
    slot_bytes = stored * (size + width) * query.dtype.itemsize
    room = (policy.capacity or 0) if ordinary else 0
    return Sizes(room, slots, query.shape[1], slot_bytes, flash, query.is_cuda)


def _attend_fitting(
    blocks: Slots, fit: Fit, query: Tensor, key: Tensor, value: Tensor, attention: Attention, output: Tensor
) -> None:
    """Nothing leaves: the new tokens go into the slots behind the earlier ones, and each sees all before it."""
    query, key, value = (tensor[fit.tokens] for tensor in (query, key, value))
    key, value = blocks.expand(key, value)
    if fit.begins is not None:
        empty(blocks, fit.begins)
    if blocks.kv is None:
        codes = [key, value]
    else:
        *codes, key, value = (rows[0].transpose(0, 1) for rows in _encode(key, value, blocks.kv))
    for rows, new in zip(blocks.stored, codes, strict=True):
        rows[fit.block, :, fit.slot] = new
    blocks.positions[fit.block, :, fit.slot] = fit.slot[:, None].expand(-1, blocks.positions.shape[1])
    if blocks.gains is not None:
        blocks.gains[fit.block, :, fit.slot] = gain_of(value, blocks.gains.dtype)
    blocks.next[fit.ends] = fit.next[:, None].expand(-1, blocks.next.shape[1])
    if fit.keys is not None:
        key, value = _held(blocks, *fit.keys, query.dtype)
    attend_rows = _flash if fit.padded is None else _padded
    output[fit.tokens] = attend_rows(fit, query, key, value, attention.scale)


def _encode(key: Tensor, value: Tensor, kv: KV) -> tuple[Tensor, ...]:
    """key [n, G, D], value [n, G, V] -> codes, scales and what they stand for, [1, G, n, ...] each."""
    return kernels.encode(key.transpose(0, 1)[None], value.transpose(0, 1)[None], kv)


def _held(blocks: Slots, block: Tensor, slot: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """block, slot [K] -> the keys [K, G, D] and values [K, G, V] there, as numbers."""
    keys, values = blocks.keys[block, :, slot], blocks.values[block, :, slot]
    if blocks.kv is None or blocks.scales is None:
        return keys, values
    return decode(keys, values, blocks.scales[block, :, slot], blocks.kv, dtype)


def _flash(fit: Fit, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query [n, H, D], key [K, G, D], value [K, G, V] -> [n, H, V]: rows of any length in one call."""
    output = torch.ops.aten._flash_attention_forward(
        query, key, value, fit.query_starts, fit.key_starts, *fit.longest, 0.0, True, False, scale=scale
    )[0]
    return cast("Tensor", output)


def _padded(fit: Fit, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The same with rows padded to the longest."""
    assert fit.padded is not None
    queries, columns, mask, outputs = fit.padded
    q, k, v = (tensor[index].transpose(1, 2) for tensor, index in ((query, queries), (key, columns), (value, columns)))
    grouped = q.shape[1] != k.shape[1]
    mixed = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
    return mixed.transpose(1, 2).flatten(0, 1)[outputs]


def _read_segment(
    blocks: Slots,
    segment: Segment,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    output: Tensor,
    chunk: int,
) -> None:
    """One read of all its rows: slots are gathered from the blocks, and scattered back after it."""
    slots = _gather(blocks, segment)
    if segment.least < blocks.positions.shape[2] - 1 or attention.window is not None:
        zero_empty(slots)  # empty slots, also between others
    q, k, v = (segment.rows_of(tensor).transpose(1, 2) for tensor in (query, key, value))
    mixed = read(slots, q, k, v, policy, attention, segment.real, chunk)
    segment.put(output, mixed.transpose(1, 2))
    _put_back(blocks, segment, slots)


def _put_back(blocks: Slots, segment: Segment, slots: Slots) -> None:
    """The opposite of `_gather`."""
    for name, tensor in slots.tensors().items():
        getattr(blocks, name).index_copy_(0, segment.blocks, tensor)


def _gather(blocks: Slots, segment: Segment) -> Slots:
    """The slots of a segment's rows."""
    rows: dict[str, Any] = {name: tensor[segment.blocks] for name, tensor in blocks.tensors().items()}
    count = blocks.positions.shape[2]
    slots = replace(blocks, **rows | {"seen": segment.seen.clone()}, fed=0 if segment.fresh else count)
    if segment.begins:
        empty_new(slots)
    return slots
