"""`step` in Triton: the same arguments and results as `eager_step.step`, in two launches without the host.

Who leaves is of no use before the next token: where a caller says so (`Side`), it is decided on a stream of its own
while the model goes on. The kernels are in `gpu_step_kernels`; here is how the work is cut, and the memory between.
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
from ...core.slots import decides_by_age
from ...policy import Policy
from ..torch import step as eager_step
from .scan import halves
from .step_kernel import NOBODY, attend, finish

# Elements of [slots, head size] that a program works on at a time, its warps, and the programs per processor up to
# which a head's slots are shared out.
_GROUPED = (8192, 2, 4)  # several query heads read the same slots
_FEW = (8192, 4, 2)  # one query head each, and few of them: as much as can be under way in one program
_MANY = (1024, 1, 1)  # one each, and many: one warp, which waits for no other, so that some read while others compute
_ENOUGH = 8  # heads per processor that are many
_MOST = 64  # shares of one head, which are put together by one program
_BESIDE = 2048  # heads up to which deciding beside the model costs its matmuls less than it saves
_STAGES = 2  # tiles under way at once, of grouped heads
_WIDEST = 2**15 + 1  # slots that one program can choose among


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scores: Tensor | None,
    slot: Tensor,
    seen: Tensor,
    policy: Policy,
    attention: Attention,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `eager_step.step`. Nothing waits for the device, and a CUDA graph can hold it."""
    if positions.shape[2] > _WIDEST or (query.is_cuda and query.dtype == torch.float64):
        state = (keys, values, positions, scores, slot, seen)
        return eager_step.step(query, key, value, *state, policy, attention, rows, out)
    _check(keys, values, positions, scores, slot)
    seen, rows = seen.contiguous(), None if rows is None else rows.contiguous()
    memory = positions if scores is None else scores
    (batch, heads, _), (units, slots) = query.shape, positions.shape[1:]
    scored = not decides_by_age(policy, attention.window)
    cut = _cut(batch, heads, tuple(keys.shape[1:]), values.shape[3], query.device)
    side = _side.get() if scored and batch * heads <= _BESIDE else None
    notes = (_notes if side is None else side.take)(query, slots, cut["SPLITS"], scored)
    output, parts = _output(query, values, cut["SPLITS"])
    new = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value)]
    how = {"SCORED": scored, "WINDOW": attention.window is not None, "SPLITS": cut["SPLITS"], "UNITS": units}
    how["INDEXED"] = rows is not None
    attend[(batch * keys.shape[1], cut["SPLITS"])](
        *(*new, keys, values, positions, slot, seen, seen if attention.sinks is None else attention.sinks),
        *(seen if rows is None else rows, *notes, parts),
        *(stride for tensor in new for stride in tensor.stride()[:2]),
        *(tensor.stride(0) for tensor in (keys, values, positions, slot)),
        *(notes.logits.shape[2], slots, cut["per"], attention.window or 0),
        SCALE=float(attention.scale),
        SOFTCAP=float(attention.softcap or 0),
        SINKS=attention.sinks is not None,
        ACC=tl.float64 if notes.tops.dtype == torch.float64 else tl.float32,
        **how,
        **cut["attend"],
    )

    def conclude(deciding: int, combining: int) -> None:
        finish[(deciding + combining,)](
            *(*notes, parts, output),
            *(positions, memory, slot, seen, seen if rows is None else rows),
            *(positions.stride(0), memory.stride(0), slot.stride(0)),
            *(deciding, notes.logits.shape[2], slots, NOBODY.value if policy.capacity is None else policy.capacity),
            *(policy.first, policy.last, attention.window or 0, *halves(policy.momentum)),
            MEMORY=scores is not None,
            MEMBERS=heads // units,
            V=values.shape[3],
            VP=cut["attend"]["VP"],
            SHARES=triton.next_power_of_2(cut["SPLITS"]),
            **how,
            **_tile(heads // units, slots),
        )

    deciding, combining = batch * units, batch * heads if cut["SPLITS"] > 1 else 0
    if side is None:
        conclude(deciding, combining)
    else:
        with side.deciding():
            conclude(deciding, 0)
        if combining:
            conclude(0, combining)
    return output if out is None else out.copy_(output)


class Notes(NamedTuple):
    """What `attend` leaves for `finish` to decide by."""

    logits: Tensor  # [B, H, S and some], so that every row begins where it can be read by fours
    tops: Tensor  # [B, H, shares], the highest logit of each share
    masses: Tensor  # [B, H, shares], the sum of its exponentials


def _notes(query: Tensor, slots: int, splits: int, scored: bool) -> Notes:
    (batch, heads, _), wide = query.shape, torch.promote_types(query.dtype, torch.float32)
    logits = torch.empty(batch, heads, triton.cdiv(slots, 16) * 16 if scored else 0, dtype=wide, device=query.device)
    return Notes(logits, *torch.empty(2, batch, heads, splits, dtype=wide, device=query.device))


def _output(query: Tensor, values: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """[B, H, V], and its shares [B, H, shares, V], which are the output itself where there is one."""
    shape, width = query.shape[:2], values.shape[3]
    output = torch.empty(*shape, width, dtype=values.dtype, device=query.device)
    if splits == 1:
        return output, output
    wide = torch.promote_types(query.dtype, torch.float32)
    return output, torch.empty(*shape, splits, width, dtype=wide, device=query.device)


class Side:
    """Within this context victims are chosen on a stream beside the model's; at its end all are chosen.

    Notes of two layers in turn: before a layer writes its own, whoever had them before must have decided.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.notes: dict[tuple[object, ...], Notes] = {}
        self.done: list[torch.cuda.Event | None] = [None, None]
        self.turn = 0

    def __enter__(self) -> None:
        self.done = [None, None]  # events of another graph mean nothing in this one
        self._outside = _side.set(self)

    def __exit__(self, *_: object) -> None:
        _side.reset(self._outside)
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


_side: ContextVar[Side | None] = ContextVar("where victims are chosen", default=None)


def _check(*state: Tensor | None) -> None:
    """Anything may lie between the states of a batch, but nothing between the parts of one."""
    if not all(tensor is None or tensor[0].is_contiguous() for tensor in state):
        raise ValueError("a state's tensors are changed in place: each must be contiguous, give whole buffers")


@cache
def _cut(batch: int, heads: int, shape: tuple[int, int, int], width: int, device: torch.device) -> dict[str, Any]:
    """How the slots are cut: shape is [E, S, D] of the keys."""
    stored, slots, size = shape
    group = heads // stored
    deep, wide = (max(16, triton.next_power_of_2(n)) for n in (size, width))
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    many = batch * stored >= _ENOUGH * processors
    tile, warps, programs = _GROUPED if group > 1 else _MANY if many else _FEW
    block = max(8 if group == 1 else 16, min(128, tile // max(deep, wide)))
    warps *= max(1, block * max(deep, wide) // tile) if group == 1 else 1  # no more for each than it has registers for
    blocks = triton.cdiv(slots - 1, block)
    per = triton.cdiv(blocks, max(1, min(_MOST, processors * programs // (batch * stored))))
    sizes = {"STORED": stored, "GROUP": group, "D": size, "V": width, "DP": deep, "VP": wide, "BLOCK": block}
    sizes |= {"ROWS": 1 if group == 1 else max(16, triton.next_power_of_2(group)), "num_warps": warps}
    sizes |= {"STAGES": _STAGES, "EVEN": (slots - 1) % block == 0 and deep == size and wide == width}
    return {"SPLITS": max(1, triton.cdiv(blocks, max(1, per))), "per": per, "attend": sizes}


@cache
def _tile(members: int, slots: int) -> dict[str, int]:
    """The tile of [heads, columns] that `_mean` works on."""
    wide = max(16, triton.next_power_of_2(slots - 1))
    most = triton.next_power_of_2(members)
    warps = max(4, min(8 if wide <= 2048 else 16 if wide <= 8192 else 32, most * wide // 1024))
    return {"WIDE": wide, "SOME": max(1, min(most, warps * 1024 // wide)), "num_warps": warps}
