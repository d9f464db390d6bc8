"""The third kernel of `step` in Triton, for policies with a residual: `blend` adds what left to it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "slots"])
def blend(
    victims, keys, values, scales, residual, states, decays, keys_b, values_b, scales_b, residual_b, count, slots,
    STORED: tl.constexpr, UNITS: tl.constexpr, INDEXED: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, KV: tl.constexpr, NS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr,
):  # fmt: skip
    """Program (row, stored head): the mean key and value, and the number of tokens in them.

    `victims` [B, UNITS]: the slot that each unit has just emptied, -1 where none; it still holds the token.
    """
    program = tl.program_id(0).to(tl.int64)
    b, e = program // STORED, program % STORED
    home = b
    if INDEXED:
        home = tl.load(states + b)
    victim = tl.load(victims + b * UNITS + e // (STORED // UNITS)).to(tl.int64)
    real = (victim >= 0) & (home >= 0) & (home < count)
    victim, home = tl.where(real, victim, 0), tl.where(real, home, 0)
    keys += home * keys_b + (e * slots + victim) * D
    values += home * values_b + (e * slots + victim) * (V // 2 if KV == 4 else V)
    scales += home * scales_b + (e * slots + victim) * NS
    residual += home * residual_b + e * (D + V + 1)
    d, v = tl.arange(0, DP), tl.arange(0, VP)
    mean_key = tl.load(residual + d, mask=d < D, other=0.0)
    mean_value = tl.load(residual + D + v, mask=v < V, other=0.0)
    number = tl.load(decays + 1) * tl.load(residual + D + V) + 1
    key = tl.load(keys + d, mask=d < D, other=0).to(mean_key.dtype)
    if KV > 0:
        key *= tl.load(scales).to(key.dtype)
    if KV == 4:  # a byte holds a number of each half of the row
        half, within = v // (GH * GS), v % (GH * GS)
        byte = tl.load(values + within, mask=v < V, other=0).to(tl.int32)
        at = scales + 1 + half * GH + within // GS
        scale, lowest = tl.load(at, mask=v < V, other=0.0), tl.load(at + 2 * GH, mask=v < V, other=0.0)
        value = ((byte >> (4 * half)) & 15).to(key.dtype) * scale.to(key.dtype) + lowest.to(key.dtype)
    else:
        value = tl.load(values + v, mask=v < V, other=0).to(key.dtype)
        if KV == 8:
            value *= tl.load(scales + 1).to(key.dtype)
    tl.debug_barrier()  # all have read
    tl.store(residual + d, mean_key + (key - mean_key) / number, mask=(d < D) & real)
    tl.store(residual + D + v, mean_value + (value - mean_value) / number, mask=(v < V) & real)
    tl.store(residual + D + V, number, mask=real)
