"""`step` in Triton: the same arguments and results as `kernels/torch/step.py`, in two launches without the host.

The victim is needed only by the next token: inside a `DecisionStream` it is chosen on a stream of its own while the
model goes on. The kernels are in `attend_kernel.py` and `finish_kernel.py`, the memory between them in `notes.py`;
here are their grids.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.attention import Attention
from ...core.slots import NO_SOFTCAP, Slots, decides_by_age
from ...policy import KV, Policy
from ..torch import step as torch_step
from .attend_kernel import attend
from .blend_kernel import blend
from .finish_kernel import UNLIMITED, finish
from .formats import layout
from .notes import decision_stream, new_notes, new_output
from .ragged import Ragged, Tables, ragged_of
from .scan import split_momentum
from .scan_residual import decays
from .tiles import check, fits

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
_LONGEST = 2  # times the mean of a layer's heads: up to here many heads hide that one of them is longer


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
    if not _takes(query) or not fits(slots):
        output = torch_step.step(slots, query, key, value, policy, attention)
        return output if out is None else out.copy_(output)
    check(slots)
    return _run(_Launch(slots, query, key, value, policy, attention), out)


def step_heads(
    slots: Sequence[Slots],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policies: Sequence[Policy],
    attention: Attention,
    tables: Tables,
    out: Tensor | None = None,
) -> Tensor | None:
    """All KV heads of a layer, each with slots and a policy of its own, in the same two launches.

    None, and nothing done, where heads differ in more than numbers. `tables` keeps what is worked out for these slots.
    """
    ragged = ragged_of(slots, policies, attention.window, tables) if _takes(query) else None
    if ragged is None:
        return None
    return _run(_Launch(slots[0], query, key, value, policies[0], attention, ragged), out)


def _takes(query: Tensor) -> bool:
    """float64 is not for a GPU."""
    return not (query.is_cuda and query.dtype == torch.float64)


def _run(launch: _Launch, out: Tensor | None) -> Tensor:
    launch.attend()
    if launch.aside is None:
        launch.finish(launch.units, launch.splits)
        launch.blend()
    else:
        with launch.aside.deciding():
            launch.finish(launch.units, 0)
        if launch.splits:
            launch.finish(0, launch.splits)
    return launch.output if out is None else out.copy_(launch.output)


class _Launch:
    """The arguments that both kernels share, worked out once.

    Of heads with slots of their own (`ragged`), `slots` and `policy` are those of the first.
    """

    def __init__(
        self,
        slots: Slots,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        policy: Policy,
        attention: Attention,
        ragged: Ragged | None = None,
    ) -> None:
        self.slots, self.policy, self.attention, self.ragged = slots, policy, attention, ragged
        self.new = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value)]
        self.seen = slots.seen.contiguous()
        self.rows = self.seen if slots.rows is None else slots.rows.contiguous()
        batch, heads, _ = query.shape
        lengths = (slots.positions.shape[2],) if ragged is None else ragged.lengths
        self.stored, units = (rows.shape[1] * len(lengths) for rows in (slots.keys, slots.positions))
        self.count = max(lengths)
        scored = not decides_by_age(policy, attention.window)
        sizes = (query.shape[2], value.shape[2])
        self.cut = _cut(batch, heads, self.stored, lengths, sizes, slots.kv, query.device)
        splits = self.cut["SPLITS"]
        stream = decision_stream.get()
        aside = scored and slots.residual is None and batch * heads <= _MOST_HEADS_ASIDE
        self.aside = stream if aside else None
        self.notes = (new_notes if self.aside is None else self.aside.take)(query, self.count, splits, scored)
        self.output, self.parts = new_output(query, value, splits)
        self.scales = slots.keys if slots.scales is None else slots.scales
        self.units, self.splits, self.members = batch * units, batch * heads if splits > 1 else 0, heads // units
        self.flags = {"SCORED": scored, "WINDOW": attention.window is not None, "SPLITS": splits, "UNITS": units}
        self.flags |= {"INDEXED": slots.rows is not None, "GAINS": scored and slots.gains is not None}
        self.table = None if ragged is None else ragged.table
        self.flags |= {"RESIDUAL": slots.residual is not None}
        self.residual = self.notes.tops if slots.residual is None else slots.residual
        self.victims = self.seen  # stands in where nobody asks for them
        if slots.residual is not None:
            if attention.softcap is not None:
                raise ValueError(NO_SOFTCAP)
            self.victims = torch.empty(batch, units, dtype=torch.int32, device=query.device)

    @property
    def gains(self) -> Tensor:
        return self.notes.tops if self.slots.gains is None else self.slots.gains

    def _strides(self, *tensors: Tensor) -> list[int]:
        """Of the rows of a batch; heads with slots of their own have them in their table."""
        return [0 if self.ragged else tensor.stride(0) for tensor in tensors]

    def attend(self) -> None:
        slots, attention = self.slots, self.attention
        attend[(len(self.new[0]) * self.stored, self.cut["SPLITS"])](
            *(*self.new, slots.keys, slots.values, self.scales, slots.positions, self.gains, self.residual, slots.next),
            *(self.seen, self.seen if attention.sinks is None else attention.sinks, self.rows, *self.notes, self.parts),
            *(stride for tensor in self.new for stride in tensor.stride()[:2]),
            *self._strides(
                slots.keys, slots.values, self.scales, slots.positions, self.gains, self.residual, slots.next
            ),
            *(len(slots.keys), self.notes.logits.shape[2], self.count, self.cut["per"], attention.window or 0),
            self.table,
            SCALE=float(attention.scale),
            SOFTCAP=float(attention.softcap or 0),
            SINKS=attention.sinks is not None,
            ACC=tl.float64 if self.notes.tops.dtype == torch.float64 else tl.float32,
            DIGITS=4 if self.new[0].dtype.itemsize < 8 else 8,
            WEIGHT_DIGITS=self.new[0].dtype.itemsize,
            PTX=self.seen.is_cuda,
            ALIGN=1 if self.ragged is None else self.ragged.align,
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
            *(self.rows, self.victims, *self._strides(slots.positions, scores, self.gains, slots.next)),
            *(len(slots.keys), deciding, self.notes.logits.shape[2], self.count, capacity, policy.first, policy.last),
            *(self.attention.window or 0, *split_momentum(policy.momentum), self.table),
            MEMORY=slots.scores is not None,
            MEMBERS=self.members,
            GROUP=self.cut["attend"]["GROUP"],
            V=self.cut["attend"]["V"],
            VP=self.cut["attend"]["VP"],
            SHARES=triton.next_power_of_2(self.cut["SPLITS"]),
            **self.flags,
            **_tile(self.members, self.count),
        )

    def blend(self) -> None:
        """What has just left joins the residual, where there is one."""
        slots, sizes = self.slots, self.cut["attend"]
        if slots.residual is None:
            return
        names = ("STORED", "D", "V", "DP", "VP", "KV", "NS", "GS", "GH")
        blend[(len(self.new[0]) * self.stored,)](
            *(
                self.victims,
                slots.keys,
                slots.values,
                self.scales,
                slots.residual,
                self.rows,
                decays(self.policy, slots.residual),
            ),
            *self._strides(slots.keys, slots.values, self.scales, slots.residual),
            *(len(slots.keys), self.count),
            UNITS=self.flags["UNITS"],
            INDEXED=self.flags["INDEXED"],
            **{name: sizes[name] for name in names},
            num_warps=1,
        )


@cache
def _cut(
    batch: int,
    heads: int,
    stored: int,
    lengths: tuple[int, ...],
    widths: tuple[int, int],
    kv: KV | None,
    device: torch.device,
) -> dict[str, Any]:
    """Tiles and splits of the slots. lengths: slots of all stored heads, or of each; widths: numbers of key, value."""
    (size, width), group = widths, heads // stored
    deep, wide = (max(16 if kv is None else 32, triton.next_power_of_2(n)) for n in (size, width))
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    load = batch * stored / sms
    many = load >= (_ENOUGH_CODES if kv else _ENOUGH)
    block, warps, stages, programs = (
        _tile_of_codes(kv, group, load, max(deep, wide)) if kv else _tile_of_rows(group, load, max(deep, wide))
    )
    per, splits = _shares([triton.cdiv(n - 1, block) for n in lengths], sms * programs // (batch * stored), many)
    sizes = {"STORED": stored, "GROUP": group, "D": size, "V": width, "DP": deep, "VP": wide, "BLOCK": block}
    rows = triton.next_power_of_2(group)
    sizes |= {"ROWS": rows if kv or group == 1 else max(16, rows), "num_warps": warps, "STAGES": stages}
    sizes |= {"EVEN": all((n - 1) % block == 0 for n in lengths) and deep == size and wide == width}
    sizes |= layout(kv, width)
    return {"SPLITS": splits, "per": per, "attend": sizes}


def _shares(blocks: list[int], wanted: int, many: bool) -> tuple[int, int]:
    """Blocks of a share, and as many shares as the longest head needs; wanted: shares of a head of mean length.

    No share is longer than those: it would still be at work when all others are done. Where heads differ, the number of
    shares is a power of 2, so that layers of other lengths need no kernel of their own; shares may be empty.
    """
    longest, mean = max(blocks), triton.cdiv(sum(blocks), len(blocks))
    per = triton.cdiv(mean, max(1, min(_MOST_SPLITS, wanted)))
    if many and longest <= _LONGEST * mean:
        per = longest
    per = max(1, per, triton.cdiv(longest, _MOST_SPLITS))
    splits = max(1, triton.cdiv(longest, per))
    return per, splits if len(blocks) == 1 else triton.next_power_of_2(splits)


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
