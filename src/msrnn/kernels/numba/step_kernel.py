"""The compiled part of `step` on the CPU: what every thread runs. `step.py` launches it.

Tensors come as addresses and strides in records. OpenMP hands a thread one pointer, that of a `CALL`: the tokens of one
step. It points to `WORK` records, which stay as they are from step to step: the slots of a layer, or of each KV head.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.extending import intrinsic, overload

from ...policy import KV
from .compile import FAST_MATH, cfunc, jit
from .formats import decode_scales
from .slot_rows import in_dtype, numbers, room, store

_LOG2E = 1.4426950408889634
_NOTHING = -1e30  # a logit that no softmax notices
_LOWEST = np.float32(-126)  # 2 to that power is a float32's smallest number; less is nothing beside a row's maximum


def strided_fields(names):
    """Of every tensor its address, and the bytes from row to row and from head to head."""
    return [name + end for name in names for end in ("", "_b", "_h")]


# What a thread is told.
TOKENS = ("query", "key", "value", "output")
_ADDRESSES = ("works", "seen", "rows", "sinks", "weights", "finished")  # 0 where there are none
CALL = np.dtype([(name, np.int64) for name in ("task", "batch", "count", *_ADDRESSES, *strided_fields(TOKENS))])
SLOTS = ("keys", "values", "scales", "positions", "scores", "gains", "residual", "next")
_SIZES = ("head", "group", "stored", "units", "slots", "size", "width", "states", "codes", "scalars")
_RULES = ("first", "last", "capacity", "window", "has_scores", "has_gains", "has_residual")
WORK = np.dtype(
    [(name, np.int64) for name in (*_SIZES, *_RULES, *strided_fields(SLOTS))]
    + [(name, np.float64) for name in ("scale", "softcap", "momentum", "decay")]
)
_Call: Any = numba.from_dtype(CALL)

_jit = jit(FAST_MATH)
_exact = jit({"contract", "nsz"})
_ordered = jit({"nnan", "nsz"})


@intrinsic
def _pointer(typing_context, address, kind):
    """The address of numbers of a kind."""

    def convert(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, kind), convert


@intrinsic
def _count(typing_context, address):
    """Add 1 to a whole number that threads share; what it was before."""

    def add(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), add


@_jit
def _list(address, count, kind):
    return carray(_pointer(address, kind), (count,))


@_jit
def _table(address, rows, columns, kind):
    return carray(_pointer(address, kind), (rows, columns))


@_jit
def _task(call, w, b, e, number, word, key_code, value_code):
    """One stored head of one row: the newcomer is written, and all that is held attended to."""
    home = _list(call.rows, call.batch, np.int64)[b] if call.rows else b
    now = _list(call.seen, call.batch, np.int64)[b]
    share, group, h = w.stored // w.units, w.group, w.head + e
    u = e // share
    outputs = call.output + b * call.output_b + h * group * call.output_h
    for g in range(group):
        _list(outputs + g * call.output_h, w.width, number)[:] = 0
    if now < 0 or home < 0 or home >= w.states:
        return
    spot = _list(w.next + home * w.next_b + u * w.next_h, 1, np.int64)
    if spot[0] < 0 or spot[0] >= w.slots:
        return
    positions = _list(w.positions + home * w.positions_b + u * w.positions_h, w.slots, np.int64)
    used = _reach(positions, spot[0])
    positions = positions[:used]
    keys = _table(w.keys + home * w.keys_b + e * w.keys_h, used, w.size, key_code)
    values = _table(w.values + home * w.values_b + e * w.values_h, used, w.codes, value_code)
    words = _table(w.scales + home * w.scales_b + e * w.scales_h, used, w.scalars, np.uint16)
    new = _table(call.value + b * call.value_b + h * call.value_h, 1, w.width, word)
    store(keys, words, spot[0], _table(call.key + b * call.key_b + h * call.key_h, 1, w.size, word), number)
    store(values, words[:, 1:], spot[0], new, number)
    scales = decode_scales(words, number)
    if w.has_gains:
        gain = _list(w.gains + home * w.gains_b + e * w.gains_h, w.slots, number)
        row = numbers(values, scales[:, 1:], room(values, number), spot[0], spot[0] + 1)[0]
        gain[spot[0]] = _norm(in_dtype(row, new), number(0))
    heads = _weights(call, w, b * w.units + u, share * group, used, number)
    weights = heads[e % share * group :][:group]
    queries, mixed = np.empty((group, w.size), number), np.zeros((group, w.width), number)
    for g in range(group):
        query = _table(call.query + b * call.query_b + (h * group + g) * call.query_h, 1, w.size, word)
        queries[g] = numbers(query, scales, room(query, number), 0, 1)[0]
    _attend(queries, keys, scales, weights, number(w.scale), number(w.softcap))
    rest = _residual(w, home, e, number)
    for g in range(group):
        sink = _list(call.sinks, (h + 1) * group, number)[h * group + g] if call.sinks else number(0)
        blended = _blended(queries[g], rest, number(w.scale))
        horizon = now - w.window if w.window else -1
        weight = _softmax(weights[g], positions, spot[0], horizon, call.sinks != 0, sink, blended)
        if w.has_residual:
            for i in range(w.width):
                mixed[g, i] = weight * rest[w.size + i]
    _collect(weights, values, scales[:, 1:], mixed)
    for g in range(group):
        _list(outputs + g * call.output_h, w.width, number)[:] = mixed[g]
    if share == 1 or _count(call.finished + 8 * (b * w.units + u)) == share - 1:
        scores = _list(w.scores + home * w.scores_b + u * w.scores_h, used, number)
        gains = _table(w.gains + home * w.gains_b + u * share * w.gains_h, share, w.slots, number)
        victim = _decide(w, heads, positions, scores, gains, spot, now)
        if w.has_residual and victim >= 0:
            for i in range(u * share, (u + 1) * share):
                _blend(w, home, i, victim, new, number, key_code, value_code)


@_jit
def _weights(call, w, unit, heads, used, number):
    """Room for the weights of a unit's query heads; at a place of its own where other tasks write some of them."""
    if w.stored == w.units:
        return np.empty((heads, used), number)
    first = unit * heads * w.slots
    return _list(call.weights, first + heads * used, number)[first:].reshape(heads, used)


@_jit
def _residual(w, home, e, number):
    """A stored head's mean key, mean value and the number of tokens in them; a 0 where there is none."""
    if not w.has_residual:
        return np.zeros(1, number)
    return _list(w.residual + home * w.residual_b + e * w.residual_h, w.size + w.width + 1, number)


@_jit
def _blended(query, rest, scale):
    """The residual's logit in powers of 2, with the weight of the tokens in it; below all others if there are none."""
    kind, count = query.dtype.type, rest[-1]
    if not count > 0:
        return kind(_NOTHING)
    logit = kind(0)
    for i in range(len(query)):
        logit += query[i] * rest[i]
    return logit * scale * kind(_LOG2E) + np.log2(count)


@_jit
def _blend(w, home, e, victim, like, number, key_code, value_code):
    """What leaves a stored head joins its residual."""
    rest = _residual(w, home, e, number)
    keys = _table(w.keys + home * w.keys_b + e * w.keys_h, w.slots, w.size, key_code)[victim : victim + 1]
    values = _table(w.values + home * w.values_b + e * w.values_h, w.slots, w.codes, value_code)[victim : victim + 1]
    scales = decode_scales(
        _table(w.scales + home * w.scales_b + e * w.scales_h, w.slots, w.scalars, np.uint16)[victim : victim + 1],
        number,
    )
    key = in_dtype(numbers(keys, scales, room(keys, number), 0, 1)[0], like)
    value = in_dtype(numbers(values, scales[:, 1:], room(values, number), 0, 1)[0], like)
    rest[-1] = number(w.decay) * rest[-1] + number(1)
    for i in range(w.size):
        rest[i] += (key[i] - rest[i]) / rest[-1]
    for i in range(w.width):
        rest[w.size + i] += (value[i] - rest[w.size + i]) / rest[-1]


@_jit
def _norm(row, total):
    """The square root of a row's sum of squares; `total` is 0 in the dtype to add up in."""
    for d in range(len(row)):
        total += row[d] * row[d]
    return np.sqrt(total)


@_jit
def _reach(positions, spot):
    """From here on all slots are empty: they need not be looked at, and what they hold may be anything."""
    last = len(positions) - 1
    while last > spot and positions[last] < 0:
        last -= 1
    return last + 1


@_jit
def _attend(queries, keys, scales, logits, scale, softcap):
    """Logits of all that is held."""
    tile = room(keys, queries.dtype.type)
    for n in range(0, len(keys), len(tile)):
        stop = min(n + len(tile), len(keys))
        _logits(queries, numbers(keys, scales, tile, n, stop), logits[:, n:stop], scale, softcap)


@_jit
def _collect(weights, values, scales, output):
    """The sum of all values by their weights."""
    tile = room(values, output.dtype.type)
    for n in range(0, len(values), len(tile)):
        stop = min(n + len(tile), len(values))
        _mix(weights[:, n:stop], numbers(values, scales, tile, n, stop), output)


@_jit
def _logits(queries, keys, logits, scale, softcap):
    """In powers of 2. Four keys at a time for all queries, so that each is loaded from far away once."""
    kind, count = logits.dtype.type, len(keys)
    for n in range(0, count - 3, 4):
        for g in range(len(queries)):
            a, b, c, d = kind(0), kind(0), kind(0), kind(0)
            for i in range(queries.shape[1]):
                a += queries[g, i] * keys[n, i]
                b += queries[g, i] * keys[n + 1, i]
                c += queries[g, i] * keys[n + 2, i]
                d += queries[g, i] * keys[n + 3, i]
            logits[g, n], logits[g, n + 1], logits[g, n + 2], logits[g, n + 3] = a, b, c, d
    for n in range(count - count % 4, count):
        for g in range(len(queries)):
            a = kind(0)
            for i in range(queries.shape[1]):
                a += queries[g, i] * keys[n, i]
            logits[g, n] = a
    for g in range(len(queries)):
        for n in range(count):
            logits[g, n] *= scale
            if softcap > 0:
                logits[g, n] = np.tanh(logits[g, n] / softcap) * softcap
            logits[g, n] *= kind(_LOG2E)


@_jit
def _softmax(row, positions, spot, horizon, has_sink, sink, blended):
    """A row of logits becomes weights, 0 where a slot is empty or not past the `horizon`; that of the residual."""
    alive = np.empty(len(row), row.dtype)
    for n in range(len(row)):
        alive[n] = 1 if (positions[n] > horizon and positions[n] >= 0) or n == spot else 0
    top = _highest(row, alive)
    top = max(top, blended)
    left = row.dtype.type(0)
    if has_sink:
        sink *= row.dtype.type(_LOG2E)
        top = max(top, sink)
        left = row.dtype.type(2.0 ** (sink - top))
    rest = row.dtype.type(2.0 ** (blended - top)) if blended > _NOTHING else row.dtype.type(0)
    left += rest
    _powers(row, top)
    for n in range(len(row)):
        row[n] *= alive[n]
        left += row[n]
    for n in range(len(row)):
        row[n] /= left
    return rest / left


@_ordered
def _highest(row, alive):
    """The maximum of what is alive."""
    top = row.dtype.type(-np.inf)
    for n in range(len(row)):
        it = row[n] if alive[n] > 0 else row.dtype.type(-np.inf)
        top = it if it > top else top
    return top


def _powers(row, top):
    """2 to the power of what a row is below `top`; 1 for what is above it. No number stays no number."""
    raise NotImplementedError("compiled code only")


@overload(_powers)
def _choose_powers(row, top):
    return _powers_one_by_one if row.dtype == types.float64 else _powers_together


def _powers_one_by_one(row, top):
    for n in range(len(row)):
        row[n] = 2.0 ** min(row[n] - top, 0.0)


def _powers_together(row, top):
    _float32_powers(row, top)


@_exact
def _float32_powers(row, top):
    """The whole part goes into a float's exponent, the rest is ln(2)^n / n! up to n = 7: right to a bit or so."""
    bits = np.empty(len(row), np.int32)
    wholes = bits.view(np.float32)
    for n in range(len(row)):
        x = row[n] - top
        x = _LOWEST if x < _LOWEST else x
        x = np.float32(0) if x > np.float32(0) else x
        whole = np.floor(x + np.float32(0.5))
        bits[n] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        x -= whole
        power = np.float32(1.5252733804059841e-05) * x + np.float32(0.00015403530393381608)
        power = power * x + np.float32(0.0013333558146428443)
        power = power * x + np.float32(0.009618129107628477)
        power = power * x + np.float32(0.05550410866482158)
        power = power * x + np.float32(0.2402265069591007)
        power = power * x + np.float32(0.6931471805599453)
        row[n] = power * x + np.float32(1)
    for n in range(len(row)):
        row[n] *= wholes[n]


@_jit
def _mix(weights, values, output):
    """Four values at a time for all heads, so that the output is loaded and stored once for all."""
    count = len(values)
    for n in range(0, count - 3, 4):
        for g in range(len(output)):
            a, b, c, d = weights[g, n], weights[g, n + 1], weights[g, n + 2], weights[g, n + 3]
            for i in range(output.shape[1]):
                output[g, i] += a * values[n, i] + b * values[n + 1, i] + c * values[n + 2, i] + d * values[n + 3, i]
    for n in range(count - count % 4, count):
        for g in range(len(output)):
            for i in range(output.shape[1]):
                output[g, i] += weights[g, n] * values[n, i]


@_jit
def _decide(w, weights, positions, scores, gains, spot, now):
    """All heads of a unit have attended: scores, the slot for the next token, and the one that leaves, or -1."""
    mean = np.zeros(len(positions), weights.dtype)
    for h in range(len(weights)):
        if w.has_gains:
            gain = gains[h * len(gains) // len(weights)]
            for n in range(len(mean)):
                mean[n] += weights[h, n] * gain[n]
        else:
            for n in range(len(mean)):
                mean[n] += weights[h, n]
    for n in range(len(mean)):
        mean[n] /= len(weights)
    positions[spot[0]] = now
    if w.has_scores:
        scores[spot[0]] = 0
        for n in range(len(mean)):
            scores[n] = weights.dtype.type(w.momentum) * scores[n] + mean[n]
            mean[n] = scores[n]
    held = 0
    for n in range(len(positions)):
        if w.window and positions[n] <= now - w.window + 1:
            positions[n] = -1
        held += positions[n] >= 0
    victim = -1
    if held > w.capacity:
        victim = _victim(mean, positions, w.first, now - w.last)
        positions[victim] = -1
    spot[0] = len(positions) if len(positions) < w.slots else -1
    for n in range(len(positions)):
        if positions[n] < 0:
            spot[0] = n
            break
    return victim


@_jit
def _victim(scores, positions, first, newest):
    """The free slot with the lowest score, the older of equals; a score that is no number counts as the highest.

    Where none is free (positions that no text has), any that is held: the bound holds whatever the numbers.
    """
    victim, any_held, lowest = -1, 0, np.inf
    for n in range(len(scores)):
        if positions[n] >= 0:
            any_held = n
        if positions[n] < first or positions[n] < 0 or positions[n] > newest:
            continue
        score = np.inf if np.isnan(scores[n]) else scores[n]
        if victim < 0 or score < lowest or (score == lowest and positions[n] < positions[victim]):
            victim, lowest = n, score
    return victim if victim >= 0 else any_held


@_jit
def _drain(data, number, word, key_code, value_code):
    """Tasks from the shared counter until there is none left: all rows of the first work, then of the next."""
    call = carray(data, 1)[0]
    works = _list(call.works, call.count, WORK)
    share = call.batch * works[0].stored
    task = _count(carray(data, 1).ctypes.data)
    while task < call.count * share:
        w, rest = works[task // share], task % share
        _task(call, w, rest // w.stored, rest % w.stored, number, word, key_code, value_code)
        task = _count(carray(data, 1).ctypes.data)


# Of a model's dtype: what to compute in, and what the words of its tensors are.
KINDS = {
    torch.float32: (np.float32, np.float32),
    torch.float64: (np.float64, np.float64),
    torch.bfloat16: (np.float32, np.uint16),
}
_CODES: dict[KV, Any] = {"int8": (np.int8, np.int8), "k8v4": (np.int8, np.uint8)}


@cache
def compiled(dtype: torch.dtype, kv: KV | None) -> Any:
    """What every thread runs, for a model's dtype and a slot format; compiled when first wanted, and kept on disk."""
    number, word = KINDS[dtype]
    key_code, value_code = (word, word) if kv is None else _CODES[kv]

    def kernel(data):
        _drain(data, number, word, key_code, value_code)

    return cfunc(types.void(types.CPointer(_Call)), kernel)
