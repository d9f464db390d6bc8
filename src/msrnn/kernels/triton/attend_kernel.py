"""The first kernel of `step` in Triton, `attend`; `finish_kernel.py` has the second, and `step.py` launches both.

`attend` reads each held key and value once: a program has one stored head of one sequence, or a share of its slots
where there are few, and all query heads that read it. `finish` takes the mean of the softmaxes over a unit's heads,
which needs every head's normaliser, so it is a launch of its own; so are shares put together (`_combine`).

The newcomer is read from where it comes in, not from its slot, and the last slot stands in for that one: S - 1 columns
are left, a round number, and nobody reads what is being written. Numbers in empty slots must be finite.

Slots of fewer bits (KV: bits of a value, 0 for plain slots) are decoded in registers: a key's scale is a factor of its
logit, an 8-bit value's one of its weight. 4-bit values are two tiles, [slots, groups, GS] each: the halves of a row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .formats import encode4, encode8

NO_TOP = tl.constexpr(-1.0e30)  # the top of nothing: finite, so that a difference of two is a number


@triton.jit(do_not_specialize=["count", "slots", "per", "window"])
def attend(
    query, key, value, keys, values, scales, positions, gains, slot, seen, sinks, states, logits, tops, masses, parts,
    query_b, query_h, key_b, key_h, value_b, value_h, keys_b, values_b, scales_b, positions_b, gains_b, slot_b, count,
    pitch, slots, per, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
    SCORED: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, UNITS: tl.constexpr, INDEXED: tl.constexpr,
    GAINS: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    KV: tl.constexpr, NS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program (stored head, share): the newcomer is written, and this share of the slots attended to."""
    stored = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    b, e = stored // STORED, stored % STORED
    unit = e // (STORED // UNITS)
    home, now, spot, active = place_of(states, seen, slot + unit, slot_b, b, count, slots, INDEXED)
    r, d = tl.arange(0, ROWS), tl.arange(0, DP)
    h = b * (STORED * GROUP) + e * GROUP + r  # over the whole batch
    mine = r < GROUP
    at = query + b * query_b + (e * GROUP + r)[:, None] * query_h + d[None, :]
    asked = tl.load(at, mask=mine[:, None] & (d < D)[None, :], other=0.0)
    keys += home * keys_b + e * slots * D
    values += home * values_b + e * slots * (V // 2 if KV == 4 else V)
    scales += home * scales_b + e * slots * NS
    positions += home * positions_b + unit * slots
    here = (share == 0) & active  # the first share has the newcomer and the sink
    new_key = tl.load(key + b * key_b + e * key_h + d, mask=d < D, other=0.0).to(ACC)
    new_key = _store_row(keys + spot * D, scales + spot * NS, new_key, d < D, here, KV, ACC)
    new_value = _new_value(
        value + b * value_b + e * value_h, values, scales + spot * NS + 1, spot, here, ACC, V, VP, KV, GS, GH, GP
    )
    if GAINS:
        square = tl.sum(tl.sum(new_value * new_value, 1), 0)
        tl.store(gains + home * gains_b + e * slots + spot, tl.sqrt(square), mask=here)
    new = _cap(tl.sum(asked.to(ACC) * new_key[None, :], 1) * SCALE, SOFTCAP)
    new = tl.where(here, new, -float("inf"))
    if SCORED:
        tl.store(logits + h * pitch + slots - 1, new, mask=mine & here)
    if ROWS == 1:
        top, whole, mixed = _one(
            asked, keys, values, scales, positions, logits + h * pitch, spot, now, active, share * per, per, slots,
            window,
            SCALE, SOFTCAP, ACC, SCORED, WINDOW, D, V, DP, VP, BLOCK, KV, NS, GS, GH, GP,
        )  # fmt: skip
    else:
        top, whole, mixed = _many(
            asked, keys, values, scales, positions, logits + h * pitch, mine, spot, now, active, share * per, per,
            slots, window,
            SCALE, SOFTCAP, ACC, STAGES, SCORED, WINDOW, D, V, DP, VP, BLOCK, ROWS, EVEN, KV, NS, GS, GH, GP,
        )  # fmt: skip
    sink = tl.full([ROWS], -float("inf"), ACC)
    if SINKS:
        sink = tl.load(sinks + e * GROUP + r, mask=mine & (share == 0), other=-float("inf")).to(ACC)
    highest = tl.maximum(tl.maximum(top, new), sink)
    old, fresh = tl.exp(top - highest), tl.exp(new - highest)
    whole = whole * old + fresh + tl.exp(sink - highest)
    mixed = mixed * old[:, None, None] + fresh[:, None, None] * new_value[None, :, :]
    if SPLITS == 1:
        mixed = mixed / tl.where(whole > 0, whole, 1.0)[:, None, None]
    if SCORED or SPLITS > 1:
        tl.store(tops + h * SPLITS + share, highest, mask=mine)
        tl.store(masses + h * SPLITS + share, whole, mask=mine)
    at, inside = _halves(V, VP, KV, GS, GH, GP)
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
def place_of(states, seen, slot, slot_b, b, count, slots, INDEXED: tl.constexpr):
    """Where row b's state is among all `count`, its token's number and slot, and whether the row is active.

    Row and slot are 0 where they are out of range, so that nothing outside is read.
    """
    home = b
    if INDEXED:
        home = tl.load(states + b)
    valid = (home >= 0) & (home < count)
    home = tl.where(valid, home, 0)
    now, spot = tl.load(seen + b), tl.load(slot + home * slot_b)
    active = valid & (now >= 0) & (spot >= 0) & (spot < slots)
    return home, now, tl.where(active, spot, 0), active


@triton.jit
def _cap(x, SOFTCAP: tl.constexpr):
    """tanh(x / cap) x cap, where there is a cap."""
    if SOFTCAP > 0:
        x = SOFTCAP * (1 - 2 / (tl.exp(x * (2 / SOFTCAP)) + 1))
    return x


@triton.jit
def tile_columns(block, spot, slots, BLOCK: tl.constexpr):
    """A tile's columns, the slots they are in, and which of them there are."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    return column, tl.where(column == spot, slots - 1, column), column < slots - 1


@triton.jit
def _rows(rows, at, inside, D: tl.constexpr, DP: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK, DP]"""
    d = tl.arange(0, DP)
    if EVEN:
        return tl.load(rows + at[:, None] * D + d[None, :])
    return tl.load(rows + at[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _hide(logit, born, now, active, window, WINDOW: tl.constexpr):
    """What is empty, or older than the model's own window, is out of sight."""
    visible = (born >= 0) & active
    if WINDOW:
        visible = visible & (born > now - window)
    return tl.where(visible, logit, -float("inf"))


@triton.jit
def _one(
    asked, keys, values, scales, positions, logits, spot, now, active, start, per, slots, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, SCORED: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr,
    NS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """One query head: every row of the tile keeps a softmax of its own, so that nothing is reduced before the end.

    The next tile is loaded before this one is worked on: otherwise the compiler puts its values off until the keys are
    done with, and half as much is under way.
    """
    scaled = asked.to(ACC) * SCALE
    top = tl.full([BLOCK], NO_TOP, ACC)
    whole = tl.zeros([BLOCK], ACC)
    mixed = _no_mix(ACC, VP, BLOCK, KV, GS, GP)
    end = min(start + per, tl.cdiv(slots - 1, BLOCK))
    key, value, scale, born = _tile_of(
        keys, values, scales, positions, start, end, spot, slots, D, DP, V, VP, BLOCK, KV, NS, GS, GH, GP
    )
    for block in range(start, end):
        more = _tile_of(
            keys, values, scales, positions, block + 1, end, spot, slots, D, DP, V, VP, BLOCK, KV, NS, GS, GH, GP
        )
        logit = tl.sum(key.to(ACC) * scaled, 1)
        if KV > 0:
            logit *= scale[0].to(ACC)
        logit = _cap(logit, SOFTCAP)
        logit = _hide(logit, born, now, active, window, WINDOW)
        if SCORED:
            column = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(logits[:, None] + column[None, :], logit[None, :], mask=(column < slots - 1)[None, :])
        higher = tl.maximum(top, logit)
        old, weight = tl.exp(top - higher), tl.exp(logit - higher)
        whole = whole * old + weight
        mixed = _mix(mixed, value, scale, old, weight, ACC, KV)
        top = higher
        key, value, scale, born = more
    highest = tl.max(top, 0)
    old = tl.exp(top - highest)
    total = tl.sum(whole * old, 0)
    return tl.full([1], 0, ACC) + highest, tl.full([1], 0, ACC) + total, _summed(mixed, old, KV, GS, GP)


@triton.jit
def _no_mix(ACC: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr, GS: tl.constexpr,
            GP: tl.constexpr):  # fmt: skip
    """Weighted values of every row of a tile: [BLOCK, VP], or of 4-bit values codes and lowest numbers of each half."""
    if KV == 4:
        codes, lowest = tl.zeros([BLOCK, GP, GS], ACC), tl.zeros([BLOCK, GP], ACC)
        return codes, codes, lowest, lowest
    else:  # noqa: RET505
        return tl.zeros([BLOCK, VP], ACC)


@triton.jit
def _mix(mixed, value, scale, old, weight, ACC: tl.constexpr, KV: tl.constexpr):
    """A tile's values with their weights [BLOCK]; `old` is what the earlier ones are worth now."""
    if KV == 4:
        low, high, low_least, high_least = mixed
        byte = value.to(tl.int32)
        low_code, high_code = (byte & 15).to(ACC), (byte >> 4).to(ACC)
        less, more = (weight[:, None] * scale[1].to(ACC))[:, :, None], (weight[:, None] * scale[2].to(ACC))[:, :, None]
        low = low * old[:, None, None] + less * low_code
        high = high * old[:, None, None] + more * high_code
        low_least = low_least * old[:, None] + weight[:, None] * scale[3].to(ACC)
        high_least = high_least * old[:, None] + weight[:, None] * scale[4].to(ACC)
        return low, high, low_least, high_least
    else:  # noqa: RET505
        if KV == 8:
            weight = weight * scale[1].to(ACC)
        return mixed * old[:, None] + weight[:, None] * value.to(ACC)


@triton.jit
def _summed(mixed, old, KV: tl.constexpr, GS: tl.constexpr, GP: tl.constexpr):
    """The rows of a tile together: [1, 1, VP], or the halves of 4-bit values [1, 2, GP * GS]."""
    if KV == 4:
        low, high, low_least, high_least = mixed
        low = tl.sum(low * old[:, None, None], 0) + tl.sum(low_least * old[:, None], 0)[:, None]
        high = tl.sum(high * old[:, None, None], 0) + tl.sum(high_least * old[:, None], 0)[:, None]
        return _side_by_side(tl.reshape(low, [1, GP * GS]), tl.reshape(high, [1, GP * GS]))
    else:  # noqa: RET505
        return tl.sum(mixed * old[:, None], 0)[None, None, :]


@triton.jit
def _side_by_side(low, high):
    """Two tiles [R, P] -> [R, 2, P]."""
    return tl.permute(tl.join(low, high), [0, 2, 1])


@triton.jit
def _tile_of(
    keys, values, scales, positions, block, end, spot, slots,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr,
    NS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """A tile's keys, values, scales and positions; nothing from `end` on."""
    _, at, inside = tile_columns(block, spot, slots, BLOCK)
    inside = inside & (block < end)
    key = _rows(keys, at, inside, D, DP, False)
    value = _value_rows(values, at, inside, V, VP, False, KV, GS, GH, GP)
    scale = _scales_of(scales, at, inside, KV, NS, GH, GP)
    return key, value, scale, tl.load(positions + at, mask=inside, other=-1)


@triton.jit
def _value_rows(
    values, at, inside, V: tl.constexpr, VP: tl.constexpr, EVEN: tl.constexpr, KV: tl.constexpr, GS: tl.constexpr,
    GH: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """[BLOCK, VP], or of 4-bit values the bytes [BLOCK, GP, GS]."""
    if KV != 4:
        return _rows(values, at, inside, V, VP, EVEN)
    else:  # noqa: RET505
        g, i = tl.arange(0, GP), tl.arange(0, GS)
        from_ = values + at[:, None, None] * (GH * GS) + g[None, :, None] * GS + i[None, None, :]
        return tl.load(from_, mask=inside[:, None, None] & (g < GH)[None, :, None], other=0)


@triton.jit
def _scales_of(scales, at, inside, KV: tl.constexpr, NS: tl.constexpr, GH: tl.constexpr, GP: tl.constexpr):
    """Of keys [BLOCK] and of values: [BLOCK], or scales and lowest numbers of both halves [BLOCK, GP] each."""
    if KV == 0:
        return at, at
    elif KV == 8:  # noqa: RET505
        of_keys = tl.load(scales + at * NS, mask=inside, other=0.0)
        return of_keys, tl.load(scales + at * NS + 1, mask=inside, other=0.0)
    else:
        of_keys = tl.load(scales + at * NS, mask=inside, other=0.0)
        g = tl.arange(0, GP)
        from_, theirs = scales + at[:, None] * NS + 1 + g[None, :], inside[:, None] & (g < GH)[None, :]
        low, high = tl.load(from_, mask=theirs, other=0.0), tl.load(from_ + GH, mask=theirs, other=0.0)
        low_least = tl.load(from_ + 2 * GH, mask=theirs, other=0.0)
        return of_keys, low, high, low_least, tl.load(from_ + 3 * GH, mask=theirs, other=0.0)


@triton.jit
def _many(
    asked, keys, values, scales, positions, logits, mine, spot, now, active, start, per, slots, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr, SCORED: tl.constexpr,
    WINDOW: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr, KV: tl.constexpr, NS: tl.constexpr, GS: tl.constexpr, GH: tl.constexpr,
    GP: tl.constexpr,
):  # fmt: skip
    """Several query heads that read the same keys and values, by matrix units."""
    top = tl.full([ROWS], NO_TOP, ACC)
    whole = tl.zeros([ROWS], ACC)
    mixed = tl.zeros([ROWS, GP * GS if KV == 4 else VP], ACC)
    upper = mixed  # of the high halves of 4-bit values
    end = min(start + per, tl.cdiv(slots - 1, BLOCK))
    for block in tl.range(start, end, num_stages=STAGES):
        column, at, inside = tile_columns(block, spot, slots, BLOCK)
        born = tl.load(positions + at, mask=inside, other=-1)
        key = _rows(keys, at, inside, D, DP, EVEN).to(asked.dtype)
        value = _value_rows(values, at, inside, V, VP, EVEN, KV, GS, GH, GP)
        scale = _scales_of(scales, at, inside, KV, NS, GH, GP)
        logit = tl.dot(asked, tl.trans(key), input_precision="ieee", out_dtype=ACC) * SCALE
        if KV > 0:
            logit *= scale[0].to(ACC)[None, :]
        logit = _cap(logit, SOFTCAP)
        logit = _hide(logit, born[None, :], now, active, window, WINDOW)
        if SCORED:
            tl.store(logits[:, None] + column[None, :], logit, mask=mine[:, None] & inside[None, :])
        higher = tl.maximum(top, tl.max(logit, 1))
        old, weight = tl.exp(top - higher), tl.exp(logit - higher[:, None])
        whole = whole * old + tl.sum(weight, 1)
        mixed = mixed * old[:, None]
        if KV == 8:
            weight = weight * scale[1].to(ACC)[None, :]
        weight = weight.to(asked.dtype)
        if KV == 4:
            byte = value.to(tl.int32)
            low = (byte & 15).to(ACC) * scale[1].to(ACC)[:, :, None] + scale[3].to(ACC)[:, :, None]
            high = (byte >> 4).to(ACC) * scale[2].to(ACC)[:, :, None] + scale[4].to(ACC)[:, :, None]
            low, high = tl.reshape(low, [BLOCK, GP * GS]), tl.reshape(high, [BLOCK, GP * GS])
            mixed += tl.dot(weight, low.to(asked.dtype), input_precision="ieee", out_dtype=ACC)
            upper = upper * old[:, None]
            upper += tl.dot(weight, high.to(asked.dtype), input_precision="ieee", out_dtype=ACC)
        else:
            mixed += tl.dot(weight, value.to(asked.dtype), input_precision="ieee", out_dtype=ACC)
        top = higher
    if KV == 4:
        return top, whole, _side_by_side(mixed, upper)
    else:  # noqa: RET505
        return top, whole, mixed[:, None, :]
