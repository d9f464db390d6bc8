"""The rows of a batch with several new tokens: which indices they need, worked out once for all layers alike.

Rows whose tokens all fit into their slots need ordinary causal attention: one `Fit` holds many of them. What comes
beyond is read in chunks, a `Segment` at a time: rows that have as many chunks left. All indices come from numbers that
the host has and go to the device in one copy, so no layer waits for it. Nothing here imports vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.recurrence import CHUNK

_BYTES = 2 << 30  # logits of a chunk and copies of slots, all rows together, that a read may take about
_HELD_BYTES = 256 << 20  # earlier keys and values that one call of attention may gather: less than a large read takes
_GRAPH_BYTES = 512 << 20  # the same in a CUDA graph: every number of rows holds memory of its own
TAILS = (64, 256)  # lengths of a chunk on a GPU: every length is compiled on its own
GRAPHS = tuple(TAILS[-1] << power for power in range(6))  # tokens of a row that a CUDA graph reads
ROWS = (1, 2, 4, 8, 16)  # rows that a CUDA graph reads; fewer leave some of them idle


class Row(NamedTuple):
    """Some new tokens of one request: where they begin in the batch, how many, and how many came before."""

    number: int  # of the request in the batch
    start: int
    size: int
    seen: int


class Sizes(NamedTuple):
    """What a layer's reads depend on: `room` is the capacity, 0 where even tokens that fit go through chunks."""

    room: int
    slots: int
    heads: int
    slot_bytes: int
    varlen: bool  # one attention call for rows of any length
    gpu: bool

    def rows_at_once(self, size: int) -> int:
        """How many rows with a chunk of `size` tokens are read together."""
        return max(1, _BYTES // self._row_bytes(size))

    def shared(self, rows: int) -> Sizes:
        """What the plan of a batch with so many rows depends on: on slots only where memory limits the rows at once."""
        most, chunk = (min(rows, ROWS[-1]), TAILS[-1]) if self.gpu else (rows, CHUNK)
        limited = self.rows_at_once(chunk) < most or self.keys_at_once() < rows * self.room
        return self if limited else self._replace(slots=0, heads=0, slot_bytes=0)

    def keys_at_once(self) -> int:
        """How many keys an attention call for rows that fit may gather; those of padded rows are copied once more."""
        return _HELD_BYTES // (max(1, self.slot_bytes) * (1 if self.varlen else 2))

    def graph_rows(self) -> int:
        """How many rows a CUDA graph may read: a chunk of larger ones keeps the GPU busy without."""
        return max(1, _GRAPH_BYTES // self._row_bytes(TAILS[-1]))

    def _row_bytes(self, size: int) -> int:
        return 4 * self.heads * size * (self.slots + size) + 2 * (self.slots + size) * self.slot_bytes


@dataclass(frozen=True)
class Fit:
    """Rows that fit into their slots. tokens [n] or a slice: their places in the batch; block, slot [n]: where they go.

    begins: blocks that must be empty; ends, next [R]: each row's block and the slot after its last token. Row r's
    queries begin at query_starts[r], its keys at key_starts[r]. keys: block and slot [K] of every key, where there are
    earlier ones. padded, where rows are padded for attention: queries [R, T], keys [R, N], a mask [R, 1, T, N] or None,
    and the padded queries [n] that are real.
    """

    tokens: Tensor | slice
    block: Tensor
    slot: Tensor
    begins: Tensor | None
    ends: Tensor
    next: Tensor
    query_starts: Tensor
    key_starts: Tensor
    longest: tuple[int, int]
    keys: tuple[Tensor, Tensor] | None
    padded: tuple[Tensor, Tensor, Tensor | None, Tensor] | None


@dataclass(frozen=True)
class Segment:
    """Rows read together. blocks, seen [B]; tokens, real [B, T]: places in the batch, and whether there is a token.

    The output of padded token padded[i] belongs to places[i] of the batch.
    `spaced`: the first token's place and the distance from row to row, where it is the same and nothing is padded.
    `begins`: whether blocks must be emptied first. `fresh`: whether all slots are empty, as no row has read anything.
    `least`: the fewest tokens that a row has read.
    """

    blocks: Tensor
    seen: Tensor
    tokens: Tensor
    real: Tensor | None
    padded: Tensor
    places: Tensor
    spaced: tuple[int, int] | None
    begins: bool
    fresh: bool
    least: int

    def rows_of(self, tensor: Tensor) -> Tensor:
        """tensor [tokens, ...] of the batch -> [B, T, ...], as a view where rows are spaced."""
        return tensor[self.tokens] if self.spaced is None else self._view(tensor)

    def put(self, tensor: Tensor, rows: Tensor) -> None:
        """rows [B, T, ...] go to their tokens' places in tensor [tokens, ...]."""
        if self.spaced is None:
            tensor.index_copy_(0, self.places, rows.flatten(0, 1)[self.padded])
        else:
            self._view(tensor).copy_(rows)

    def _view(self, tensor: Tensor) -> Tensor:
        assert self.spaced is not None
        (first, distance), (by_token, *others) = self.spaced, tensor.stride()
        begin = tensor.storage_offset() + first * by_token
        return tensor.as_strided(
            (*self.tokens.shape, *tensor.shape[1:]), (distance * by_token, by_token, *others), begin
        )


@dataclass(frozen=True)
class Reads:
    fits: list[Fit]
    segments: list[Segment]
    chunk: int


def plan(blocks: Tensor, rows: list[Row], sizes: Sizes) -> Reads:
    """blocks [R] of all requests of a batch, on the device; rows: those with tokens to read, on the host."""
    chunk = TAILS[-1] if sizes.gpu else CHUNK
    fitting, rest = _split(rows, sizes.room)
    copy = _Copy(blocks.device)
    groups = [part for group in _alike(fitting, sizes.varlen) for part in _within(group, sizes)]
    fits = [_fit(group, copy, sizes.varlen) for group in groups]
    segments = [_segment(part, copy, sizes) for part in _segments(rest, chunk, sizes)]
    tensors = copy.send()
    return Reads(
        [_make_fit(fit, tensors, blocks) for fit in fits],
        [_make_segment(segment, tensors, blocks) for segment in segments],
        chunk,
    )


def _split(rows: list[Row], room: int) -> tuple[list[Row], list[Row]]:
    """The tokens of each row that fit into its slots, and those that come after."""
    fitting, rest = [], []
    for row in rows:
        size = min(row.size, max(0, room - row.seen))
        if size:
            fitting.append(row._replace(size=size))
        if size < row.size:
            rest.append(Row(row.number, row.start + size, row.size - size, row.seen + size))
    return fitting, rest


def _alike(rows: list[Row], varlen: bool) -> list[list[Row]]:
    """Groups of rows for one attention call: all, or those whose padding at most doubles the work."""
    if varlen:
        return [rows] if rows else []
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (row.seen > 0, -row.size)):
        first = groups[-1][0] if groups else None
        if first is None or (first.seen > 0) != (row.seen > 0) or 2 * row.size < first.size:
            groups.append([])
        groups[-1].append(row)
    return groups


def _within(rows: list[Row], sizes: Sizes) -> list[list[Row]]:
    """Rows for one attention call in parts that gather at most so many keys, or those of one row."""
    if not any(row.seen for row in rows):
        return [rows]
    parts: list[list[Row]] = [[]]
    most, total, longest = sizes.keys_at_once(), 0, 0
    for row in rows:
        keys = row.seen + row.size
        total, longest = total + keys, max(longest, keys)
        if parts[-1] and (total if sizes.varlen else (len(parts[-1]) + 1) * longest) > most:
            parts.append([])
            total = longest = keys
        parts[-1].append(row)
    return parts


def _segments(rows: list[Row], chunk: int, sizes: Sizes) -> list[list[Row]]:
    """Rows of at most so many at once, cut where one of them has no chunk left; in the order they must be read."""
    rows = sorted(rows, key=lambda row: -row.size)
    segments = []
    while rows:
        count = sizes.rows_at_once(min(chunk, _width(rows[0].size, sizes.gpu)))
        count = min(count, ROWS[-1]) if sizes.gpu else count
        some, rows = rows[:count], rows[count:]
        ends = _ends(some, chunk, sizes.gpu)
        for start, end in pairwise([0, *ends]):
            parts = (_part(row, start, end) for row in some if row.size > start)
            segments.append(list(parts))
    return segments


def _ends(rows: list[Row], chunk: int, gpu: bool) -> list[int]:
    """Where parts of rows that are read together end: where one of them has no chunk left.

    On a GPU also where one of them has no whole chunk left, and so that a part has as many as a CUDA graph.
    """
    ends = {-(-row.size // chunk) * chunk for row in rows}
    if not gpu:
        return sorted(ends)
    ends |= {row.size // chunk * chunk for row in rows}
    parts = [0]
    for end in sorted(ends - {0}):
        while parts[-1] < end:
            parts.append(parts[-1] + max(width for width in GRAPHS if width <= end - parts[-1]))
    return parts[1:]


def graph_shapes(tokens: int, kinds: int = 1) -> list[tuple[int, int]]:
    """Rows and tokens of the reads that CUDA graphs are captured for, in batches of so many tokens.

    `kinds`: of layers, or KV heads, with graphs of their own. All together have no more rows than one kind alone, or
    one row each: every row takes memory from the states, and every graph time at the start.
    """
    most = max(1, sum(ROWS) // kinds)
    rows = [count for count, total in zip(ROWS, accumulate(ROWS), strict=True) if total <= most]
    return [(count, width) for count in rows for width in (TAILS[0], *GRAPHS) if count * width <= tokens]


def _part(row: Row, start: int, end: int) -> Row:
    return Row(row.number, row.start + start, min(row.size, end) - start, row.seen + start)


class _Copy:
    """Arrays of numbers that go to the device in one copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arrays: list[Any] = []

    def add(self, arrays: dict[str, Any]) -> dict[str, int]:
        """Names of arrays -> where `send` returns them."""
        numbers = {name: len(self.arrays) + number for number, name in enumerate(arrays)}
        self.arrays.extend(np.asarray(array, dtype=np.int64).ravel() for array in arrays.values())
        return numbers

    def send(self) -> list[Tensor]:
        flat = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *self.arrays]))
        flat = flat.pin_memory() if self.device.type == "cuda" else flat
        return list(torch.split(flat.to(self.device, non_blocking=True), [len(array) for array in self.arrays]))


def _ranges(starts: Any, sizes: Any) -> Any:
    """start, start + 1, ... for each of the sizes, one after the other."""
    return np.arange(sizes.sum()) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)


def _columns(rows: list[Row]) -> tuple[Any, ...]:
    """number, start, size and seen of all rows."""
    return tuple(np.array(rows, dtype=np.int64).T)


class _FitArrays(NamedTuple):
    requests: int
    arrays: dict[str, int]
    longest: tuple[int, int]
    whole: slice | None


def _fit(rows: list[Row], copy: _Copy, varlen: bool) -> _FitArrays:
    number, start, size, seen = _columns(rows)
    total, tokens = seen + size, _ranges(start, size)
    begin, end = int(tokens[0]), int(tokens[-1]) + 1
    arrays = {
        "tokens": tokens,
        "request": np.repeat(number, size),
        "slot": _ranges(seen, size),
        "ends": number,
        "next": total,
        "begins": number[seen == 0],
        "query_starts": [0, *np.cumsum(size)],
        "key_starts": [0, *np.cumsum(total)],
    }
    if seen.any():
        arrays |= {"key_request": np.repeat(number, total), "key_slot": _ranges(0 * total, total)}
    longest = int(size.max()), int(total.max())
    if not varlen:
        arrays |= _padded(size, seen, longest)
    whole = slice(begin, end) if end - begin == len(tokens) and (np.diff(tokens) == 1).all() else None
    return _FitArrays(len(rows), copy.add(arrays), longest, whole)


def _padded(size: Any, seen: Any, longest: tuple[int, int]) -> dict[str, Any]:
    """Padding repeats a row's last token: finite, and never looked at."""
    queries, columns = (np.arange(length) for length in longest)
    total, row = seen + size, np.arange(len(size))
    return {
        "queries": (np.cumsum(size) - size)[:, None] + np.minimum(queries, size[:, None] - 1),
        "columns": (np.cumsum(total) - total)[:, None] + np.minimum(columns, total[:, None] - 1),
        "before": seen,
        "outputs": _ranges(row * longest[0], size),
    }


def _make_fit(fit: _FitArrays, tensors: list[Tensor], blocks: Tensor) -> Fit:
    part = {name: tensors[number] for name, number in fit.arrays.items()}
    keys = (blocks[part["key_request"]], part["key_slot"]) if "key_slot" in part else None
    padded = None
    if "queries" in part:
        queries, columns = fit.longest
        mask = None
        if keys is not None:
            last = part["before"][:, None] + torch.arange(queries, device=blocks.device)
            mask = (torch.arange(columns, device=blocks.device) <= last[:, :, None])[:, None]
        shapes = part["queries"].view(fit.requests, queries), part["columns"].view(fit.requests, columns)
        padded = (*shapes, mask, part["outputs"])
    return Fit(
        tokens=part["tokens"] if fit.whole is None else fit.whole,
        block=blocks[part["request"]],
        slot=part["slot"],
        begins=blocks[part["begins"]] if len(part["begins"]) else None,
        ends=blocks[part["ends"]],
        next=part["next"],
        query_starts=part["query_starts"].to(torch.int32),
        key_starts=part["key_starts"].to(torch.int32),
        longest=fit.longest,
        keys=keys,
        padded=padded,
    )


class _SegmentArrays(NamedTuple):
    shape: tuple[int, int]
    arrays: dict[str, int]
    ragged: bool
    spaced: tuple[int, int] | None
    begins: bool
    fresh: bool
    least: int


def _segment(rows: list[Row], copy: _Copy, sizes: Sizes) -> _SegmentArrays:
    number, start, size, seen = _columns(rows)
    width = _width(int(size.max()), sizes.gpu)
    arrays = {
        "requests": number,
        "seen": seen,
        "tokens": start[:, None] + np.minimum(np.arange(width), size[:, None] - 1),
        "sizes": size,
        "padded": _ranges(np.arange(len(rows)) * width, size),
        "places": _ranges(start, size),
    }
    return _SegmentArrays(
        shape=(len(rows), width),
        arrays=copy.add(arrays),
        ragged=bool((size < width).any()),
        spaced=_spaced(start, size, width),
        begins=bool((seen == 0).any()),
        fresh=not sizes.gpu and not seen.any(),
        least=int(seen.min()),
    )


def _spaced(start: Any, size: Any, width: int) -> tuple[int, int] | None:
    """The first row's start and the distance to the next, where it is the same for all and nothing is padded."""
    distances = np.diff(start)
    if (size < width).any() or (len(distances) and ((distances != distances[0]).any() or distances[0] < 0)):
        return None
    return int(start[0]), int(distances[0]) if len(distances) else 0


def _width(size: int, gpu: bool) -> int:
    """What a row is padded to: on a GPU whole chunks and a tail of one of the compiled lengths."""
    if not gpu:
        return size
    whole, tail = divmod(size, TAILS[-1])
    return whole * TAILS[-1] + (next(length for length in TAILS if tail <= length) if tail else 0)


def _make_segment(segment: _SegmentArrays, tensors: list[Tensor], blocks: Tensor) -> Segment:
    part = {name: tensors[number] for name, number in segment.arrays.items()}
    real = torch.arange(segment.shape[1], device=blocks.device) < part["sizes"][:, None] if segment.ragged else None
    return Segment(
        blocks=blocks[part["requests"]],
        seen=part["seen"],
        tokens=part["tokens"].view(segment.shape),
        real=real,
        padded=part["padded"],
        places=part["places"],
        spaced=segment.spaced,
        begins=segment.begins,
        fresh=segment.fresh,
        least=segment.least,
    )
