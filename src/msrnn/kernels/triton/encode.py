"""`encode` in Triton: the same as `kernels/torch/encode.py`, in one pass over keys and one over values."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import code_sizes, scale_count
from ...policy import KV
from .formats import accumulation, encode4, encode8, layout

_jit: Any = triton.jit
_ELEMENTS = 4096  # of a program


def encode(key: Tensor, value: Tensor, kv: KV) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `kernels/torch/encode.py`. Nothing waits for the device, and a CUDA graph can hold it."""
    shape, sizes = key.shape[:3], code_sizes(kv, key.shape[3], value.shape[3])
    key, value = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (key, value))
    form = layout(kv, value.shape[3])
    key_codes = torch.empty(*shape, sizes[0], dtype=torch.int8, device=key.device)
    value_codes = torch.empty(*shape, sizes[1], dtype=torch.int8 if kv == "int8" else torch.uint8, device=key.device)
    scales = torch.empty(*shape, scale_count(kv, value.shape[3]), dtype=torch.float16, device=key.device)
    key_out, value_out = torch.empty_like(key, memory_format=torch.contiguous_format), value.new_empty(value.shape)
    _launch8(key, key_codes, scales, key_out, 0)
    if kv == "int8":
        _launch8(value, value_codes, scales, value_out, 1)
    else:
        width = form["GP"] * form["GS"]
        rows = max(1, _ELEMENTS // (2 * width))
        pack4[(triton.cdiv(scales[..., 0].numel(), rows),)](
            *(value, value_codes, scales, value_out, scales[..., 0].numel(), *shape[1:], *value.stride()[:3]),
            ACC=accumulation(value.dtype),
            ROWS=triton.next_power_of_2(rows),
            **{name: form[name] for name in ("NS", "GS", "GH", "GP")},
        )
    return key_codes, value_codes, scales, key_out, value_out


def _launch8(rows: Tensor, codes: Tensor, scales: Tensor, out: Tensor, column: int) -> None:
    wide = triton.next_power_of_2(rows.shape[3])
    count, tile = codes[..., 0].numel(), max(1, _ELEMENTS // wide)
    pack8[(triton.cdiv(count, tile),)](
        *(rows, codes, scales, out, count, *rows.shape[1:3], *rows.stride()[:3], column),
        ACC=accumulation(rows.dtype),
        ROWS=tile,
        D=rows.shape[3],
        DP=wide,
        NS=scales.shape[3],
    )


@_jit
def _offsets(n, heads, tokens, by_batch, by_head, by_token):
    """Where row n of [B, G, T] begins."""
    n = n.to(tl.int64)
    return n // tokens // heads * by_batch + n // tokens % heads * by_head + n % tokens * by_token


@_jit(do_not_specialize=["count", "tokens"])
def pack8(
    rows, codes, scales, out, count, heads, tokens, by_batch, by_head, by_token, column,
    ACC: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NS: tl.constexpr,
):  # fmt: skip
    """Some rows in 8 bits, and what these stand for."""
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (n < count)[:, None] & (d < D)[None, :]
    at = _offsets(n, heads, tokens, by_batch, by_head, by_token)
    row = tl.load(rows + at[:, None] + d[None, :], mask=inside, other=0.0).to(ACC)
    code, scale = encode8(row, ACC)
    to = n.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(codes + to, code.to(tl.int8), mask=inside)
    tl.store(scales + n.to(tl.int64) * NS + column, scale, mask=n < count)
    tl.store(out + to, (code * scale.to(ACC)[:, None]).to(out.dtype.element_ty), mask=inside)


@_jit(do_not_specialize=["count", "tokens"])
def pack4(
    rows, codes, scales, out, count, heads, tokens, by_batch, by_head, by_token,
    ACC: tl.constexpr, ROWS: tl.constexpr, NS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Some rows in 4 bits, their two halves in one byte each, and what these stand for."""
    n, g, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, GP), tl.arange(0, GS)
    half = g[None, :, None] * GS + i[None, None, :]
    inside = (n < count)[:, None, None] & (g < GH)[None, :, None]
    at = _offsets(n, heads, tokens, by_batch, by_head, by_token)[:, None, None] + half
    low, low_scale, low_least = encode4(tl.load(rows + at, mask=inside, other=0.0).to(ACC), ACC)
    high, high_scale, high_least = encode4(tl.load(rows + at + GH * GS, mask=inside, other=0.0).to(ACC), ACC)
    n = n.to(tl.int64)
    byte = low.to(tl.uint8) | (high.to(tl.uint8) << 4)
    tl.store(codes + n[:, None, None] * (GH * GS) + half, byte, mask=inside)
    to, theirs = scales + n[:, None] * NS + 1 + g[None, :], (n < count)[:, None] & (g < GH)[None, :]
    tl.store(to, low_scale, mask=theirs)
    tl.store(to + GH, high_scale, mask=theirs)
    tl.store(to + 2 * GH, low_least, mask=theirs)
    tl.store(to + 3 * GH, high_least, mask=theirs)
    to = out + n[:, None, None] * (2 * GH * GS) + half
    low = low * low_scale.to(ACC)[:, :, None] + low_least.to(ACC)[:, :, None]
    high = high * high_scale.to(ACC)[:, :, None] + high_least.to(ACC)[:, :, None]
    tl.store(to, low.to(out.dtype.element_ty), mask=inside)
    tl.store(to + GH * GS, high.to(out.dtype.element_ty), mask=inside)
