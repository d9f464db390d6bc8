"""`step` in Triton: the same arguments and results as `kernels/torch/step.py`, in two launches without the host.

The victim is needed only by the next token: inside a `DecisionStream` it is chosen on a stream of its own while the
model goes on. The kernels are in `attend_kernel.py` and `finish_kernel.py`; here are their grids and the memory
between them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.attention import Attention
from ...core.slots import Slots, decides_by_age
from ...policy import KV, Policy
from ..torch import step as torch_step
from .attend_kernel import attend
from .finish_kernel import UNLIMITED, finish
from .formats import layout
from .scan import split_momentum

# Elements of [slots, head size] that a program works on at a time, its warps, and the programs per SM up to which the
# slots of a head are split.
_GROUPED = (8192, 2, 4)  # several query heads read the same slots
_FEW = (8192, 4, 2)  # one query head each, and few of them: as much in flight as one program can have
_MANY = (1024, 1, 1)  # one each, and many: one warp, which waits for no other, so that some read while others compute
_ENOUGH = 8  # heads per SM that are many
_MOST_SPLITS = 64  # of one head, which one program combines
_MOST_HEADS_ASIDE = 2048  # up to here a decision stream costs the model's matmuls less than it saves
_STAGES = 2  # tiles in flight, of grouped heads
# Slots of fewer bits, with many heads, those that several query heads read, or few: slots in a tile, warps, tiles in
# flight, and again the programs per SM.
_MANY_CODES: dict[KV, tuple[int, int, int, int]] = {"int8": (32, 1, 3, 1), "k8v4": (64, 1, 3, 1)}
_GROUPED_CODES: dict[KV, tuple[int, int, int, int]] = {"int8": (32, 2, 3, 1), "k8v4": (32, 1, 3, 1)}
_FEW_CODES, _ENOUGH_CODES = (64, 2, 2, 2), 4
_MOST_SLOTS = 2**15 + 1  # that one program can choose among


def step(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels/torch/step.py`. Nothing waits for the device, and a CUDA graph can hold it."""
    if _left_to_torch(slots, query):
        output = torch_step.step(slots, query, key, value, policy, attention)
        return output if out is None else out.copy_(output)
    _check(slots)
    launch = _Launch(slots, query, key, value, policy, attention)
    launch.attend()
    if launch.aside is None:
        launch.finish(launch.units, launch.splits)
    else:
        with launch.aside.deciding():
            launch.finish(launch.units, 0)
        if launch.splits:
            launch.finish(0, launch.splits)
    return launch.output if out is None else out.copy_(launch.output)


def _left_to_torch(slots: Slots, query: Tensor) -> bool:
    """What no kernel here is written for: very many slots, float64 on a GPU, codes of values that are not in pairs."""
    odd = slots.kv is not None and (slots.values.shape[3] % 2 or slots.values.stride(0) % 2)
    return bool(odd) or slots.positions.shape[2] > _MOST_SLOTS or (query.is_cuda and query.dtype == torch.float64)


class _Launch:
    """The arguments that both kernels share, worked out once."""

    def __init__(
        self, slots: Slots, query: Tensor, key: Tensor, value: Tensor, policy: Policy, attention: Attention
    ) -> None:
        self.slots, self.policy, self.attention = slots, policy, attention
        self.new = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value)]
        self.seen = slots.seen.contiguous()
        self.rows = self.seen if slots.rows is None else slots.rows.contiguous()
        (batch, heads, _), (units, self.count) = query.shape, slots.positions.shape[1:]
        scored = not decides_by_age(policy, attention.window)
        self.cut = _cut(batch, heads, tuple(slots.keys.shape[1:]), value.shape[2], slots.kv, query.device)
        splits = self.cut["SPLITS"]
        stream = _decision_stream.get()
        self.aside = stream if stream is not None and scored and batch * heads <= _MOST_HEADS_ASIDE else None
        self.notes = (_notes if self.aside is None else self.aside.take)(query, self.count, splits, scored)
        self.output, self.parts = _output(query, value, splits)
        self.scales = slots.keys if slots.scales is None else slots.scales
        self.units, self.splits, self.members = batch * units, batch * heads if splits > 1 else 0, heads // units
        self.flags = {"SCORED": scored, "WINDOW": attention.window is not None, "SPLITS": splits, "UNITS": units}
        self.flags |= {"INDEXED": slots.rows is not None, "GAINS": scored and slots.gains is not None}

    @property
    def gains(self) -> Tensor:
        return self.notes.tops if self.slots.gains is None else self.slots.gains

    def attend(self) -> None:
        slots, attention = self.slots, self.attention
        attend[(len(self.new[0]) * slots.keys.shape[1], self.cut["SPLITS"])](
            *(*self.new, slots.keys, slots.values, self.scales, slots.positions, self.gains, slots.next, self.seen),
            *(self.seen if attention.sinks is None else attention.sinks, self.rows, *self.notes, self.parts),
            *(stride for tensor in self.new for stride in tensor.stride()[:2]),
            *(tensor.stride(0) for tensor in (slots.keys, slots.values, self.scales)),
            *(tensor.stride(0) for tensor in (slots.positions, self.gains, slots.next)),
            *(len(slots.keys), self.notes.logits.shape[2], self.count, self.cut["per"], attention.window or 0),
            SCALE=float(attention.scale),
            SOFTCAP=float(attention.softcap or 0),
            SINKS=attention.sinks is not None,
            ACC=tl.float64 if self.notes.tops.dtype == torch.float64 else tl.float32,
            DIGITS=4 if self.new[0].dtype.itemsize < 8 else 8,
            WEIGHT_DIGITS=self.new[0].dtype.itemsize,
            PTX=self.seen.is_cuda,
            **self.flags,
            **self.cut["attend"],
        )

    def finish(self, deciding: int, combining: int) -> None:
        """`deciding` programs choose a unit's victim each, `combining` ones put a head's splits together."""
        slots, policy = self.slots, self.policy
        scores = slots.positions if slots.scores is None else slots.scores
        capacity = UNLIMITED.value if policy.capacity is None else policy.capacity
        finish[(deciding + combining,)](
            *(*self.notes, self.parts, self.output, slots.positions, scores, self.gains, slots.next, self.seen),
            *(self.rows, *(tensor.stride(0) for tensor in (slots.positions, scores, self.gains, slots.next))),
            *(len(slots.keys), deciding, self.notes.logits.shape[2], self.count, capacity, policy.first, policy.last),
            *(self.attention.window or 0, *split_momentum(policy.momentum)),
            MEMORY=slots.scores is not None,
            MEMBERS=self.members,
            GROUP=self.cut["attend"]["GROUP"],
            V=self.cut["attend"]["V"],
            VP=self.cut["attend"]["VP"],
            SHARES=triton.next_power_of_2(self.cut["SPLITS"]),
            **self.flags,
            **_tile(self.members, self.count),
        )


class Notes(NamedTuple):
    """What `attend` leaves for `finish` to decide by."""

    logits: Tensor  # [B, H, S and some], so that every row begins where it can be read by fours
    tops: Tensor  # [B, H, shares], the highest logit of each share
    masses: Tensor  # [B, H, shares], the sum of its exponentials


def _notes(query: Tensor, slots: int, splits: int, scored: bool) -> Notes:
    (batch, heads, _), wide = query.shape, torch.promote_types(query.dtype, torch.float32)
    logits = torch.empty(batch, heads, triton.cdiv(slots, 16) * 16 if scored else 0, dtype=wide, device=query.device)
    return Notes(logits, *torch.empty(2, batch, heads, splits, dtype=wide, device=query.device))


def _output(query: Tensor, value: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """[B, H, V], and its shares [B, H, shares, V], which are the output itself where there is one."""
    shape, width = query.shape[:2], value.shape[2]
    output = torch.empty(*shape, width, dtype=value.dtype, device=query.device)
    if splits == 1:
        return output, output
    wide = torch.promote_types(query.dtype, torch.float32)
    return output, torch.empty(*shape, splits, width, dtype=wide, device=query.device)


class DecisionStream:
    """Inside this context victims are chosen on a stream beside the model's; when it ends, all are chosen.

    Two layers' notes are used in turn: before a layer writes its own, the decision that read them must be over.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.notes: dict[tuple[object, ...], Notes] = {}
        self.done: list[torch.cuda.Event | None] = [None, None]
        self.turn = 0

    def __enter__(self) -> None:
        self.done = [None, None]  # events of another graph mean nothing in this one
        self._outside = _decision_stream.set(self)

    def __exit__(self, *_: object) -> None:
        _decision_stream.reset(self._outside)
        self._wait(0)
        self._wait(1)

    def _wait(self, turn: int) -> None:
        done = self.done[turn]
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    def take(self, query: Tensor, slots: int, splits: int, scored: bool) -> Notes:
        """The next turn's."""
        self.turn = 1 - self.turn
        self._wait(self.turn)
        key = (self.turn, query.shape, slots, splits, scored, query.dtype)
        if key not in self.notes:
            self.notes[key] = _notes(query, slots, splits, scored)
        return self.notes[key]

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """What is launched here runs beside the rest, after what was launched before."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        self.done[self.turn] = self.stream.record_event()


_decision_stream: ContextVar[DecisionStream | None] = ContextVar("decision stream", default=None)


def _check(slots: Slots) -> None:
    """Anything may lie between the rows of a batch, but nothing between the parts of one."""
    if not all(tensor[0].is_contiguous() for name, tensor in slots.tensors().items() if name != "seen"):
        raise ValueError("slots are changed in place: each row's tensors must be contiguous, give whole buffers")


@cache
def _cut(
    batch: int, heads: int, shape: tuple[int, int, int], width: int, kv: KV | None, device: torch.device
) -> dict[str, Any]:
    """Tiles and splits of the slots; shape is [G, S, D] of the keys."""
    stored, slots, size = shape
    group = heads // stored
    deep, wide = (max(16 if kv is None else 32, triton.next_power_of_2(n)) for n in (size, width))
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    load = batch * stored / sms
    block, warps, stages, programs = (
        _tile_of_codes(kv, group, load, max(deep, wide)) if kv else _tile_of_rows(group, load, max(deep, wide))
    )
    blocks = triton.cdiv(slots - 1, block)
    per = triton.cdiv(blocks, max(1, min(_MOST_SPLITS, sms * programs // (batch * stored))))
    sizes = {"STORED": stored, "GROUP": group, "D": size, "V": width, "DP": deep, "VP": wide, "BLOCK": block}
    rows = triton.next_power_of_2(group)
    sizes |= {"ROWS": rows if kv or group == 1 else max(16, rows), "num_warps": warps, "STAGES": stages}
    sizes |= {"EVEN": (slots - 1) % block == 0 and deep == size and wide == width}
    sizes |= layout(kv, width)
    return {"SPLITS": max(1, triton.cdiv(blocks, max(1, per))), "per": per, "attend": sizes}


def _tile_of_rows(group: int, load: float, size: int) -> tuple[int, int, int, int]:
    """Slots in a tile of plain rows of `size` numbers, warps, tiles in flight, programs per SM; load: heads per SM."""
    tile, warps, programs = _GROUPED if group > 1 else _MANY if load >= _ENOUGH else _FEW
    block = max(8 if group == 1 else 16, min(128, tile // size))
    warps *= max(1, block * size // tile) if group == 1 else 1  # no more for each than it has registers for
    return block, warps, _STAGES, programs


def _tile_of_codes(kv: KV, group: int, load: float, size: int) -> tuple[int, int, int, int]:
    many = _GROUPED_CODES if group > 1 else _MANY_CODES
    block, warps, stages, programs = many[kv] if load >= _ENOUGH_CODES else _FEW_CODES
    return block, warps * max(1, size // 128), stages, programs


@cache
def _tile(members: int, slots: int) -> dict[str, int]:
    """The tile of [heads, columns] that `_mean` works on."""
    wide = max(16, triton.next_power_of_2(slots - 1))
    most = triton.next_power_of_2(members)
    warps = max(4, min(8 if wide <= 2048 else 16 if wide <= 8192 else 32, most * wide // 1024))
    return {"WIDE": wide, "SOME": max(1, min(most, warps * 1024 // wide)), "num_warps": warps}
