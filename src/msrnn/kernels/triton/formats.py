"""Slot formats in Triton: what `core/formats.py` says, in registers. Shared by `step` and `encode`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...core.formats import group_size
from ...policy import KV

_jit: Any = triton.jit
_LEAST = tl.constexpr(2.0**-24)  # the smallest float16: no scale is 0


def layout(kv: KV | None, width: int) -> dict[str, int]:
    """Compile-time sizes. KV: bits of a value, 0 for plain slots; NS: scales of a slot; GS, GH: numbers in a group, and
    groups in half a row of `width` numbers; GP: as many, as a power of 2."""
    if kv is None:
        return {"KV": 0, "NS": 1, "GS": 1, "GH": 1, "GP": 1}
    if kv == "int8":
        return {"KV": 8, "NS": 2, "GS": 1, "GH": 1, "GP": 1}
    size = group_size(width)
    half = width // 2 // size
    return {"KV": 4, "NS": 1 + 4 * half, "GS": size, "GH": half, "GP": triton.next_power_of_2(half)}


def accumulation(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


@_jit
def _nearest(x, ACC: tl.constexpr):
    """To the nearest whole number, to even ones between two; NaN becomes 0. For numbers far below the constant."""
    whole = tl.full([1], 1.5, ACC) * (4503599627370496.0 if tl.float64 == ACC else 8388608.0)
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -256.0), 256.0), 0.0)
    return (x + whole) - whole


@_jit
def _half(x):
    """Float16; float64 through float32, as PyTorch rounds it."""
    return x.to(tl.float32).to(tl.float16)


@_jit
def _ratio(x, y, ACC: tl.constexpr):
    """x / y, rounded as the definition's: the fast division of a GPU is not."""
    return x / y if tl.float64 == ACC else tl.div_rn(x, y)


@_jit
def encode8(rows, ACC: tl.constexpr):
    """rows [R, P] in ACC, 0 where there is none -> codes as whole numbers in ACC [R, P], scale [R] in float16."""
    top = tl.max(tl.abs(rows), 1)
    bad = tl.max((rows != rows).to(tl.int32), 1) > 0
    least = tl.full([1], _LEAST, ACC)
    scale = tl.maximum(_ratio(top, tl.full([1], 127.0, ACC), ACC), least)
    scale = _half(tl.where(bad, float("nan"), scale))
    codes = _nearest(_ratio(rows, tl.broadcast_to(scale.to(ACC)[:, None], rows.shape), ACC), ACC)
    return tl.minimum(tl.maximum(codes, -127.0), 127.0), scale


@_jit
def encode4(rows, ACC: tl.constexpr):
    """rows [R, groups, GS] in ACC -> codes as whole numbers in ACC, scale and lowest [R, groups] in float16."""
    bad = tl.max((rows != rows).to(tl.int32), 2) > 0
    lowest = _half(tl.where(bad, float("nan"), tl.min(rows, 2)))
    above = rows - lowest.to(ACC)[:, :, None]
    bad = tl.max((above != above).to(tl.int32), 2) > 0  # also where the lowest is infinite
    top = _ratio(tl.max(above, 2), tl.full([1, 1], 15.0, ACC), ACC)
    scale = _half(tl.where(bad, float("nan"), tl.maximum(top, tl.full([1, 1], _LEAST, ACC))))
    codes = _nearest(_ratio(above, tl.broadcast_to(scale.to(ACC)[:, :, None], rows.shape), ACC), ACC)
    return tl.minimum(tl.maximum(codes, 0.0), 15.0), scale, lowest
