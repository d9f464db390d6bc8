"""`encode` and `decode` in Triton: the same as `kernels/torch/encode.py`, in one pass over keys and one over values."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
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


def encode(key: Tensor, value: Tensor, kv: KV, out: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """See `kernels/torch/encode.py`. Nothing waits for the device, and a CUDA graph can hold it."""
    key_codes, value_codes, scales, new_key, new_value = _results(key, value, kv) if out is None else out
    key, value = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (key, value))
    _launch(key, key_codes, scales, new_key, 0, True)
    if kv == "int8":
        _launch(value, value_codes, scales, new_value, 1, True)
    else:
        _launch4(value, value_codes, scales, new_value, True)
    return key_codes, value_codes, scales, new_key, new_value


def decode(codes: Sequence[Tensor], kv: KV, out: tuple[Tensor, Tensor]) -> None:
    """See `kernels/torch/encode.py`."""
    key_codes, value_codes, scales = codes
    _launch(out[0], key_codes, scales, out[0], 0, False)
    if kv == "int8":
        _launch(out[1], value_codes, scales, out[1], 1, False)
    else:
        _launch4(out[1], value_codes, scales, out[1], False)


def _results(key: Tensor, value: Tensor, kv: KV) -> tuple[Tensor, ...]:
    shape, sizes = key.shape[:3], code_sizes(kv, key.shape[3], value.shape[3])
    kinds = (torch.int8, torch.int8 if kv == "int8" else torch.uint8)
    codes = [torch.empty(*shape, n, dtype=kind, device=key.device) for n, kind in zip(sizes, kinds, strict=True)]
    scales = torch.empty(*shape, scale_count(kv, value.shape[3]), dtype=torch.float16, device=key.device)
    return *codes, scales, key.new_empty(key.shape), value.new_empty(value.shape)


def _launch(rows: Tensor, codes: Tensor, scales: Tensor, out: Tensor, column: int, encoding: bool) -> None:
    """8 bits. `column`: where a row's scale is among its scales."""
    wide = triton.next_power_of_2(rows.shape[3])
    count, tile = rows.shape[:3].numel(), max(1, _ELEMENTS // wide)
    pack8[(triton.cdiv(count, tile),)](
        *(rows, codes, scales, out, count, *rows.shape[1:3], column),
        *(stride for tensor in (rows, codes, scales, out) for stride in tensor.stride()[:3]),
        ACC=accumulation(rows.dtype),
        ENCODE=encoding,
        ROWS=tile,
        D=rows.shape[3],
        DP=wide,
    )


def _launch4(rows: Tensor, codes: Tensor, scales: Tensor, out: Tensor, encoding: bool) -> None:
    form = layout("k8v4", rows.shape[3])
    count, tile = rows.shape[:3].numel(), max(1, _ELEMENTS // (2 * form["GP"] * form["GS"]))
    pack4[(triton.cdiv(count, tile),)](
        *(rows, codes, scales, out, count, *rows.shape[1:3]),
        *(stride for tensor in (rows, codes, scales, out) for stride in tensor.stride()[:3]),
        ACC=accumulation(rows.dtype),
        ENCODE=encoding,
        ROWS=tile,
        **{name: form[name] for name in ("GS", "GH", "GP")},
    )


@_jit
def _offsets(n, heads, tokens, by_batch, by_head, by_token):
    """Where row n of [B, G, T] begins."""
    n = n.to(tl.int64)
    return n // tokens // heads * by_batch + n // tokens % heads * by_head + n % tokens * by_token


@_jit(do_not_specialize=["count", "tokens", "column"])
def pack8(
    rows, codes, scales, out, count, heads, tokens, column,
    rows_b, rows_h, rows_t, codes_b, codes_h, codes_t, scales_b, scales_h, scales_t, out_b, out_h, out_t,
    ACC: tl.constexpr, ENCODE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Some rows in 8 bits, or their codes, and what these stand for."""
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (n < count)[:, None] & (d < D)[None, :]
    codes += _offsets(n, heads, tokens, codes_b, codes_h, codes_t)[:, None] + d[None, :]
    scales += _offsets(n, heads, tokens, scales_b, scales_h, scales_t) + column
    if ENCODE:
        at = _offsets(n, heads, tokens, rows_b, rows_h, rows_t)
        code, scale = encode8(tl.load(rows + at[:, None] + d[None, :], mask=inside, other=0.0).to(ACC), ACC)
        tl.store(codes, code.to(tl.int8), mask=inside)
        tl.store(scales, scale, mask=n < count)
    else:
        code = tl.load(codes, mask=inside, other=0).to(ACC)
        scale = tl.load(scales, mask=n < count, other=0.0)
    at = _offsets(n, heads, tokens, out_b, out_h, out_t)
    tl.store(out + at[:, None] + d[None, :], (code * scale.to(ACC)[:, None]).to(out.dtype.element_ty), mask=inside)


@_jit(do_not_specialize=["count", "tokens"])
def pack4(
    rows, codes, scales, out, count, heads, tokens,
    rows_b, rows_h, rows_t, codes_b, codes_h, codes_t, scales_b, scales_h, scales_t, out_b, out_h, out_t,
    ACC: tl.constexpr, ENCODE: tl.constexpr, ROWS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Some rows in 4 bits, their two halves in one byte each, or these bytes, and what they stand for."""
    n, g, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, GP), tl.arange(0, GS)
    half = g[None, :, None] * GS + i[None, None, :]
    inside, theirs = (n < count)[:, None, None] & (g < GH)[None, :, None], (n < count)[:, None] & (g < GH)[None, :]
    codes += _offsets(n, heads, tokens, codes_b, codes_h, codes_t)[:, None, None] + half
    scales += _offsets(n, heads, tokens, scales_b, scales_h, scales_t)[:, None] + 1 + g[None, :]
    if ENCODE:
        at = rows + _offsets(n, heads, tokens, rows_b, rows_h, rows_t)[:, None, None] + half
        low, low_scale, low_least = encode4(tl.load(at, mask=inside, other=0.0).to(ACC), ACC)
        high, high_scale, high_least = encode4(tl.load(at + GH * GS, mask=inside, other=0.0).to(ACC), ACC)
        tl.store(codes, low.to(tl.uint8) | (high.to(tl.uint8) << 4), mask=inside)
        tl.store(scales, low_scale, mask=theirs)
        tl.store(scales + GH, high_scale, mask=theirs)
        tl.store(scales + 2 * GH, low_least, mask=theirs)
        tl.store(scales + 3 * GH, high_least, mask=theirs)
    else:
        byte = tl.load(codes, mask=inside, other=0).to(tl.int32)
        low, high = (byte & 15).to(ACC), (byte >> 4).to(ACC)
        low_scale, high_scale = tl.load(scales, mask=theirs, other=0.0), tl.load(scales + GH, mask=theirs, other=0.0)
        low_least = tl.load(scales + 2 * GH, mask=theirs, other=0.0)
        high_least = tl.load(scales + 3 * GH, mask=theirs, other=0.0)
    to = out + _offsets(n, heads, tokens, out_b, out_h, out_t)[:, None, None] + half
    low = low * low_scale.to(ACC)[:, :, None] + low_least.to(ACC)[:, :, None]
    high = high * high_scale.to(ACC)[:, :, None] + high_least.to(ACC)[:, :, None]
    tl.store(to, low.to(out.dtype.element_ty), mask=inside)
    tl.store(to + GH * GS, high.to(out.dtype.element_ty), mask=inside)
