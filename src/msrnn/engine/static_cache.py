"""A `past_key_values` at fixed addresses: as many rows as a batch has, written in place, fit for a CUDA graph.

Made from a bounded cache that has read a token, which gives every layer's shape. An idle row has `seen` at -1; slots
that were filled elsewhere are loaded into it. Nothing here waits for the device during a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..core import recurrence
from ..core.attention import Attention
from ..core.heads import HeadSlots, LayerSlots, parts_of, step
from ..core.slots import Slots
from ..hf.attention import BoundIgnored
from ..hf.cache import BoundedCache, BoundedLayer
from ..hf.geometry import Unsupported
from ..plan import LayerPolicy
from ..policy import Policy

FullAttention = Literal["flash", "masked", "exact", "step"]
_outside_inference_mode = torch.inference_mode(False)  # buffers outlive a caller's inference mode


class StaticLayer(BoundedLayer):
    """One layer's slots for every row of the batch."""

    slots: LayerSlots

    def __init__(self, policy: LayerPolicy, slots: LayerSlots) -> None:
        super().__init__(policy)
        self.slots, self.is_initialized = slots, True

    @classmethod
    @_outside_inference_mode
    def bounded(cls, policy: LayerPolicy, like: LayerSlots, seen: Tensor) -> StaticLayer:
        """Empty rows with the shape of `like`; all layers share `seen` [B]."""
        rows = tuple(_empty_rows(part, seen) for part in parts_of(like))
        return cls(policy, HeadSlots(rows) if isinstance(like, HeadSlots) else rows[0])

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        key, value = self._take()
        return step(self.slots, query[:, :, 0], key, value, self.policy, attention)[:, :, None]

    def check_tokens(self, query: Tensor) -> None:
        """One token of every row."""
        batch = len(self.slots.seen)
        if self.new_columns != 1 or query.shape[2] != 1 or len(query) != batch:
            raise BoundIgnored(f"a static cache takes one token of each of its {batch} rows at a time")

    def _take(self) -> tuple[Tensor, Tensor]:
        """The pending key and value, [B, G, D] and [B, G, V]."""
        key, value = self.take_pending()
        return key[:, :, 0], value[:, :, 0]

    def load(self, rows: Tensor, slots: LayerSlots) -> None:
        """Row rows[i] of the batch becomes row i of slots that were filled elsewhere."""
        for ours, theirs in zip(parts_of(self.slots), parts_of(slots), strict=True):
            for name, tensor in ours.tensors().items():
                if name != "seen":
                    tensor.index_copy_(0, rows, getattr(theirs, name))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes - part.seen.nbytes for part in parts_of(self.slots))

    def get_seq_length(self) -> int:
        return 0  # every row is elsewhere; positions are given with the tokens

    @property
    def batch_size(self) -> int:
        return len(self.slots.seen)


def _empty_rows(like: Slots, seen: Tensor) -> Slots:
    rows: dict[str, Any] = {
        name: tensor.new_zeros(len(seen), *tensor.shape[1:]) for name, tensor in like.tensors().items()
    }
    rows["positions"].fill_(-1)
    return replace(like, **(rows | {"seen": seen}))


class FullLayer(StaticLayer):
    """A layer that keeps everything: token p is in slot p, and attention reads no more than a row has.

    `backend`: `flash`, PyTorch's flash attention with each row's length; `masked`, its SDPA; `exact`, its SDPA over all
    slots without a mask, right only while every row fills them (for benchmarks); `step`, our own kernel.
    """

    slots: Slots
    policy: Policy

    @_outside_inference_mode
    def __init__(
        self, policy: Policy, like: Slots, seen: Tensor, place: Tensor, length: int, backend: FullAttention
    ) -> None:
        batch, heads, device = len(seen), like.keys.shape[1], seen.device
        keys, values = (_full_rows(rows, batch, length, backend == "flash") for rows in (like.keys, like.values))
        positions = torch.arange(length, device=device).expand(batch, 1, -1)
        unused = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        super().__init__(policy, Slots(keys, values, positions, unused, seen))
        self.place, self.backend = place, backend
        count = torch.arange(max(batch, heads) + 1, device=device)
        self.row, self.head = count[:batch, None], count[None, :heads]
        self.query_starts = count[: batch + 1].to(torch.int32)
        self.key_starts = length * self.query_starts

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        key, value = self.slots.expand(*self._take())
        slots = self.slots
        slots.keys[self.row, self.head, self.place[:, None]] = key
        slots.values[self.row, self.head, self.place[:, None]] = value
        if self.backend == "step" or not attention.plain:
            return self._step(query, attention, key, value)
        if self.backend == "flash":
            return self._flash(query, attention)
        mask = None if self.backend == "exact" else (slots.positions <= self.place[:, None, None])[:, :, None]
        grouped = slots.keys.shape[1] != query.shape[1]
        scale = attention.scale
        return scaled_dot_product_attention(query, slots.keys, slots.values, mask, scale=scale, enable_gqa=grouped)

    def _flash(self, query: Tensor, attention: Attention) -> Tensor:
        keys, values = (rows.transpose(1, 2).flatten(0, 1) for rows in (self.slots.keys, self.slots.values))
        output = torch.ops.aten._flash_attention_forward(
            query[:, :, 0].contiguous(), keys, values, self.query_starts, self.key_starts, 1, self.slots.keys.shape[2],
            0.0, False, False, scale=attention.scale, seqused_k=(self.place + 1).to(torch.int32),
        )[0]  # fmt: skip
        return cast("Tensor", output)[:, :, None]

    def _step(self, query: Tensor, attention: Attention, key: Tensor, value: Tensor) -> Tensor:
        """Our own kernel, which has soft caps and sinks too."""
        slots = self.slots
        positions = torch.where(slots.positions < self.place[:, None, None], slots.positions, -1)
        rows = replace(
            slots,
            keys=slots.keys.contiguous(),
            values=slots.values.contiguous(),
            positions=positions,
            next=self.place[:, None].clone(),
        )
        return recurrence.step(rows, query[:, :, 0], key, value, self.policy, attention)[:, :, None]

    def load(self, rows: Tensor, slots: LayerSlots) -> None:
        assert isinstance(slots, Slots)
        for index, row in enumerate(rows.tolist()):
            real = slots.positions[index, 0] >= 0
            at = slots.positions[index, 0, real]
            self.slots.keys[row][:, at] = slots.keys[index][:, real]
            self.slots.values[row][:, at] = slots.values[index][:, real]

    @property
    def nbytes(self) -> int:
        return self.slots.keys.nbytes + self.slots.values.nbytes


def _full_rows(like: Tensor, batch: int, length: int, flash: bool) -> Tensor:
    """[B, G, S, D] of zeros; for flash attention the heads of a token lie beside each other."""
    heads, size = like.shape[1], like.shape[3]
    if flash:
        return like.new_zeros(batch, length, heads, size).transpose(1, 2)
    return like.new_zeros(batch, heads, length, size)


class StaticCache(BoundedCache):
    """`seen` [B]: tokens read by each row, -1 where a row is idle; whoever steps counts it on."""

    @_outside_inference_mode
    def __init__(
        self, like: BoundedCache, batch: int, length: int | None, backend: FullAttention | None = None
    ) -> None:
        """`like` has read at least a token. `length` is the room for layers that keep everything."""
        bounded = list(like.bounded)
        if len(bounded) != len(like.layers):
            raise Unsupported("this model has layers without keys and values; run it with model.generate(...)")
        slots = [layer.slots for layer in bounded if layer.slots is not None]
        self.seen = torch.full((batch,), -1, dtype=torch.int64, device=slots[0].seen.device)
        self.place, self.length = torch.zeros_like(self.seen), length
        backend = backend or _fastest(parts_of(slots[0])[0])
        layers = [
            _layer(layer.policy, one, self.seen, self.place, length, backend)
            for one, layer in zip(slots, bounded, strict=True)
        ]
        self._set(like.model, like.plan, like.prompt, layers)

    def begin(self) -> None:
        """Before each step: where layers that keep everything put the new tokens; an idle row's place stays."""
        if self.length is not None:
            self.place.copy_(torch.where(self.seen >= 0, self.seen.clamp(max=self.length - 1), self.place))

    @contextmanager
    def idle(self) -> Iterator[None]:
        """All rows idle for a while. What a step writes meanwhile, the next token overwrites."""
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
        for ours, theirs in zip(self.static, cache.bounded, strict=True):
            assert theirs.slots is not None
            ours.load(rows, theirs.slots)
        self.seen.index_copy_(0, rows, next(cache.bounded).slots.seen.to(self.seen.device))  # type: ignore[union-attr]


def _layer(
    policy: LayerPolicy, like: LayerSlots, seen: Tensor, place: Tensor, length: int | None, backend: FullAttention
) -> StaticLayer:
    if isinstance(like, HeadSlots) or not isinstance(policy, Policy) or like.limit is not None:
        return StaticLayer.bounded(policy, like, seen)
    if length is None:
        raise ValueError(f"{policy} keeps every token, so its room must be known: give length=N")
    if policy.kv is not None:
        raise ValueError(f"{policy} is not for batches: give a capacity, or run it with model.generate(...)")
    return FullLayer(policy, like, seen, place, length, backend)


def _fastest(like: Slots) -> FullAttention:
    """The fastest backend for a full cache whose rows differ in length."""
    size = like.keys.shape[3]
    half = like.keys.is_cuda and like.keys.dtype.itemsize == 2
    return "flash" if half and size == like.values.shape[3] and size <= 256 and size % 8 == 0 else "masked"
