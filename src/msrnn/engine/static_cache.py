"""A `past_key_values` at fixed addresses: as many rows as a batch has, written in place, fit for a CUDA graph.

Made from a bounded cache that has read a token, whose states tell every layer's shape. A row that reads nothing has
`seen` at -1; a state that was read elsewhere is loaded into it. Nothing here waits for the device during a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from ..core.attention import Attention
from ..core.slots import State
from ..hf.cache import BoundedCache, BoundedLayer, BoundIgnored, Unsupported
from ..kernels.step import step
from ..policy import Policy

Reading = Literal["flash", "masked", "exact", "step"]
_normal = torch.inference_mode(False)  # buffers outlive a caller's inference mode


class StaticLayer(BoundedLayer):
    """One layer's states for every row of the batch."""

    @_normal
    def __init__(self, like: State, policy: Policy, seen: Tensor) -> None:
        super().__init__(policy, "recurrent", 1)
        batch, stored = len(seen), like.keys.shape[1]
        self.seen, self.is_initialized = seen, True
        self.keys = like.keys.new_zeros(batch, *like.keys.shape[1:])
        self.values = like.values.new_zeros(batch, *like.values.shape[1:])
        self.positions = like.positions.new_full((batch, *like.positions.shape[1:]), -1)
        self.scores = None if like.scores is None else like.scores.new_zeros(batch, *like.scores.shape[1:])
        self.slot = like.positions.new_zeros(batch, like.positions.shape[1])
        self.stored = stored

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        key, value = self._take(query)
        state = (self.keys, self.values, self.positions, self.scores, self.slot, self.seen)
        return step(query[:, :, 0], key, value, *state, self.policy, attention)[:, :, None]

    def _take(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """The pending key and value, [B, E, D] and [B, E, V]."""
        key, value = self.pending, self.values_pending
        if key is None or value is None or query.shape[2] != 1 or len(query) != len(self.seen):
            raise BoundIgnored(f"a static cache takes one token of each of its {len(self.seen)} rows at a time")
        self.pending = self.values_pending = None
        share = self.stored // key.shape[1]  # above 1 where every query head decides alone, with rows of its own
        key, value = key[:, :, 0], value[:, :, 0]
        return (key, value) if share == 1 else (key.repeat_interleave(share, 1), value.repeat_interleave(share, 1))

    def load(self, rows: Tensor, state: State) -> None:
        """Row rows[i] of the batch becomes row i of a state that was read elsewhere."""
        self.keys.index_copy_(0, rows, state.keys)
        self.values.index_copy_(0, rows, state.values)
        self.positions.index_copy_(0, rows, state.positions)
        self.slot.index_copy_(0, rows, (state.positions < 0).to(torch.uint8).argmax(-1))
        if self.scores is not None and state.scores is not None:
            self.scores.index_copy_(0, rows, state.scores)

    @property
    def nbytes(self) -> int:
        held = (self.keys, self.values, self.positions, self.scores, self.slot)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def get_seq_length(self) -> int:
        return 0  # every row is elsewhere; positions are given with the tokens

    @property
    def batch_size(self) -> int:
        return len(self.seen)


class FullLayer(StaticLayer):
    """A layer that keeps everything: token p is in slot p, and attention reads no more than a row has.

    `reading` says how: `flash`, PyTorch's flash attention told each row's length; `masked`, its SDPA; `exact`, its SDPA
    over all slots without a mask, right only while every row fills them (for benchmarks); `step`, our own kernel.
    """

    @_normal
    def __init__(self, like: State, policy: Policy, seen: Tensor, place: Tensor, length: int, reading: Reading) -> None:
        BoundedLayer.__init__(self, policy, "recurrent", 1)
        batch, self.stored = len(seen), like.keys.shape[1]
        self.seen, self.place, self.is_initialized, self.reading = seen, place, True, reading
        self.keys, self.values = (_rows(rows, batch, length, reading == "flash") for rows in (like.keys, like.values))
        count = torch.arange(max(batch, self.stored) + 1, device=seen.device)
        self.row, self.head = count[:batch, None], count[None, : self.stored]
        self.positions, self.scores = torch.arange(length, device=seen.device).expand(batch, 1, -1), None
        self.slot = torch.zeros(batch, 1, dtype=torch.int64, device=seen.device)
        self.queries = count[: batch + 1].to(torch.int32)
        self.starts = length * self.queries

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        key, value = self._take(query)
        self.keys[self.row, self.head, self.place[:, None]] = key
        self.values[self.row, self.head, self.place[:, None]] = value
        if not attention.plain:
            return self._step(query, attention, key, value)
        if self.reading == "flash":
            return self._flash(query, attention)
        if self.reading == "step":
            return self._step(query, attention, key, value)
        mask = None if self.reading == "exact" else (self.positions <= self.place[:, None, None])[:, :, None]
        grouped = self.stored != query.shape[1]
        scale = attention.scale
        return scaled_dot_product_attention(query, self.keys, self.values, mask, scale=scale, enable_gqa=grouped)

    def _flash(self, query: Tensor, attention: Attention) -> Tensor:
        keys, values = (rows.transpose(1, 2).flatten(0, 1) for rows in (self.keys, self.values))
        output = torch.ops.aten._flash_attention_forward(
            query[:, :, 0].contiguous(), keys, values, self.queries, self.starts, 1, self.keys.shape[2],
            0.0, False, False, scale=attention.scale, seqused_k=(self.place + 1).to(torch.int32),
        )[0]  # fmt: skip
        return cast("Tensor", output)[:, :, None]

    def _step(self, query: Tensor, attention: Attention, key: Tensor, value: Tensor) -> Tensor:
        """Our own kernel, which takes what attention there is: soft caps and sinks too."""
        positions = torch.where(self.positions < self.place[:, None, None], self.positions, -1)
        state = (self.keys.contiguous(), self.values.contiguous(), positions, None, self.place[:, None].clone())
        return step(query[:, :, 0], key, value, *state, self.seen, self.policy, attention)[:, :, None]

    def load(self, rows: Tensor, state: State) -> None:
        for index, row in enumerate(rows.tolist()):
            real = state.positions[index, 0] >= 0
            at = state.positions[index, 0, real]
            self.keys[row][:, at] = state.keys[index][:, real]
            self.values[row][:, at] = state.values[index][:, real]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.keys, self.values))


def _rows(like: Tensor, batch: int, length: int, flash: bool) -> Tensor:
    """[B, E, S, D] of zeros; for flash attention a token's heads lie beside each other."""
    stored, size = like.shape[1], like.shape[3]
    if flash:
        return like.new_zeros(batch, length, stored, size).transpose(1, 2)
    return like.new_zeros(batch, stored, length, size)


class StaticCache(BoundedCache):
    """`seen` [B]: tokens read by each row, -1 where a row is idle; whoever steps counts it on."""

    @_normal
    def __init__(self, like: BoundedCache, batch: int, length: int | None, reading: Reading | None = None) -> None:
        """`like` has read at least a token. `length` is the room for layers that keep everything."""
        self.model, self.plan, self.prompt, self.config = like.model, like.plan, like.prompt, like.config
        bounded = list(like.bounded)
        if len(bounded) != len(like.layers):
            raise Unsupported("this model has layers without keys and values; run it with model.generate(...)")
        states = [layer.state for layer in bounded if layer.state is not None]
        self.seen = torch.full((batch,), -1, dtype=torch.int64, device=states[0].seen.device)
        self.place, self.length = torch.zeros_like(self.seen), length
        reading = reading or _fastest(states[0])
        layers = [
            _layer(state, layer.policy, self.seen, self.place, length, reading)
            for state, layer in zip(states, bounded, strict=True)
        ]
        Cache.__init__(self, layers=layers)

    def begin(self) -> None:
        """Before each step: where layers that keep everything put the newcomers; an idle row's place stays as it is."""
        if self.length is not None:
            self.place.copy_(torch.where(self.seen >= 0, self.seen.clamp(max=self.length - 1), self.place))

    @contextmanager
    def idle(self) -> Iterator[None]:
        """All rows idle for a while. What a step writes meanwhile goes where the next token will be written over it."""
        self.begin()
        seen = self.seen.clone()
        self.seen.fill_(-1)
        yield
        self.seen.copy_(seen)

    @property
    def static(self) -> Iterator[StaticLayer]:
        return (layer for layer in self.layers if isinstance(layer, StaticLayer))

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.static)

    def load(self, rows: Tensor, cache: BoundedCache) -> None:
        """Row rows[i] becomes row i of a cache that has read a prompt."""
        for mine, theirs in zip(self.static, cache.bounded, strict=True):
            assert theirs.state is not None
            mine.load(rows, theirs.state)
        self.seen.index_copy_(0, rows, next(cache.bounded).state.seen.to(self.seen.device))  # type: ignore[union-attr]


def _layer(
    state: State, policy: Policy, seen: Tensor, place: Tensor, length: int | None, reading: Reading
) -> StaticLayer:
    if state.limit is not None:
        return StaticLayer(state, policy, seen)
    if length is None:
        raise ValueError(f"{policy} keeps every token, so its room must be known: give length=N")
    return FullLayer(state, policy, seen, place, length, reading)


def _fastest(state: State) -> Reading:
    """How to read a full cache, where rows differ in length."""
    size = state.keys.shape[3]
    half = state.keys.is_cuda and state.keys.dtype.itemsize == 2
    return "flash" if half and size == state.values.shape[3] and size <= 256 and size % 8 == 0 else "masked"
