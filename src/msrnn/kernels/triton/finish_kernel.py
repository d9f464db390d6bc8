"""The second kernel of `step` in Triton, `finish`: it chooses a unit's victim and puts the shares of a head together.

It works on the logits that `attend` (`attend_kernel.py`) has left.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .ragged import (
    CAPACITY,
    FIRST,
    GAINS_AT,
    HEAD,
    LAST,
    LINE,
    MOMENTUM,
    NEXT_AT,
    POSITIONS_AT,
    SCORES_AT,
    SLOTS,
    own_rows,
)
from .tiles import NO_TOP, place_of, tile_columns

UNLIMITED = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["count", "deciding", "slots", "capacity", "first", "last", "window"])
def finish(
    logits, tops, masses, parts, output, positions, scores, gains, slot, seen, states, victims,
    positions_b, scores_b, gains_b, slot_b, count, deciding, pitch, slots, capacity, first, last, window,
    momentum, rest, table,
    MEMORY: tl.constexpr, MEMBERS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SCORED: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, UNITS: tl.constexpr, INDEXED: tl.constexpr,
    GAINS: tl.constexpr, SHARES: tl.constexpr, WIDE: tl.constexpr, SOME: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The first programs decide for a unit each, the others put a head's shares together.

    `table`: that of heads with slots of their own (`ragged.py`), or None.
    """
    program = tl.program_id(0).to(tl.int64)
    if program >= deciding:
        _combine(tops, masses, parts, output, program - deciding, SPLITS, SHARES, V, VP)
    else:
        _decide(
            logits, tops, masses, positions, scores, gains, slot, seen, states, victims,
            positions_b, scores_b, gains_b, slot_b, count, deciding, pitch, slots, capacity, first, last, window,
            momentum, rest, table, program,
            MEMORY, MEMBERS, GROUP, SCORED, WINDOW, SPLITS, UNITS, INDEXED, GAINS, SHARES, WIDE, SOME, RESIDUAL,
        )  # fmt: skip


@triton.jit
def _decide(
    logits, tops, masses, positions, scores, gains, slot, seen, states, victims,
    positions_b, scores_b, gains_b, slot_b, count, deciding, pitch, slots, capacity, first, last, window,
    momentum, rest, table, program,
    MEMORY: tl.constexpr, MEMBERS: tl.constexpr, GROUP: tl.constexpr, SCORED: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, UNITS: tl.constexpr, INDEXED: tl.constexpr, GAINS: tl.constexpr, SHARES: tl.constexpr,
    WIDE: tl.constexpr, SOME: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Scores move on, one unit's victim leaves, and its slot is the next token's. `victims`: where a residual asks."""
    if table is None:
        b, unit = program // UNITS, program % UNITS
    else:
        unit = 0  # of tensors that are a head's own
        b, line = program % (deciding // UNITS), table + program // (deciding // UNITS) * LINE
        program = b * UNITS + tl.load(line + HEAD)
        slots, capacity = tl.load(line + SLOTS).to(tl.int32), tl.load(line + CAPACITY).to(tl.int32)
        first, last = tl.load(line + FIRST).to(tl.int32), tl.load(line + LAST).to(tl.int32)
        momentum, rest = tl.load(line + MOMENTUM).to(tl.float64, bitcast=True), 0.0
        slot, slot_b = slot + tl.load(line + NEXT_AT), tl.load(line + NEXT_AT + 1)
    home, now, spot, active = place_of(states, seen, slot + unit, slot_b, b, count, slots, INDEXED)
    if table is None:
        positions += home * positions_b + unit * slots
        scores += home * scores_b + unit * slots
        gains += home * gains_b + unit * (MEMBERS // GROUP) * slots
    else:
        positions, scores = own_rows(positions, line, home, POSITIONS_AT, 1), own_rows(scores, line, home, SCORES_AT, 1)
        gains = own_rows(gains, line, home, GAINS_AT, 1)
    born = _shifted(positions, spot, slots, -1, WIDE)
    born = tl.minimum(tl.maximum(born, -1), UNLIMITED).to(tl.int32)
    score, new = tl.zeros([WIDE], tops.dtype.element_ty), 0.0
    if SCORED:
        score, new = _mean(
            logits, tops, masses, gains, spot, program * MEMBERS, pitch, slots,
            MEMBERS, GROUP, SPLITS, GAINS, SHARES, WIDE, SOME,
        )  # fmt: skip
    if MEMORY:
        score = _remember(scores, born, score, new, spot, active, slots, momentum, rest, WIDE)
    now, spot = now.to(tl.int32), spot.to(tl.int32)
    free_slot, victim = _choose(
        positions, born, score, new, spot, now, active, slots, capacity, first, last, window, WINDOW, WIDE
    )
    tl.store(slot + home * slot_b + unit, free_slot.to(tl.int64), mask=active)
    if RESIDUAL:
        tl.store(victims + program, tl.where(active, victim, -1))


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
    top = tl.load(tops + head * SPLITS + s, mask=s < SPLITS, other=NO_TOP)
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
    top = tl.load(tops + at, mask=theirs, other=NO_TOP)
    mass = tl.load(masses + at, mask=theirs, other=0.0)
    highest = tl.max(top, 1)
    whole = tl.sum(mass * tl.exp(top - highest[:, None]), 1)
    return highest, 1 / tl.where(whole > 0, whole, 1.0)  # nothing: no such head, or an inactive row


@triton.jit
def _remember(scores, born, score, new, spot, active, slots, momentum, rest, WIDE: tl.constexpr):
    """Scores with a memory: read, moved on, written back; the newcomer has none yet."""
    _, at, inside = tile_columns(0, spot, slots, WIDE)
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
    """Empty what leaves, and write the newcomer's position; the lowest slot that is empty then, and the victim's.

    Both are -1 if there is none."""
    _, at, inside = tile_columns(0, spot, slots, WIDE)
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
    victim = tl.where(newest, spot, place)  # nothing that left through the model's own window
    return tl.where(empty < slots, empty, -1), tl.where(full, victim, -1)


@triton.jit
def _lowest(a, age, i, b, other, j):
    """The lowest and where it is; the older of equals."""
    less = (a < b) | ((a == b) & (age < other))
    return tl.where(less, a, b), tl.where(less, age, other), tl.where(less, i, j)
