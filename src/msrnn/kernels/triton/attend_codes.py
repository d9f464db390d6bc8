"""Attention over slots of fewer bits, by integer matrix units: a code is multiplied as it is, never converted.

A number that meets codes, of the query or a weight, becomes DIGITS digits of 7 bits, relative to the largest of its
row. Digits are rows of an integer product, which is exact; the sum of its rows, each times the worth of its digit, is
the product to 28 bits, or 56 in float64. Matrix units work on 8 or 16 rows anyway, so digits cost little. Weights of
models in 16 bits have two digits: 14 bits, and the output has 8 or 11.

Keys are the left operand of their product, values the right one of theirs. Values are read two bytes at a time: units
of 16 bits are what the hardware transposes on the way to a product, and the bytes are separated after that.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import NO_TOP, cap, hide, rows_of, tile_columns


@triton.jit
def attend_codes(
    asked, keys, values, scales, positions, logits, mine, spot, now, active, start, per, slots, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr, SCORED: tl.constexpr,
    WINDOW: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr, KV: tl.constexpr, NS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr,
    GP: tl.constexpr, DIGITS: tl.constexpr, WEIGHT_DIGITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """asked [ROWS, DP] -> the highest logits and the masses [ROWS], weighted values [ROWS, halves, P]."""
    PAIRS: tl.constexpr = GH * GS // 2 if KV == 4 else V // 2  # in a row of values
    WIDE: tl.constexpr = GP * GS // 2 if KV == 4 else VP // 2
    spot = spot.to(tl.int32)
    top, whole = tl.full([ROWS], NO_TOP, ACC), tl.zeros([ROWS], ACC)
    mixed = _no_values(ROWS, WIDE, BLOCK, ACC, KV, GP, WEIGHT_DIGITS)
    query, unit = _digits(asked.to(ACC) * SCALE, ACC, DIGITS)
    pairs = values.to(tl.pointer_type(tl.int16), bitcast=True)
    end = min(start + per, tl.cdiv(slots - 1, BLOCK))
    beside = _beside(scales, positions, start, end, spot, slots, BLOCK, KV, NS, GH, GP)
    for block in tl.range(start, end, num_stages=STAGES):
        column, at, inside = tile_columns(block, spot, slots, BLOCK)
        key = rows_of(keys, at, inside, D, DP, EVEN)
        pair = rows_of(pairs, at, inside, PAIRS, WIDE, EVEN)
        born, key_scale, of_values = beside
        beside = _beside(scales, positions, block + 1, end, spot, slots, BLOCK, KV, NS, GH, GP)
        logit = _logits(key, query, unit, ACC, ROWS, DIGITS) * key_scale.to(ACC)[:, None]
        logit = hide(cap(logit, SOFTCAP), born[:, None], now, active, window, WINDOW)
        if SCORED:
            tl.store(logits[None, :] + column[:, None], logit, mask=mine[None, :] & inside[:, None])
        higher = tl.maximum(top, tl.max(logit, 0))
        old, weight = tl.exp(top - higher), tl.exp(logit - higher[None, :])
        whole = whole * old + tl.sum(weight, 0)
        mixed = _mix(mixed, pair, of_values, old, weight, ACC, KV, WEIGHT_DIGITS, PTX)
        top = higher
    return top, whole, _together(mixed, ROWS, KV, GS, GP, WEIGHT_DIGITS)


@triton.jit
def _digits(numbers, ACC: tl.constexpr, DIGITS: tl.constexpr):
    """numbers [R, N] -> digits [R * DIGITS, N] in int8, the highest first, and the worth of the last one [R]."""
    R: tl.constexpr = numbers.shape[0]
    N: tl.constexpr = numbers.shape[1]
    MOST: tl.constexpr = 2.0 ** (7 * DIGITS) - max(1.0, 2.0 ** (7 * DIGITS - 18))  # a rounding cannot add a digit
    top = _highest(tl.reduce(tl.abs(numbers), 1, _highest), 1e-29)
    whole = (numbers * (MOST / top)[:, None] + 0.5).to(tl.int64 if tl.float64 == ACC else tl.int32)
    shift = 7 * (DIGITS - 1 - tl.arange(0, DIGITS))
    digit = ((tl.abs(whole)[:, None, :] >> shift[None, :, None]) & 127).to(tl.int8)
    digit = tl.where((whole < 0)[:, None, :], -digit, digit)
    return tl.reshape(digit, [R * DIGITS, N]), top / MOST


@triton.jit
def _highest(a, b):
    """NaN if one of them is: digits have no NaN, the worth of a digit has."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _logits(key, query, unit, ACC: tl.constexpr, ROWS: tl.constexpr, DIGITS: tl.constexpr):
    """Codes of keys [BLOCK, DP], digits of queries [ROWS * DIGITS, DP] -> [BLOCK, ROWS]; two digits fit an int32."""
    product = tl.dot(key, tl.trans(query), out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(product, [key.shape[0], ROWS, DIGITS // 2, 2]))
    place = tl.exp2((14 * (DIGITS // 2 - 1 - tl.arange(0, DIGITS // 2))).to(ACC))
    return tl.sum((high * 128 + low).to(ACC) * (unit[:, None] * place[None, :])[None, :, :], 2)


@triton.jit
def _beside(
    scales, positions, block, end, spot, slots, BLOCK: tl.constexpr, KV: tl.constexpr, NS: tl.constexpr,
    GH: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """A tile's positions and scales, which are loaded a tile ahead: they are too narrow for asynchronous copies.

    Scales of values: [BLOCK, 1], or scales and lowest numbers of both halves [BLOCK, GP] each.
    """
    _, at, inside = tile_columns(block, spot, slots, BLOCK)
    inside = inside & (block < end)
    born = tl.load(positions + at, mask=inside, other=-1)
    of_keys = tl.load(scales + at * NS, mask=inside, other=0.0)
    g = tl.arange(0, GP)
    theirs, from_ = inside[:, None] & (g < GH)[None, :], scales + at[:, None] * NS + 1 + g[None, :]
    scale = tl.load(from_, mask=theirs, other=0.0)
    if KV == 8:
        return born, of_keys, (scale, scale)
    else:  # noqa: RET505 (Triton goes on after a return inside an if)
        high = tl.load(from_ + GH, mask=theirs, other=0.0)
        low_least = tl.load(from_ + 2 * GH, mask=theirs, other=0.0)
        return born, of_keys, (scale, high, low_least, tl.load(from_ + 3 * GH, mask=theirs, other=0.0))


@triton.jit
def _no_values(
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, KV: tl.constexpr,
    GP: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Weighted codes of even and of odd numbers; of 4 bits those of both halves, then weighted lowest numbers."""
    codes = tl.zeros([ROWS * GP * DIGITS, WIDE], ACC)
    if KV == 8:
        return codes, codes
    else:  # noqa: RET505
        least = tl.zeros([BLOCK, ROWS, GP], ACC)
        return codes, codes, codes, codes, least, least


@triton.jit
def _mix(mixed, pair, scale, old, weight, ACC: tl.constexpr, KV: tl.constexpr, DIGITS: tl.constexpr,
         PTX: tl.constexpr):  # fmt: skip
    """A tile's values with their weights [BLOCK, ROWS]; `old` [ROWS] is what the earlier ones are worth now."""
    if KV == 8:
        even, odd = _bytes(pair, PTX)
        return _add(mixed[0], mixed[1], even, odd, scale[0], old, weight, ACC, DIGITS)
    else:  # noqa: RET505
        low_even, low_odd, high_even, high_odd = _nibbles(pair, PTX)
        low = _add(mixed[0], mixed[1], low_even, low_odd, scale[0], old, weight, ACC, DIGITS)
        high = _add(mixed[2], mixed[3], high_even, high_odd, scale[1], old, weight, ACC, DIGITS)
        past, weight = old[None, :, None], weight[:, :, None]
        low_least = mixed[4] * past + weight * scale[2].to(ACC)[:, None, :]
        high_least = mixed[5] * past + weight * scale[3].to(ACC)[:, None, :]
        return low[0], low[1], high[0], high[1], low_least, high_least


@triton.jit
def _add(even, odd, even_codes, odd_codes, scale, old, weight, ACC: tl.constexpr, DIGITS: tl.constexpr):
    """Codes [BLOCK, WIDE] times weights [BLOCK, ROWS] times scales [BLOCK, groups], onto rows of (head, group, digit).

    Every group's weights meet all columns, since rows are free; `_own_group` leaves out what is not theirs at the end.
    """
    B: tl.constexpr = weight.shape[0]
    R: tl.constexpr = weight.shape[1]
    G: tl.constexpr = scale.shape[1]
    number = tl.reshape(weight[:, :, None] * scale.to(ACC)[:, None, :], [B, R * G])
    digit, unit = _digits(tl.trans(number), ACC, DIGITS)
    place = tl.exp2((7 * (DIGITS - 1 - tl.arange(0, DIGITS))).to(ACC))
    unit = tl.reshape(unit[:, None] * place[None, :], [R * G * DIGITS])[:, None]
    past = tl.reshape(tl.broadcast_to(old[:, None], [R, G * DIGITS]), [R * G * DIGITS])[:, None]
    even = even * past + unit * tl.dot(digit, even_codes, out_dtype=tl.int32).to(ACC)
    odd = odd * past + unit * tl.dot(digit, odd_codes, out_dtype=tl.int32).to(ACC)
    return even, odd


@triton.jit
def _bytes(pair, PTX: tl.constexpr):
    """int16 -> its two bytes; in PTX two instructions separate those of four."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [pair],
            dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:  # noqa: RET505
        return pair.to(tl.int8), (pair >> 8).to(tl.int8)


@triton.jit
def _nibbles(pair, PTX: tl.constexpr):
    """int16 -> the low halves of its two bytes, then the high ones."""
    if PTX:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 even, odd;
                prmt.b32 even, $4, $5, 0x6420;
                prmt.b32 odd, $4, $5, 0x7531;
                and.b32 $0, even, 0x0f0f0f0f;
                and.b32 $1, odd, 0x0f0f0f0f;
                shr.b32 even, even, 4;
                shr.b32 odd, odd, 4;
                and.b32 $2, even, 0x0f0f0f0f;
                and.b32 $3, odd, 0x0f0f0f0f;
            }
            """,
            "=r,=r,=r,=r,r,r", [pair], dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:  # noqa: RET505
        low, high = pair & 0x0F0F, (pair >> 4) & 0x0F0F
        return low.to(tl.int8), (low >> 8).to(tl.int8), high.to(tl.int8), (high >> 8).to(tl.int8)


@triton.jit
def _together(mixed, ROWS: tl.constexpr, KV: tl.constexpr, GS: tl.constexpr, GP: tl.constexpr, DIGITS: tl.constexpr):
    """[ROWS, 1, VP], or the halves of 4-bit values [ROWS, 2, GP * GS]."""
    if KV == 8:
        return _in_turn(mixed[0], mixed[1], ROWS, 1, 1, DIGITS)[:, None, :]
    else:  # noqa: RET505
        low = _in_turn(mixed[0], mixed[1], ROWS, GP, GS, DIGITS) + _over_groups(mixed[4], GS)
        high = _in_turn(mixed[2], mixed[3], ROWS, GP, GS, DIGITS) + _over_groups(mixed[5], GS)
        return tl.permute(tl.join(low, high), [0, 2, 1])


@triton.jit
def _in_turn(even, odd, ROWS: tl.constexpr, GP: tl.constexpr, GS: tl.constexpr, DIGITS: tl.constexpr):
    """Even and odd numbers in turn: [ROWS, 2 * WIDE]."""
    even, odd = _own_group(even, ROWS, GP, GS, DIGITS), _own_group(odd, ROWS, GP, GS, DIGITS)
    return tl.reshape(tl.join(even, odd), [ROWS, 2 * even.shape[1]])


@triton.jit
def _own_group(mixed, ROWS: tl.constexpr, GP: tl.constexpr, GS: tl.constexpr, DIGITS: tl.constexpr):
    """Rows of (head, group, digit) -> [ROWS, WIDE]: the sum of the digits, of each column's own group."""
    W: tl.constexpr = mixed.shape[1]
    total = tl.sum(tl.reshape(mixed, [ROWS, GP, DIGITS, W]), 2)
    if GP > 1:
        own = tl.arange(0, GP)[:, None] == (tl.arange(0, W) // (GS // 2))[None, :]
        total = tl.where(own[None, :, :], total, 0.0)
    return tl.sum(total, 1)


@triton.jit
def _over_groups(least, GS: tl.constexpr):
    """Weighted lowest numbers [BLOCK, R, groups] -> their sums, one for each number: [R, groups * GS]."""
    R: tl.constexpr = least.shape[1]
    G: tl.constexpr = least.shape[2]
    return tl.reshape(tl.broadcast_to(tl.sum(least, 0)[:, :, None], [R, G, GS]), [R, G * GS])
