"""Rows of slots in any format, for compiled code that need not know which: the format follows from their dtype.

Words of 16 bits are bfloat16, bytes are codes of 8 bits, unsigned bytes two codes of 4 bits each.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from .compile import jit
from .formats import bits_of, decode4, decode8, encode4, encode8, float_of

_TILE = 32  # rows that are decoded at a time: they stay in the L1 cache
_jit = jit(set())


def room(rows, number):
    """A place for `numbers`; its length is how many rows to ask for at a time."""
    raise NotImplementedError("compiled code only")


@overload(room)
def _choose_room(rows, number):
    if rows.dtype in (types.float32, types.float64):
        return lambda rows, number: rows
    packed = 2 if rows.dtype == types.uint8 else 1
    return lambda rows, number: np.empty((_TILE, packed * rows.shape[1]), number)


def numbers(rows, scales, tile, start, stop):
    """rows [N, D] in any format with scales [N, n] -> those from `start` to `stop`, [..., D or V] to compute with."""
    raise NotImplementedError("compiled code only")


@overload(numbers)
def _choose_numbers(rows, scales, tile, start, stop):
    if rows.dtype in (types.float32, types.float64):
        return lambda rows, scales, tile, start, stop: rows[start:stop]
    fill = {types.uint16: _widen, types.int8: decode8, types.uint8: decode4}[rows.dtype]

    def decode(rows, scales, tile, start, stop):
        fill(rows, scales, tile.reshape(-1), 0, tile.shape[1], start, stop)
        return tile[: stop - start]

    return decode


@_jit
def _widen(rows, scales, target, to, stride, start, stop):
    """Bfloat16, which NumPy does not know: the upper half of a float32."""
    for n in range(start, stop):
        for i in range(rows.shape[1]):
            target[to + i] = float_of(np.int32(np.int32(rows[n, i]) << np.int32(16)))
        to += stride


def store(rows, words, at, new, number):
    """The newcomer `new` [1, D], in the model's dtype, becomes row `at`; its scales go to `words`."""
    raise NotImplementedError("compiled code only")


@overload(store)
def _choose_store(rows, words, at, new, number):
    if rows.dtype in (types.int8, types.uint8):
        encode = encode8 if rows.dtype == types.int8 else encode4

        def store_codes(rows, words, at, new, number):
            token = numbers(new, new, room(new, number), 0, 1).reshape(1, 1, new.shape[1])
            encode(token, 0, rows[at : at + 1], words[at : at + 1])

        return store_codes

    def copy(rows, words, at, new, number):
        rows[at] = new[0]

    return copy


def in_dtype(row, new):
    """A decoded row as plain PyTorch sees it: rounded to bfloat16 if the model's numbers `new` are."""
    raise NotImplementedError("compiled code only")


@overload(in_dtype)
def _choose_in_dtype(row, new):
    if new.dtype != types.uint16:
        return lambda row, new: row
    return lambda row, new: _round_to_bfloat16(row)


@_jit
def _round_to_bfloat16(row):
    result = np.empty_like(row)
    for i in range(len(row)):
        bits = bits_of(row[i])
        near = np.int32(bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1)))
        result[i] = float_of(np.int32(near & np.int32(-65536))) if row[i] == row[i] else row[i]
    return result
