"""KV heads with slots of their own in one launch: a table on the device says where each head's slots are.

One line per head, the longest head first: programs begin in that order, so the last ones at work are short. A tensor's
place is its distance from the same tensor of the first head, in elements, and the stride of its rows. A table is made
once for a layer's slots; that copies from the host, so it must happen before a CUDA graph is captured.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.slots import Slots, decides_by_age
from ...policy import Policy
from .tiles import check, fits

HEAD, SLOTS, CAPACITY, FIRST, LAST, MOMENTUM = (tl.constexpr(n) for n in range(6))
KEYS_AT, VALUES_AT, SCALES_AT, POSITIONS_AT, GAINS_AT, SCORES_AT, NEXT_AT = (tl.constexpr(n) for n in range(6, 20, 2))
LINE = tl.constexpr(20)
_TENSORS = ("keys", "values", "scales", "positions", "gains", "scores", "next")  # a distance and a stride of each
_MOST_ALIGNED = 16


class Ragged(NamedTuple):
    """All KV heads of a layer."""

    table: Tensor  # [G, LINE]
    lengths: tuple[int, ...]  # slots of each head
    align: int  # every distance and stride of keys and values is a multiple of so many elements


Tables = dict[object, Any]  # Ragged or None, by the slots' addresses


def ragged_of(slots: Sequence[Slots], policies: Sequence[Policy], window: int | None, tables: Tables) -> Ragged | None:
    """The table of these heads, from `tables` if it was made before; None where one launch cannot take them all."""
    places = tuple(_addresses(one) for one in slots)
    key = (places, tuple(policies), window)
    if key not in tables:
        tables[key] = _table(slots, policies, window, places) if _alike(slots, policies, window) else None
    result: Ragged | None = tables[key]
    return result


def _addresses(slots: Slots) -> tuple[int, ...]:
    """Address and row stride of every tensor, 0 where there is none."""
    tensors = (slots.keys, slots.values, slots.scales, slots.positions, slots.gains, slots.scores, slots.next)
    return tuple(n for rows in tensors for n in ((0, 0) if rows is None else (rows.data_ptr(), rows.stride(0))))


def _alike(slots: Sequence[Slots], policies: Sequence[Policy], window: int | None) -> bool:
    """Whether heads differ in numbers only: one unit each, the same tensors, decisions of the same kind."""
    kinds = {(decides_by_age(policy, window), policy.gain, policy.kv) for policy in policies}
    tensors = ({name: rows for name, rows in one.tensors().items() if name != "seen"} for one in slots)
    shapes = {tuple((name, rows.dtype, len(rows), rows.shape[3:]) for name, rows in one.items()) for one in tensors}
    single = all(one.keys.shape[1] == one.positions.shape[1] == 1 and fits(one) for one in slots)
    return single and len(kinds) == len(shapes) == 1 and all(policy.runs_everywhere for policy in policies)


def _table(
    slots: Sequence[Slots], policies: Sequence[Policy], window: int | None, places: tuple[tuple[int, ...], ...]
) -> Ragged | None:
    """None where a distance is no whole number of elements, or codes that are read in pairs are not in pairs."""
    lines, aligned = [], _MOST_ALIGNED
    for one in slots:
        check(one)
    for head, (one, policy, place) in enumerate(zip(slots, policies, places, strict=True)):
        momentum = struct.unpack("q", struct.pack("d", policy.momentum))[0]
        line = [head, one.positions.shape[2], policy.capacity, policy.first, policy.last, momentum]
        for number, name in enumerate(_TENSORS):
            rows = getattr(one, name)
            distance, stride = place[2 * number] - places[0][2 * number], place[2 * number + 1]
            if rows is not None and distance % rows.itemsize:
                return None
            line += [0 if rows is None else distance // rows.itemsize, stride]
            if name in ("keys", "values"):
                aligned = gcd(aligned, line[-2], stride)
        lines.append(line)
    if slots[0].kv is not None and aligned % 2:
        return None
    lines.sort(key=lambda line: -line[1])
    table = torch.tensor(lines, dtype=torch.int64, device=slots[0].keys.device)
    return Ragged(table, tuple(line[1] for line in lines), aligned)


@triton.jit
def own_rows(rows, line, home, AT: tl.constexpr, ALIGN: tl.constexpr):
    """Where row `home` of a head's tensor begins; rows: that tensor of the first head."""
    distance, stride = tl.load(line + AT), tl.load(line + AT + 1)
    return rows + tl.multiple_of(distance, ALIGN) + home * tl.multiple_of(stride, ALIGN)
