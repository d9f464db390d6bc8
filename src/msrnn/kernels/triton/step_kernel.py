"""The kernels of `step` in Triton: `attend`, then `finish`; `step.py` launches them.

`attend` reads each held key and value once: a program has one stored head of one sequence, or a share of its slots
where there are few, and all query heads that read it. `finish` takes the mean of the softmaxes over a unit's heads,
which needs every head's normaliser, so it is a launch of its own; so are shares put together (`_combine`).

The newcomer is read from where it comes in, not from its slot, and the last slot stands in for that one: S - 1 columns
are left, a round number, and nobody reads what is being written. Numbers in empty slots must be finite.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

UNLIMITED = tl.constexpr(2**31 - 1)
_NO_TOP = tl.constexpr(-1.0e30)  # the top of nothing: finite, so that a difference of two is a number


@triton.jit(do_not_specialize=["count", "slots", "per", "window"])
def attend(
    query, key, value, keys, values, positions, gains, slot, seen, sinks, states, logits, tops, masses, parts,
    query_b, query_h, key_b, key_h, value_b, value_h, keys_b, values_b, positions_b, gains_b, slot_b, count,
    pitch, slots, per, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
    SCORED: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, UNITS: tl.constexpr, INDEXED: tl.constexpr,
    GAINS: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (stored head, share): the newcomer is written, and this share of the slots attended to."""
    stored = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    b, e = stored // STORED, stored % STORED
    unit = e // (STORED // UNITS)
    home, now, spot, active = _place_of(states, seen, slot + unit, slot_b, b, count, slots, INDEXED)
    r, d, v = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, VP)
    h = b * (STORED * GROUP) + e * GROUP + r  # over the whole batch
    mine = r < GROUP
    at = query + b * query_b + (e * GROUP + r)[:, None] * query_h + d[None, :]
    asked = tl.load(at, mask=mine[:, None] & (d < D)[None, :], other=0.0)
    keys += home * keys_b + e * slots * D
    values += home * values_b + e * slots * V
    positions += home * positions_b + unit * slots
    here = (share == 0) & active  # the first share has the newcomer and the sink
    new_key = tl.load(key + b * key_b + e * key_h + d, mask=d < D, other=0.0)
    new_value = tl.load(value + b * value_b + e * value_h + v, mask=v < V, other=0.0)
    tl.store(keys + spot * D + d, new_key, mask=(d < D) & here)
    tl.store(values + spot * V + v, new_value, mask=(v < V) & here)
    if GAINS:
        square = tl.sum(new_value.to(ACC) * new_value.to(ACC), 0)
        tl.store(gains + home * gains_b + e * slots + spot, tl.sqrt(square), mask=here)
    new = _cap(tl.sum(asked.to(ACC) * new_key.to(ACC)[None, :], 1) * SCALE, SOFTCAP)
    new = tl.where(here, new, -float("inf"))
    if SCORED:
        tl.store(logits + h * pitch + slots - 1, new, mask=mine & here)
    if ROWS == 1:
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
    highest = tl.maximum(tl.maximum(top, new), sink)
    old, fresh = tl.exp(top - highest), tl.exp(new - highest)
    whole = whole * old + fresh + tl.exp(sink - highest)
    mixed = mixed * old[:, None] + fresh[:, None] * new_value.to(ACC)[None, :]
    if SPLITS == 1:
        mixed = mixed / tl.where(whole > 0, whole, 1.0)[:, None]
    if SCORED or SPLITS > 1:
        tl.store(tops + h * SPLITS + share, highest, mask=mine)
        tl.store(masses + h * SPLITS + share, whole, mask=mine)
    to = parts + (h * SPLITS + share)[:, None] * V + v[None, :]
    tl.store(to, mixed.to(parts.dtype.element_ty), mask=mine[:, None] & (v < V)[None, :])


@triton.jit
def _place_of(states, seen, slot, slot_b, b, count, slots, INDEXED: tl.constexpr):
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
def _place(block, spot, slots, BLOCK: tl.constexpr):
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
    asked, keys, values, positions, logits, spot, now, active, start, per, slots, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, SCORED: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query head: every row of the tile keeps a softmax of its own, so that nothing is reduced before the end.

    The next tile is loaded before this one is worked on: otherwise the compiler puts its values off until the keys are
    done with, and half as much is under way.
    """
    scaled = asked.to(ACC) * SCALE
    top = tl.full([BLOCK], _NO_TOP, ACC)
    whole = tl.zeros([BLOCK], ACC)
    mixed = tl.zeros([BLOCK, VP], ACC)
    end = min(start + per, tl.cdiv(slots - 1, BLOCK))
    key, value, born = _tile_of(keys, values, positions, start, end, spot, slots, D, DP, V, VP, BLOCK)
    for block in range(start, end):
        more = _tile_of(keys, values, positions, block + 1, end, spot, slots, D, DP, V, VP, BLOCK)
        logit = _cap(tl.sum(key.to(ACC) * scaled, 1), SOFTCAP)
        logit = _hide(logit, born, now, active, window, WINDOW)
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
    return tl.full([1], 0, ACC) + highest, tl.full([1], 0, ACC) + total, tl.sum(mixed * old[:, None], 0)[None, :]


@triton.jit
def _tile_of(
    keys, values, positions, block, end, spot, slots,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile's keys, values and positions; nothing from `end` on."""
    _, at, inside = _place(block, spot, slots, BLOCK)
    inside = inside & (block < end)
    key = _rows(keys, at, inside, D, DP, False)
    value = _rows(values, at, inside, V, VP, False)
    return key, value, tl.load(positions + at, mask=inside, other=-1)


@triton.jit
def _many(
    asked, keys, values, positions, logits, mine, spot, now, active, start, per, slots, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr, SCORED: tl.constexpr,
    WINDOW: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Several query heads that read the same keys and values, by matrix units."""
    top = tl.full([ROWS], _NO_TOP, ACC)
    whole = tl.zeros([ROWS], ACC)
    mixed = tl.zeros([ROWS, VP], ACC)
    end = min(start + per, tl.cdiv(slots - 1, BLOCK))
    for block in tl.range(start, end, num_stages=STAGES):
        column, at, inside = _place(block, spot, slots, BLOCK)
        born = tl.load(positions + at, mask=inside, other=-1)
        key = _rows(keys, at, inside, D, DP, EVEN)
        value = _rows(values, at, inside, V, VP, EVEN)
        logit = _cap(tl.dot(asked, tl.trans(key), input_precision="ieee", out_dtype=ACC) * SCALE, SOFTCAP)
        logit = _hide(logit, born[None, :], now, active, window, WINDOW)
        if SCORED:
            tl.store(logits[:, None] + column[None, :], logit, mask=mine[:, None] & inside[None, :])
        higher = tl.maximum(top, tl.max(logit, 1))
        old, weight = tl.exp(top - higher), tl.exp(logit - higher[:, None])
        whole = whole * old + tl.sum(weight, 1)
        mixed = mixed * old[:, None]
        mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee", out_dtype=ACC)
        top = higher
    return top, whole, mixed


@triton.jit(do_not_specialize=["count", "deciding", "slots", "capacity", "first", "last", "window"])
def finish(
    logits, tops, masses, parts, output, positions, scores, gains, slot, seen, states,
    positions_b, scores_b, gains_b, slot_b, count, deciding, pitch, slots, capacity, first, last, window,
    momentum, rest,
    MEMORY: tl.constexpr, MEMBERS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SCORED: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, UNITS: tl.constexpr, INDEXED: tl.constexpr,
    GAINS: tl.constexpr, SHARES: tl.constexpr, WIDE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The first programs decide for a unit each, the others put a head's shares together."""
    program = tl.program_id(0).to(tl.int64)
    if program >= deciding:
        _combine(tops, masses, parts, output, program - deciding, SPLITS, SHARES, V, VP)
    else:
        b, unit = program // UNITS, program % UNITS
        home, now, spot, active = _place_of(states, seen, slot + unit, slot_b, b, count, slots, INDEXED)
        positions += home * positions_b + unit * slots
        born = _shifted(positions, spot, slots, -1, WIDE)
        born = tl.minimum(tl.maximum(born, -1), UNLIMITED).to(tl.int32)
        score, new = tl.zeros([WIDE], tops.dtype.element_ty), 0.0
        if SCORED:
            score, new = _mean(
                logits, tops, masses, gains + home * gains_b + unit * (MEMBERS // GROUP) * slots, spot,
                program * MEMBERS, pitch, slots, MEMBERS, GROUP, SPLITS, GAINS, SHARES, WIDE, SOME,
            )  # fmt: skip
        if MEMORY:
            score = _remember(
                scores + home * scores_b + unit * slots, born, score, new, spot, active, slots, momentum, rest, WIDE
            )
        now, spot = now.to(tl.int32), spot.to(tl.int32)
        free_slot = _choose(
            positions, born, score, new, spot, now, active, slots, capacity, first, last, window, WINDOW, WIDE
        )
        tl.store(slot + home * slot_b + unit, free_slot.to(tl.int64), mask=active)


@triton.jit
def _shifted(rows, spot, slots, other, WIDE: tl.constexpr):
    """A row's columns, loaded before it is known which of them stands in the last slot."""
    column = tl.arange(0, WIDE)
    last = tl.load(rows + slots - 1)
    return tl.where(column == spot, last, tl.load(rows + column, mask=column < slots - 1, other=other))


@triton.jit
def _combine(tops, masses, parts, output, head, SPLITS: tl.constexpr, SHARES: tl.constexpr, V: tl.constexpr,
             VP: tl.constexpr):  # fmt: skip
    """The shares of one head's output together."""
    s, v = tl.arange(0, SHARES), tl.arange(0, VP)
    top = tl.load(tops + head * SPLITS + s, mask=s < SPLITS, other=_NO_TOP)
    mass = tl.load(masses + head * SPLITS + s, mask=s < SPLITS, other=0.0)
    at = parts + (head * SPLITS + s)[:, None] * V + v[None, :]
    part = tl.load(at, mask=(s < SPLITS)[:, None] & (v < V)[None, :], other=0.0)
    weight = tl.exp(top - tl.max(top, 0))
    whole = tl.sum(mass * weight, 0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(output + head * V + v, mixed.to(output.dtype.element_ty), mask=v < V)


@triton.jit
def _mean(
    logits, tops, masses, gains, spot, heads, pitch, slots, MEMBERS: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, GAINS: tl.constexpr, SHARES: tl.constexpr, WIDE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The mean over a unit's heads of their softmaxes, times gains if any: of every column, and of the newcomer."""
    column = tl.arange(0, WIDE)
    total, new = tl.zeros([WIDE], tops.dtype.element_ty), 0.0
    for start in range(0, MEMBERS, SOME):
        h = start + tl.arange(0, SOME)
        mine = h < MEMBERS
        at = (heads + h)[:, None] * pitch + column[None, :]
        logit = tl.load(logits + at, mask=mine[:, None] & (column < slots - 1)[None, :], other=-float("inf"))
        newest = tl.load(logits + (heads + h) * pitch + slots - 1, mask=mine, other=-float("inf"))
        highest, inverse = _normal(tops, masses, heads + h, mine, SPLITS, SHARES)
        weight = tl.exp(logit - highest[:, None]) * inverse[:, None]
        newest = tl.exp(newest - highest) * inverse
        if GAINS:
            kv = gains + h // GROUP * slots
            theirs = mine[:, None] & (column < slots - 1)[None, :]
            at = tl.where(column == spot, slots - 1, column)  # the last slot stands in for the newcomer's
            weight *= tl.load(kv[:, None] + at[None, :], mask=theirs, other=0.0)
            newest *= tl.load(kv + spot, mask=mine, other=0.0)
        total += tl.sum(weight, 0)
        new += tl.sum(newest, 0)
    return total / MEMBERS, new / MEMBERS


@triton.jit
def _normal(tops, masses, head, mine, SPLITS: tl.constexpr, SHARES: tl.constexpr):
    """The highest logit of each head and one over its mass, from its shares."""
    share = tl.arange(0, SHARES)
    at = head[:, None] * SPLITS + share[None, :]
    theirs = mine[:, None] & (share < SPLITS)[None, :]
    top = tl.load(tops + at, mask=theirs, other=_NO_TOP)
    mass = tl.load(masses + at, mask=theirs, other=0.0)
    highest = tl.max(top, 1)
    whole = tl.sum(mass * tl.exp(top - highest[:, None]), 1)
    return highest, 1 / tl.where(whole > 0, whole, 1.0)  # nothing: no such head, or an inactive row


@triton.jit
def _remember(scores, born, score, new, spot, active, slots, momentum, rest, WIDE: tl.constexpr):
    """Scores with a memory: read, moved on, written back; the newcomer has none yet."""
    _, at, inside = _place(0, spot, slots, WIDE)
    held = inside & (born >= 0) & active
    keep = tl.full([WIDE], momentum, score.dtype) + tl.full([WIDE], rest, score.dtype)
    score += keep * tl.where(held, _shifted(scores, spot, slots, 0.0, WIDE), 0.0)
    tl.debug_barrier()  # all have read
    tl.store(scores + at, score, mask=held)
    tl.store(scores + spot, new, mask=active)
    return score


@triton.jit
def _choose(
    positions, born, score, new, spot, now, active, slots, capacity, first, last, window,
    WINDOW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Empty what leaves, and write the newcomer's position; the lowest slot that is empty then, -1 if there is none."""
    _, at, inside = _place(0, spot, slots, WIDE)
    staying, lasting = born >= 0, now >= 0
    if WINDOW:  # what the next query cannot see leaves by itself
        staying, lasting = staying & (born > now + 1 - window), lasting & (window > 1)
    full = tl.sum(staying.to(tl.int32), 0) + lasting.to(tl.int32) > capacity
    free = staying & (born >= first) & (born <= now - last)
    # where nothing is free (positions that no text has) anything may leave: the bound holds whatever the numbers
    choice = (tl.max(free.to(tl.int32), 0) > 0) | (lasting & (now >= first) & (last == 0))
    free = tl.where(choice, free, staying)
    ranked = tl.where(free & (score == score), score, float("inf"))  # a score that is no number counts as the highest
    lowest, _, place = tl.reduce((ranked, tl.where(free, born, UNLIMITED), at), 0, _lowest)
    newest = lasting & (now >= first) & (last == 0) & (new < lowest)
    gone = (born >= 0) & (~staying | (full & ~newest & free & (at == place)))
    lasting = lasting & ~(full & newest)
    tl.debug_barrier()  # all have read
    tl.store(positions + at, tl.full([WIDE], -1, tl.int64), mask=gone & active)
    tl.store(positions + spot, tl.where(lasting, now, -1).to(tl.int64), mask=active)
    empty = tl.min(tl.where(inside & ((born < 0) | gone), at, slots), 0)
    empty = tl.where(lasting, empty, tl.minimum(empty, spot))
    return tl.where(empty < slots, empty, -1)


@triton.jit
def _lowest(a, age, i, b, other, j):
    """The lowest and where it is; the older of equals."""
    less = (a < b) | ((a == b) & (age < other))
    return tl.where(less, a, b), tl.where(less, age, other), tl.where(less, i, j)
