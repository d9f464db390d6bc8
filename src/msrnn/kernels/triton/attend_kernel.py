"""The first kernel of `step` in Triton, `attend`; `finish_kernel.py` has the second, and `step.py` launches both.

`attend` reads each held key and value once: a program has one stored head of one sequence, or a share of its slots
where there are few, and all query heads that read it. `finish` takes the mean of the softmaxes over a unit's heads,
which needs every head's normaliser, so it is a launch of its own; so are shares put together (`_combine`).

The newcomer is read from where it comes in, not from its slot, and the last slot stands in for that one: S - 1 columns
are left, a round number, and nobody reads what is being written. Numbers in empty slots must be finite.

Slots of fewer bits (KV: bits of a value, 0 for plain slots) have a loop of their own, `attend_codes.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .attend_codes import attend_codes
from .formats import encode4, encode8
from .ragged import (
    GAINS_AT,
    HEAD,
    KEYS_AT,
    LINE,
    NEXT_AT,
    POSITIONS_AT,
    SCALES_AT,
    SLOTS,
    VALUES_AT,
    own_rows,
)
from .tiles import NO_TOP, cap, hide, place_of, rows_of, tile_columns


@triton.jit(do_not_specialize=["count", "slots", "per", "window"])
def attend(
    query, key, value, keys, values, scales, positions, gains, residual, slot, seen, sinks, states, logits, tops,
    masses, parts, query_b, query_h, key_b, key_h, value_b, value_h, keys_b, values_b, scales_b, positions_b, gains_b,
    residual_b, slot_b, count, pitch, slots, per, window, table,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
    SCORED: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, UNITS: tl.constexpr, INDEXED: tl.constexpr,
    GAINS: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    KV: tl.constexpr, NS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr, GP: tl.constexpr, DIGITS: tl.constexpr,
    WEIGHT_DIGITS: tl.constexpr, PTX: tl.constexpr, ALIGN: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Program (stored head, share): the newcomer is written, and this share of the slots attended to.

    `table`: that of heads with slots of their own (`ragged.py`), or None.
    """
    stored = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    if table is None:
        b, e = stored // STORED, stored % STORED
        unit = e // (STORED // UNITS)
        slot += unit
    else:
        batch = tl.num_programs(0) // STORED
        b, line = stored % batch, table + stored // batch * LINE
        e, slots = tl.load(line + HEAD), tl.load(line + SLOTS).to(tl.int32)
        slot, slot_b = slot + tl.load(line + NEXT_AT), tl.load(line + NEXT_AT + 1)
    home, now, spot, active = place_of(states, seen, slot, slot_b, b, count, slots, INDEXED)
    r, d = tl.arange(0, ROWS), tl.arange(0, DP)
    h = b * (STORED * GROUP) + e * GROUP + r  # over the whole batch
    mine = r < GROUP
    at = query + b * query_b + (e * GROUP + r)[:, None] * query_h + d[None, :]
    asked = tl.load(at, mask=mine[:, None] & (d < D)[None, :], other=0.0)
    if table is None:
        keys += home * keys_b + e * slots * D
        values += home * values_b + e * slots * (V // 2 if KV == 4 else V)
        scales += home * scales_b + e * slots * NS
        positions += home * positions_b + unit * slots
        gains += home * gains_b + e * slots
    else:
        keys, values = own_rows(keys, line, home, KEYS_AT, ALIGN), own_rows(values, line, home, VALUES_AT, ALIGN)
        scales, positions = own_rows(scales, line, home, SCALES_AT, 1), own_rows(positions, line, home, POSITIONS_AT, 1)
        gains = own_rows(gains, line, home, GAINS_AT, 1)
    here = (share == 0) & active  # the first share has the newcomer and the sink
    new_key = tl.load(key + b * key_b + e * key_h + d, mask=d < D, other=0.0).to(ACC)
    new_key = _store_row(keys + spot * D, scales + spot * NS, new_key, d < D, here, KV, ACC)
    new_value = _new_value(
        value + b * value_b + e * value_h, values, scales + spot * NS + 1, spot, here, ACC, V, VP, KV, GS, GH, GP
    )
    if GAINS:
        # a single sum: of sums over 4-bit values, Triton 3.6 sums wrongly where a program has one query head
        square = tl.sum(tl.reshape(new_value * new_value, [new_value.shape[0] * new_value.shape[1]]), 0)
        tl.store(gains + spot, tl.sqrt(square), mask=here)
    new = cap(tl.sum(asked.to(ACC) * new_key[None, :], 1) * SCALE, SOFTCAP)
    new = tl.where(here, new, -float("inf"))
    if SCORED:
        tl.store(logits + h * pitch + slots - 1, new, mask=mine & here)
    if KV > 0:
        top, whole, mixed = attend_codes(
            asked, keys, values, scales, positions, logits + h * pitch, mine, spot, now, active, share * per, per,
            slots, window,
            SCALE, SOFTCAP, ACC, STAGES, SCORED, WINDOW, D, V, DP, VP, BLOCK, ROWS, EVEN, KV, NS, GS, GH, GP, DIGITS,
            WEIGHT_DIGITS, PTX,
        )  # fmt: skip
    elif ROWS == 1:
        top, whole, mixed = _one(
            asked, keys, values, positions, logits + h * pitch, spot, now, active, share * per, per, slots, window,
            SCALE, SOFTCAP, ACC, SCORED, WINDOW, D, V, DP, VP, BLOCK,
        )  # fmt: skip
    else:
        top, whole, mixed = _many(
            asked, keys, values, positions, logits + h * pitch, mine, spot, now, active, share * per, per, slots,
            window,
            SCALE, SOFTCAP, ACC, STAGES, SCORED, WINDOW, D, V, DP, VP, BLOCK, ROWS, EVEN,
        )  # fmt: skip
    sink = tl.full([ROWS], -float("inf"), ACC)
    if SINKS:
        sink = tl.load(sinks + e * GROUP + r, mask=mine & (share == 0), other=-float("inf")).to(ACC)
    at, inside = _halves(V, VP, KV, GS, GH, GP)
    highest = tl.maximum(tl.maximum(top, new), sink)
    if RESIDUAL:  # one key and value more, also in the first share
        residual += home * residual_b + e * (D + V + 1)
        number = tl.load(residual + D + V).to(ACC)
        mean = tl.load(residual + d, mask=d < D, other=0.0).to(ACC)
        blended = tl.sum(asked.to(ACC) * mean[None, :], 1) * SCALE + tl.log(tl.maximum(number, 1.0))
        blended = tl.where(here & (number > 0), blended, -float("inf"))
        highest = tl.maximum(highest, blended)
    old, fresh = tl.exp(top - highest), tl.exp(new - highest)
    whole = whole * old + fresh + tl.exp(sink - highest)
    mixed = mixed * old[:, None, None] + fresh[:, None, None] * new_value[None, :, :]
    if RESIDUAL:
        rest = tl.exp(blended - highest)
        whole += rest
        mixed += rest[:, None, None] * tl.load(residual + D + at, mask=inside, other=0.0).to(ACC)[None, :, :]
    if SPLITS == 1:
        mixed = mixed / tl.where(whole > 0, whole, 1.0)[:, None, None]
    if SCORED or SPLITS > 1:
        tl.store(tops + h * SPLITS + share, highest, mask=mine)
        tl.store(masses + h * SPLITS + share, whole, mask=mine)
    to = parts + (h * SPLITS + share)[:, None, None] * V + at[None, :, :]
    tl.store(to, mixed.to(parts.dtype.element_ty), mask=mine[:, None, None] & inside[None, :, :])


@triton.jit
def _halves(V: tl.constexpr, VP: tl.constexpr, KV: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr,
            GP: tl.constexpr):  # fmt: skip
    """Numbers of a value in the order of the tiles, and which there are: [1, VP], or the two halves [2, GP * GS]."""
    if KV == 4:
        half = tl.arange(0, GP * GS)
        return tl.arange(0, 2)[:, None] * (GH * GS) + half[None, :], (half < GH * GS)[None, :]
    else:  # noqa: RET505 (Triton goes on after a return inside an if)
        v = tl.arange(0, VP)
        return v[None, :], (v < V)[None, :]


@triton.jit
def _store_row(codes, scale, row, inside, here, KV: tl.constexpr, ACC: tl.constexpr):
    """The newcomer's row [P] goes to its slot; what stands there then, in ACC."""
    at = tl.arange(0, row.shape[0])
    if KV == 0:
        tl.store(codes + at, row.to(codes.dtype.element_ty), mask=inside & here)
    else:
        code, factor = encode8(row[None, :], ACC)
        code, factor = tl.sum(code, 0), tl.sum(factor.to(ACC), 0)  # of one row
        tl.store(codes + at, code.to(tl.int8), mask=inside & here)
        tl.store(scale, factor.to(tl.float16), mask=here)
        row = code * factor
    return row


@triton.jit
def _new_value(
    value, values, scales, spot, here, ACC: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, KV: tl.constexpr,
    GS: tl.constexpr, GH: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """The newcomer's value goes to its slot; what stands there then, [1, VP] or [2, GP * GS] in ACC."""
    if KV != 4:
        v = tl.arange(0, VP)
        row = tl.load(value + v, mask=v < V, other=0.0).to(ACC)
        return _store_row(values + spot * V, scales, row, v < V, here, KV, ACC)[None, :]
    else:  # noqa: RET505
        half, g, i = tl.arange(0, 2), tl.arange(0, GP), tl.arange(0, GS)
        inside = (half < 2)[:, None, None] & (g < GH)[None, :, None] & (i < GS)[None, None, :]
        at = half[:, None, None] * (GH * GS) + g[None, :, None] * GS + i[None, None, :]
        code, scale, lowest = encode4(tl.load(value + at, mask=inside, other=0.0).to(ACC), ACC)
        byte = tl.sum(code.to(tl.int32) << (4 * half)[:, None, None], 0).to(tl.uint8)
        tl.store(values + spot * (GH * GS) + g[:, None] * GS + i[None, :], byte, mask=(g < GH)[:, None] & here)
        to, theirs = scales + half[:, None] * GH + g[None, :], ((g < GH)[None, :] & (half < 2)[:, None]) & here
        tl.store(to, scale, mask=theirs)
        tl.store(to + 2 * GH, lowest, mask=theirs)
        number = code * scale.to(ACC)[:, :, None] + lowest.to(ACC)[:, :, None]
        return tl.reshape(tl.where(inside, number, 0.0), [2, GP * GS])


@triton.jit
def _one(
    asked, keys, values, positions, logits, spot, now, active, start, per, slots, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, SCORED: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query head: every row of the tile keeps a softmax of its own, so that nothing is reduced before the end.

    The next tile is loaded before this one is worked on: otherwise the compiler puts its values off until the keys are
    done with, and half as much is under way.
    """
    scaled = asked.to(ACC) * SCALE
    top = tl.full([BLOCK], NO_TOP, ACC)
    whole = tl.zeros([BLOCK], ACC)
    mixed = tl.zeros([BLOCK, VP], ACC)
    end = min(start + per, tl.cdiv(slots - 1, BLOCK))
    key, value, born = _tile_of(keys, values, positions, start, end, spot, slots, D, DP, V, VP, BLOCK)
    for block in range(start, end):
        more = _tile_of(keys, values, positions, block + 1, end, spot, slots, D, DP, V, VP, BLOCK)
        logit = cap(tl.sum(key.to(ACC) * scaled, 1), SOFTCAP)
        logit = hide(logit, born, now, active, window, WINDOW)
        if SCORED:
            column = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(logits[:, None] + column[None, :], logit[None, :], mask=(column < slots - 1)[None, :])
        higher = tl.maximum(top, logit)
        old, weight = tl.exp(top - higher), tl.exp(logit - higher)
        whole = whole * old + weight
        mixed = mixed * old[:, None] + weight[:, None] * value.to(ACC)
        top = higher
        key, value, born = more
    highest = tl.max(top, 0)
    old = tl.exp(top - highest)
    total = tl.sum(whole * old, 0)
    none = tl.full([1], 0, ACC)
    return none + highest, none + total, tl.sum(mixed * old[:, None], 0)[None, None, :]


@triton.jit
def _tile_of(
    keys, values, positions, block, end, spot, slots,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile's keys, values and positions; nothing from `end` on."""
    _, at, inside = tile_columns(block, spot, slots, BLOCK)
    inside = inside & (block < end)
    key, value = rows_of(keys, at, inside, D, DP, False), rows_of(values, at, inside, V, VP, False)
    return key, value, tl.load(positions + at, mask=inside, other=-1)


@triton.jit
def _many(
    asked, keys, values, positions, logits, mine, spot, now, active, start, per, slots, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr, SCORED: tl.constexpr,
    WINDOW: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Several query heads that read the same keys and values, by matrix units."""
    top = tl.full([ROWS], NO_TOP, ACC)
    whole = tl.zeros([ROWS], ACC)
    mixed = tl.zeros([ROWS, VP], ACC)
    end = min(start + per, tl.cdiv(slots - 1, BLOCK))
    for block in tl.range(start, end, num_stages=STAGES):
        column, at, inside = tile_columns(block, spot, slots, BLOCK)
        born = tl.load(positions + at, mask=inside, other=-1)
        key = rows_of(keys, at, inside, D, DP, EVEN).to(asked.dtype)
        value = rows_of(values, at, inside, V, VP, EVEN).to(asked.dtype)
        logit = cap(tl.dot(asked, tl.trans(key), input_precision="ieee", out_dtype=ACC) * SCALE, SOFTCAP)
        logit = hide(logit, born[None, :], now, active, window, WINDOW)
        if SCORED:
            tl.store(logits[:, None] + column[None, :], logit, mask=mine[:, None] & inside[None, :])
        higher = tl.maximum(top, tl.max(logit, 1))
        old, weight = tl.exp(top - higher), tl.exp(logit - higher[:, None])
        whole = whole * old + tl.sum(weight, 1)
        mixed = mixed * old[:, None]
        mixed += tl.dot(weight.to(asked.dtype), value, input_precision="ieee", out_dtype=ACC)
        top = higher
    return top, whole, mixed[:, None, :]
