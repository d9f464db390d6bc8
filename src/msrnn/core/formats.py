"""Slot formats: how a key or a value is stored in fewer bits. Part of the definition, in plain PyTorch.

A token is encoded once, when it arrives, keys after RoPE. From then on every path sees the decoded numbers, so the
recurrence is as exact as with plain slots and does not depend on chunks.

Int8: symmetric, one scale per token and head. Int4: groups of up to 32 numbers, each with a scale and its lowest
number. Scales are float16; PyTorch rounds float64 to it through float32, and so do the kernels.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..policy import KV

_GROUP = 32  # numbers that share a scale in 4 bits, at most
_LEAST = 2.0**-24  # the smallest float16: no scale is 0


def group_size(size: int) -> int:
    """How many numbers of a row of `size` share a 4-bit scale; no group lies in both halves of a row."""
    return gcd(size // 2, _GROUP)


def check_sizes(kv: KV | None, value_size: int) -> None:
    """Refuse a head size that the format cannot hold."""
    if kv == "k8v4" and value_size % 4:
        raise ValueError(f"kv=k8v4 needs values whose size is a multiple of 4, and it is {value_size}; use kv=int8")


def code_sizes(kv: KV | None, key_size: int, value_size: int) -> tuple[int, int]:
    """Numbers that a slot stores of a key and of a value."""
    return key_size, value_size // 2 if kv == "k8v4" else value_size


def scale_count(kv: KV, value_size: int) -> int:
    """Float16 numbers of one slot and head: the key's scale, then the value's."""
    return 1 + (1 if kv == "int8" else 2 * (value_size // group_size(value_size)))


def slot_bytes(kv: KV | None, key_size: int, value_size: int, dtype: torch.dtype) -> int:
    """Bytes of one key and value in a slot of one head."""
    if kv is None:
        return (key_size + value_size) * dtype.itemsize
    return sum(code_sizes(kv, key_size, value_size)) + 2 * scale_count(kv, value_size)


def encode(key: Tensor, value: Tensor, kv: KV) -> tuple[Tensor, Tensor, Tensor]:
    """key [..., D], value [..., V] -> codes of both, and their scales [..., n] in float16."""
    key_codes, key_scale = encode8(key)
    value_codes, value_scales = encode8(value) if kv == "int8" else _encode4(value)
    return key_codes, value_codes, torch.cat([key_scale, value_scales], -1)


def decode(key_codes: Tensor, value_codes: Tensor, scales: Tensor, kv: KV, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The key [..., D] and value [..., V] that codes and scales stand for."""
    accumulation = torch.promote_types(dtype, torch.float32)
    scales = scales.to(accumulation)
    key = key_codes.to(accumulation) * scales[..., :1]
    value = value_codes.to(accumulation) * scales[..., 1:] if kv == "int8" else _decode4(value_codes, scales[..., 1:])
    return key.to(dtype), value.to(dtype)


def encode8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> int8 [..., D] and one float16 scale [..., 1]."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    scale = _divide(wide.abs().amax(-1, keepdim=True), 127).clamp(min=_LEAST).to(torch.float16)
    return _round(wide / scale.to(wide.dtype), -127, 127).to(torch.int8), scale


def _encode4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] -> uint8 [..., V / 2] and, for each group, scales then lowest numbers [..., 2 V / group].

    Byte j holds number j in its low half and number j + V / 2 in its high half.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    size = group_size(rows.shape[-1])
    grouped = wide.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)
    lowest = grouped.amin(-1, keepdim=True).to(torch.float16)
    above = grouped - lowest.to(wide.dtype)
    scale = _divide(above.amax(-1, keepdim=True), 15).clamp(min=_LEAST).to(torch.float16)
    codes = _round(above / scale.to(wide.dtype), 0, 15).to(torch.uint8).flatten(-2)
    low, high = codes.chunk(2, -1)
    return low | (high << 4), torch.cat([scale[..., 0], lowest[..., 0]], -1)


def _decode4(codes: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., V / 2], scales [..., 2 V / group] -> [..., V] in the dtype of `scales`."""
    scale, lowest = scales.chunk(2, -1)
    numbers = torch.cat([codes & 15, codes >> 4], -1).to(scales.dtype)
    grouped = numbers.view(*scale.shape, group_size(numbers.shape[-1]))
    return (grouped * scale[..., None] + lowest[..., None]).flatten(-2)


def _divide(numbers: Tensor, by: int) -> Tensor:
    """By a tensor: on a GPU, PyTorch multiplies with the reciprocal of a plain number, which rounds in another way."""
    return numbers / numbers.new_full((), by)


def _round(numbers: Tensor, lowest: int, highest: int) -> Tensor:
    """To the nearest code. NaN becomes 0: its scale is NaN too (or infinite), so it is decoded as NaN."""
    return numbers.nan_to_num(0.0).round_().clamp_(lowest, highest)
