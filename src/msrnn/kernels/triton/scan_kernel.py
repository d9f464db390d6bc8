"""The kernel of `scan` in Triton: a whole chunk in one launch, by `gpu`.

Rows are taken in blocks. Of a unit's programs one decides, the others prepare. To prepare a row (`_weigh`) is to take
its softmaxes over all that was visible before the block in front of its own: no need to wait for that one. To decide
(`_decide`) is to find the lowest of the head means of these. What has left since then takes its share out of the row,
and the shares bound how far a mean is off: in real attention the lowest is nearly always lowest beyond doubt, and one
row in 20 or fewer has to be summed again (`_mean`). Where scores have a memory, every row is. When a block is decided,
its rows lose what has left (`_settle`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...core.slots import NEVER

_jit: Any = triton.jit
_NEVER = tl.constexpr(NEVER)
_GONE = tl.constexpr(2**31 - 1)  # instead of its position, for a column that is empty or has left: past every step


@_jit(do_not_specialize=["capacity", "first", "last", "window", "programs"])
def scan(
    logits, weights, totals, positions, steps, scores, expiry, sinks, gains, rough, notes,
    units, heads, rows, columns, capacity, first, last, window, momentum, rest, programs,
    numbers,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, GAINS: tl.constexpr, GROUP: tl.constexpr, ALL: tl.constexpr,
    SLACK: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, SOME: tl.constexpr,
    MOST: tl.constexpr, GUESS: tl.constexpr, CLOSE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Program (unit, place): place 0 decides, the others prepare and settle; alone, it does all in turn.

    `numbers`: those of every unit (`core/units.py`), where they differ, or None.
    """
    unit = (tl.program_id(0) // programs).to(tl.int64)
    if numbers is not None:
        numbers += unit % units * 4
        capacity, first = tl.load(numbers).to(tl.int32), tl.load(numbers + 1).to(tl.int32)
        last, momentum = tl.load(numbers + 2).to(tl.int32), tl.load(numbers + 3).to(tl.float64, bitcast=True)
        rest = 0.0
    place = tl.program_id(0) % programs
    logits += unit * heads * rows * columns
    weights += unit * heads * rows * columns
    totals += unit * heads * rows
    sinks += unit % units * heads
    gains += unit * (heads // GROUP) * columns
    steps += unit // units * rows
    positions += unit * columns
    scores += unit * columns
    expiry += unit * columns
    rough += unit * 4 * ROWS * columns
    # helpers are at most a block apart, so that two counters in turn say who has come how far
    prepared = notes + unit * (3 + 2 * ROWS + rows)
    decided, held, victims = prepared + 2, prepared + 3, prepared + 3 + 2 * ROWS
    real = tl.load(steps + tl.arange(0, ALL), mask=tl.arange(0, ALL) < rows, other=-1)
    final = tl.max(tl.where(real >= 0, tl.arange(0, ALL), -1), 0)
    n = tl.arange(0, WIDE)
    inside = n < columns
    position = tl.load(positions + n, mask=inside, other=-1)
    position = tl.where(position < 0, _GONE, tl.minimum(position, _GONE)).to(tl.int32)
    score = tl.load(scores + n, mask=inside, other=0.0)
    victim = tl.full([2 * ROWS], -1, tl.int32)  # the columns that leave after the rows of the last block and of this
    helpers = max(programs - 1, 1)
    blocks = (rows + ROWS - 1) // ROWS
    for block in range(blocks + 2):
        if (place > 0) | (programs == 1):
            if SHARED:
                while tl.load(decided, volatile=True) < block - 1:  # cheaper to ask than an acquire, which empties L1
                    pass
                _wait(decided, block - 1)
            for row in range(block * ROWS + max(place - 1, 0), min(block * ROWS + ROWS, rows), helpers):
                _weigh(
                    logits, weights, totals, positions, steps, expiry, sinks, gains, rough, held,
                    row, block > 1, heads, rows, columns, window,
                    WINDOW, SINKS, GAINS, GROUP, FAST, ROWS, WIDE, SOME, GUESS, True,
                )  # fmt: skip
            settled = max(block - 2, 0) * ROWS
            for row in range(settled + max(place - 1, 0), min(max(block - 1, 0) * ROWS, rows), helpers):
                _settle(weights, totals, victims, row, heads, rows, columns, ROWS, MOST)
            tl.debug_barrier()
            if SHARED:
                tl.atomic_add(prepared + block % 2, 1, sem="release")
        if (place == 0) & (block > 0) & (block <= blocks):
            if SHARED:
                _wait(prepared + (block - 1) % 2, (block + 1) // 2 * helpers)
            start = (block - 1) * ROWS
            end = min(start + ROWS, rows)
            if start == 0:
                tl.store(expiry + n, tl.full([WIDE], _NEVER, tl.int64), mask=inside)
            position, score, victim = _decide(
                logits, weights, totals, positions, steps, expiry, sinks, gains, rough, held,
                position, score, victim, start, end, final, heads, rows, columns, capacity, first, last, window,
                momentum, rest, WINDOW, SINKS, GAINS, GROUP, SLACK, FAST, ROWS, WIDE, SOME, MOST, GUESS, CLOSE,
            )  # fmt: skip
            _tell(steps, expiry, victims, victim, start, end, ROWS)
            tl.debug_barrier()
            if SHARED:
                tl.atomic_add(decided, 1, sem="release")
    if place == 0:
        tl.store(scores + n, score, mask=inside)
        _finish(positions, expiry, tl.max(real, 0), columns, window, WINDOW, WIDE)


@_jit
def _wait(signal, wanted):
    """Until the others have come so far; what they wrote is visible then."""
    while tl.atomic_add(signal, 0, sem="acquire") < wanted:
        pass


@_jit
def _weigh(
    logits, weights, totals, positions, steps, expiry, sinks, gains, rough, held,
    row, evicted, heads, rows, columns, window,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, GAINS: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, SOME: tl.constexpr, GUESS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A row's exponentials and masses over what is visible, and the sum and the largest of its softmaxes over heads.

    `AHEAD`: as if nothing had left in the block in front, which may be under way.
    """
    n = tl.arange(0, WIDE)
    inside = n < columns
    now = tl.load(steps + row)
    since = now
    if AHEAD:
        before = (row // ROWS - 1) * ROWS + tl.arange(0, ROWS)
        step = tl.load(steps + before, mask=before >= 0, other=-1)
        since = tl.min(tl.where(step < 0, now, step), 0)
    position = tl.load(positions + n, mask=inside, other=-1)
    left = tl.load(expiry + n, mask=inside & evicted, other=_NEVER) < since
    seen = (position >= 0) & (position <= now) & ~left
    if WINDOW:
        seen = seen & (position > now - window)
    if AHEAD:
        staying = seen
        if WINDOW:
            staying = seen & (position > now - window + 1)
        tl.store(held + row % (2 * ROWS), tl.sum(staying.to(tl.int32), 0))
    # a minimum hides a column, whatever it holds; a choice would cost the predicates that keep many loads under way
    hide = tl.where(seen, float("inf"), -float("inf")).to(logits.dtype.element_ty)
    total = tl.zeros([WIDE], logits.dtype.element_ty)
    largest = tl.zeros([WIDE], logits.dtype.element_ty)
    h = tl.arange(0, SOME)
    at = (h[:, None] * rows + row) * columns + n[None, :]
    ahead = tl.load(logits + at, mask=(h < heads)[:, None] & inside[None, :], other=-float("inf"))
    for _ in range(0, heads, SOME):
        mine = h < heads
        logit = tl.minimum(ahead, hide[None, :])
        more = at + SOME * rows * columns
        ahead = tl.load(logits + more, mask=(h + SOME < heads)[:, None] & inside[None, :], other=-float("inf"))
        top = tl.max(logit, 1)
        if SINKS:
            sink = tl.load(sinks + h, mask=mine, other=-float("inf"))
            top = tl.maximum(top, sink)
        top = tl.where(top == -float("inf"), 0.0, top)  # nothing to see: padding
        weight = _exp(logit - top[:, None], FAST)
        whole = tl.sum(weight, 1)
        if SINKS:
            whole += _exp(sink - top, FAST)
        whole = tl.where(whole > 0, whole, 1.0)
        tl.store(weights + at, weight, mask=mine[:, None] & inside[None, :])
        tl.store(totals + h * rows + row, whole, mask=mine)
        if GUESS:
            softmax = weight * (1 / whole)[:, None]
            largest = tl.maximum(largest, tl.max(softmax, 0))
            total += tl.sum(_gained(softmax, gains, h, n, columns, heads, GAINS, GROUP), 0)
        h += SOME
        at = more
    if GUESS:
        rough += row % (2 * ROWS) * 2 * columns
        tl.store(rough + n, total, mask=inside)
        tl.store(rough + columns + n, largest, mask=inside)


@_jit
def _gained(weight, gains, h, n, columns, heads, GAINS: tl.constexpr, GROUP: tl.constexpr):
    """weight [heads, columns] times the gain of each KV head's column, where the policy has gains."""
    if GAINS:
        at = (h // GROUP)[:, None] * columns + n[None, :]
        weight *= tl.load(gains + at, mask=(h < heads)[:, None] & (n < columns)[None, :], other=0.0)
    return weight


@_jit
def _exp(x, FAST: tl.constexpr):
    """Without care for denormal numbers, which takes twice the instructions, where there is an instruction for that."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], tl.float32, is_pure=True, pack=1
        )
    return tl.exp(x)


@_jit
def _decide(
    logits, weights, totals, positions, steps, expiry, sinks, gains, rough, held,
    position, score, victim, start, end, final, heads, rows, columns, capacity, first, last, window,
    momentum, rest, WINDOW: tl.constexpr, SINKS: tl.constexpr, GAINS: tl.constexpr, GROUP: tl.constexpr,
    SLACK: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, SOME: tl.constexpr,
    MOST: tl.constexpr, GUESS: tl.constexpr, CLOSE: tl.constexpr,
):  # fmt: skip
    """The evictions of a block's rows, in order: positions and scores after them, and the victims."""
    n = tl.arange(0, WIDE)
    j = tl.arange(0, 2 * ROWS)
    rough += start % (2 * ROWS) * 2 * columns
    held += start % (2 * ROWS)
    latest = tl.sum(tl.where(j[None, :] == j[:, None] + ROWS, victim[None, :], 0), 1)
    victim = tl.where(j < ROWS, latest, -1)
    gone = tl.sum((victim >= 0).to(tl.int32), 0)
    keep = tl.full([WIDE], momentum, score.dtype) + tl.full([WIDE], rest, score.dtype)
    # all that a row needs is loaded a row ahead
    now = tl.load(steps + start).to(tl.int32)
    holding = tl.load(held)
    if GUESS:
        mean = tl.load(rough + n, mask=n < columns, other=0.0)
    for row in range(start, end):
        if WINDOW:
            gone = _lately(positions, victim, now, window)
        full = holding - gone > capacity
        free = _free(position, now, first, last, window, WINDOW)
        step = now
        more = row + 1 < end
        now = tl.load(steps + row + 1, mask=more, other=-1).to(tl.int32)
        holding = tl.load(held + row + 1 - start, mask=more, other=0)
        at = 0
        exact = row >= 0
        if GUESS:
            share = tl.load(rough + columns + victim, mask=victim >= 0, other=0.0)
            key, none = _keys(mean, free, WIDE)
            lowest, second = tl.reduce((key, none), 0, _two_lowest)
            rough += 2 * columns
            mean = tl.load(rough + n, mask=(n < columns) & more, other=0.0)
            at = (lowest & (WIDE - 1)).to(tl.int32)
            # without what has left, a head's softmax grows by a factor from 1 to 1 / (1 - lost)
            lost = tl.sum(share, 0)
            sure = _value(second & -WIDE) * (1 - lost) > _value(lowest | (WIDE - 1)) * (1 + SLACK)
            exact = (full & ~(sure & (lost <= 0.5))) | ~(lost <= 0.5) | (row == final)
            if CLOSE:  # noqa: SIM102 (known when it is compiled)
                if exact & (lost <= 0.5) & (row != final):
                    at, proven = _closest(weights, totals, positions, gains, key, none, victim, row, heads, rows,
                                          columns, GAINS, GROUP, SLACK, WIDE, MOST)  # fmt: skip
                    exact = ~proven
        if exact:
            mean_now, most = _mean(
                weights, totals, position, gains, victim, row, heads, rows, columns, GAINS, GROUP, WIDE, SOME, MOST
            )
            if ~(most <= 0.5):  # too little of the row is left to subtract from: weigh it again
                theirs = (victim >= 0) & (start - ROWS + j < row)
                tl.store(expiry + victim, tl.load(steps + start - ROWS + j, mask=theirs, other=-1), mask=theirs)
                tl.debug_barrier()
                _weigh(
                    logits, weights, totals, positions, steps, expiry, sinks, gains, rough, held,
                    row, True, heads, rows, columns, window,
                    WINDOW, SINKS, GAINS, GROUP, FAST, ROWS, WIDE, SOME, False, False,
                )  # fmt: skip
                tl.debug_barrier()
                mean_now, most = _mean(
                    weights, totals, position, gains, victim, row, heads, rows, columns, GAINS, GROUP, WIDE, SOME, MOST
                )
            score = tl.where(step >= 0, keep * score + mean_now, score)
            # a score that is no number counts as the highest; where none is free, no column outside may be named
            ranked = tl.where(free & (score == score), score, float("inf"))
            _, _, at = tl.reduce((ranked, tl.where(free, position, _GONE), n), 0, _lowest)
            at = tl.minimum(at, columns - 1)
        position = tl.where(full & (n == at), _GONE, position)
        victim = tl.where(full & (j == row - start + ROWS), at, victim)
        gone += full.to(tl.int32)
    return position, score, victim


@_jit
def _closest(
    weights, totals, positions, gains, key, none, victim, row, heads, rows, columns,
    GAINS: tl.constexpr, GROUP: tl.constexpr, SLACK: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The lowest of the three columns that come nearest, summed without what has left, and whether none is lower.

    The others' means can only have grown, so the fourth as it was bounds them all.
    """
    one, two, three, four = tl.reduce((key, none, none, none), 0, _four_lowest)
    h = tl.arange(0, MOST)
    mine = h < heads
    at = weights + (h * rows + row) * columns
    dead = tl.load(at[:, None] + victim[None, :], mask=mine[:, None] & (victim >= 0)[None, :], other=0.0)
    whole = tl.load(totals + h * rows + row, mask=mine, other=1.0)
    empty = _value(tl.min(none, 0))
    a, a_at, a_age = _column(at, h, mine, positions, gains, one, columns, GAINS, GROUP, WIDE)
    b, b_at, b_age = _column(at, h, mine, positions, gains, two, columns, GAINS, GROUP, WIDE)
    c, c_at, c_age = _column(at, h, mine, positions, gains, three, columns, GAINS, GROUP, WIDE)
    lost = tl.sum(dead, 1)
    inverse = 1 / (whole - lost)
    a_mean = tl.where(_value(one) < empty, tl.sum(a * inverse, 0), empty)
    b_mean = tl.where(_value(two) < empty, tl.sum(b * inverse, 0), empty)
    c_mean = tl.where(_value(three) < empty, tl.sum(c * inverse, 0), empty)
    a_mean, a_age, a_at = _lowest(a_mean, a_age, a_at, b_mean, b_age, b_at)
    a_mean, a_age, a_at = _lowest(a_mean, a_age, a_at, c_mean, c_age, c_at)
    proven = (tl.max(lost / whole, 0) <= 0.5) & (_value(four & -WIDE) > a_mean * (1 + SLACK))
    return a_at, proven


@_jit
def _column(at, h, mine, positions, gains, key, columns, GAINS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """What every head gave to a key's column, times the gain if any; the column, and its position."""
    column = (key & (WIDE - 1)).to(tl.int32)
    weight = tl.load(at + column, mask=mine, other=0.0)
    if GAINS:
        weight *= tl.load(gains + h // GROUP * columns + column, mask=mine, other=0.0)
    return weight, column, tl.load(positions + column)


@_jit
def _four_lowest(a, a2, a3, a4, b, b2, b3, b4):
    """Of two lists in order, each of the lowest so far, the lowest four in order."""
    w, x, y, z = tl.minimum(a, b4), tl.minimum(a2, b3), tl.minimum(a3, b2), tl.minimum(a4, b)
    w, y = tl.minimum(w, y), tl.maximum(w, y)
    x, z = tl.minimum(x, z), tl.maximum(x, z)
    return tl.minimum(w, x), tl.maximum(w, x), tl.minimum(y, z), tl.maximum(y, z)


@_jit
def _keys(mean, free, WIDE: tl.constexpr):
    """Means as integers that order as they do, being not negative, with the column in their last bits."""
    if mean.dtype == tl.float64:
        bits, none = mean.to(tl.int64, bitcast=True), tl.full([WIDE], 0x7FF0000000000000, tl.int64)
    else:
        bits, none = mean.to(tl.int32, bitcast=True), tl.full([WIDE], 0x7F800000, tl.int32)
    return tl.where(free, (bits & -WIDE) | tl.arange(0, WIDE), none), none


@_jit
def _value(key):
    """And back; where there is no column, infinity."""
    return key.to(tl.float64 if key.dtype == tl.int64 else tl.float32, bitcast=True)


@_jit
def _two_lowest(a, a2, b, b2):
    return tl.minimum(a, b), tl.minimum(tl.maximum(a, b), tl.minimum(a2, b2))


@_jit
def _tell(steps, expiry, victims, victim, start, end, ROWS: tl.constexpr):
    """Note this block's victims where the other programs look for them."""
    row = start - ROWS + tl.arange(0, 2 * ROWS)
    mine = (row >= start) & (row < end)
    tl.store(victims + row, victim, mask=mine)
    tl.store(expiry + victim, tl.load(steps + row, mask=mine, other=-1), mask=mine & (victim >= 0))


@_jit
def _lately(positions, victim, now, window):
    """How many left since this block was prepared, of those that the model's own window would still hold."""
    position = tl.load(positions + victim, mask=victim >= 0, other=0)
    return tl.sum(((victim >= 0) & (position > now - window + 1)).to(tl.int32), 0)


@_jit
def _free(position, now, first, last, window, WINDOW: tl.constexpr):
    """Whether a column may be chosen: neither protected nor leaving by itself."""
    free = (position >= first) & (position <= now - last)
    if WINDOW:
        free = free & (position > now - window + 1)
    return free


@_jit
def _mean(
    weights, totals, position, gains, victim, row, heads, rows, columns,
    GAINS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, SOME: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The mean over heads of a row's softmaxes without what has left, and the largest share that this had."""
    n = tl.arange(0, WIDE)
    h = tl.arange(0, MOST)
    dead = weights + (h[:, None] * rows + row) * columns + victim[None, :]
    lost = tl.sum(tl.load(dead, mask=(h < heads)[:, None] & (victim >= 0)[None, :], other=0.0), 1)
    whole = tl.load(totals + h * rows + row, mask=h < heads, other=1.0)
    MORE: tl.constexpr = min(2 * SOME, MOST)
    inverse = tl.reshape(1 / (whole - lost), [MOST // MORE, MORE])
    total = tl.zeros([WIDE], weights.dtype.element_ty)
    for group in range((heads + MORE - 1) // MORE):
        some = group * MORE + tl.arange(0, MORE)
        at = (some[:, None] * rows + row) * columns + n[None, :]
        weight = tl.load(weights + at, mask=(some < heads)[:, None] & (n < columns)[None, :], other=0.0)
        scale = tl.sum(tl.where(tl.arange(0, MOST // MORE)[:, None] == group, inverse, 0.0), 0)
        total += tl.sum(_gained(weight * scale[:, None], gains, some, n, columns, heads, GAINS, GROUP), 0)
    return tl.where(position == _GONE, 0.0, total / heads), tl.max(lost / whole, 0)


@_jit
def _settle(weights, totals, victims, row, heads, rows, columns, ROWS: tl.constexpr, MOST: tl.constexpr):
    """Take out of a row what left after it was prepared and before its turn."""
    h = tl.arange(0, MOST)
    gone = (row // ROWS - 1) * ROWS + tl.arange(0, 2 * ROWS)
    victim = tl.load(victims + gone, mask=(gone >= 0) & (gone < row), other=-1)
    at = weights + (h[:, None] * rows + row) * columns + victim[None, :]
    theirs = (h < heads)[:, None] & (victim >= 0)[None, :]
    lost = tl.sum(tl.load(at, mask=theirs, other=0.0), 1)
    whole = tl.load(totals + h * rows + row, mask=h < heads, other=1.0)
    tl.debug_barrier()  # all is read before anything is written, whoever does either
    tl.store(totals + h * rows + row, whole - lost, mask=h < heads)
    tl.store(at, tl.zeros(at.shape, weights.dtype.element_ty), mask=theirs)


@_jit
def _finish(positions, expiry, latest, columns, window, WINDOW: tl.constexpr, WIDE: tl.constexpr):
    """Empty slots, and what left through the model's own window."""
    n = tl.arange(0, WIDE)
    inside = n < columns
    position = tl.load(positions + n, mask=inside, other=-1)
    left = tl.load(expiry + n, mask=inside, other=-1)
    if WINDOW:
        oldest = position + window - 1
        left = tl.where(oldest <= latest, tl.minimum(left, oldest), left)
    tl.store(expiry + n, tl.where(position < 0, -1, left), mask=inside)


@_jit
def _lowest(a, age, i, b, other, j):
    """The lowest and where it is; the older of equals."""
    less = (a < b) | ((a == b) & (age < other))
    return tl.where(less, a, b), tl.where(less, age, other), tl.where(less, i, j)
