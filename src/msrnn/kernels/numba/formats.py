"""Slot formats in compiled code: `core/formats.py` bit for bit, for rows of float32 or float64.

Scales are float16, which Numba does not know on a CPU: they are read and written as words of 16 bits. Numba's cache
looks only at the file of a compiled function: after a change here, touch the files that import this one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from .compile import jit

_LEAST = 2.0**-24  # the smallest float16: no scale is 0
_EXPONENT = np.int32(112 << 23)  # what a float32's exponent has above a float16's
_INFINITY = np.int32(0x7C00)
_NAN = np.uint16(0x7E00)
_LANES = 8  # codes that are decoded at a time

_jit = jit(set())  # every operation as written: codes must equal PyTorch's


@intrinsic
def bits_of(typing_context, number):
    """A float's bits as a whole number of the same width."""
    width = number.bitwidth

    def convert(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(width))

    return (types.int32 if width == 32 else types.int64)(number), convert


@intrinsic
def float_of(typing_context, bits):
    """The float that a whole number's bits are."""
    kind = types.float32 if bits.bitwidth == 32 else types.float64

    def convert(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(kind))

    return kind(bits), convert


@intrinsic
def _rank(typing_context, bits):
    """A float's bits as a whole number that is ordered as floats are, NaN at the ends; its own inverse."""

    def swap(context, builder, signature, arguments):
        sign = builder.ashr(arguments[0], ir.Constant(arguments[0].type, bits.bitwidth - 1))
        return builder.xor(arguments[0], builder.lshr(sign, ir.Constant(arguments[0].type, 1)))

    return bits(bits), swap


@_jit
def from_half(word):
    """The float32 of a float16's word."""
    magnitude = np.int32(word) & np.int32(0x7FFF)
    bits = np.int32((magnitude << np.int32(13)) + _EXPONENT)
    bits = np.int32(bits + _EXPONENT) if magnitude >= _INFINITY else bits
    number = np.float32(magnitude) * np.float32(_LEAST) if magnitude < np.int32(0x400) else float_of(bits)
    return -number if word >= np.uint16(0x8000) else number


@_jit
def to_half(number):
    """The word of the float16 nearest to a number, even of two; through float32, as PyTorch does."""
    bits = bits_of(np.float32(number))
    sign = (bits >> np.int32(16)) & np.int32(0x8000)
    bits = np.int32(bits & np.int32(0x7FFFFFFF))
    if bits > np.int32(0x7F800000):
        return _NAN
    if bits >= np.int32(0x477FF000):  # 65520 and more
        return np.uint16(sign | _INFINITY)
    if bits < np.int32(0x38800000):  # below 2^-14: a sum with 0.5 is rounded to whole 2^-24
        return np.uint16(sign | (bits_of(np.float32(float_of(bits) + np.float32(0.5))) - np.int32(0x3F000000)))
    bits += np.int32(0xFFF) + ((bits >> np.int32(13)) & np.int32(1))
    return np.uint16(sign | ((bits - _EXPONENT) >> np.int32(13)))


@_jit
def _scale_word(number, least):
    """The word of a scale, which is not below the smallest float16. NaN stays NaN."""
    return to_half(least if number < least else number)


@_jit
def _code(number, lowest, highest):
    """The nearest code; 0 for NaN."""
    number = number if number == number else highest - highest
    number = number if number > lowest else lowest
    return np.int32(np.rint(number if number < highest else highest))


@_jit
def encode8(rows, h, codes, words):
    """Row h of every token in rows [T, G, D] -> codes [T, D] and the words of their scales [T, 0].

    Whole arrays, because a slice of one costs as much as a row.
    """
    kind = rows.dtype.type
    for t in range(len(rows)):
        top = bits_of(kind(0))
        for i in range(rows.shape[2]):
            bits = bits_of(abs(rows[t, h, i]))
            top = bits if bits > top else top
        words[t, 0] = _scale_word(float_of(top) / kind(127), kind(_LEAST))
        scale = kind(from_half(words[t, 0]))
        for i in range(rows.shape[2]):
            codes[t, i] = np.int8(_code(rows[t, h, i] / scale, kind(-127), kind(127)))


@_jit
def encode4(rows, h, codes, words):
    """The same for codes [T, V / 2] and words [T, 2 V / group]: of each group the scale, then the lowest number."""
    kind, groups, half = rows.dtype.type, words.shape[1] // 2, codes.shape[1]
    numbers = rows.reshape(rows.shape[0], rows.shape[1], groups, 2 * half // groups)
    by_group = np.empty((groups, 2 * half // groups), np.int32)
    low_half, high_half = by_group.reshape(-1)[:half], by_group.reshape(-1)[half:]
    for t in range(len(rows)):
        for k in range(groups):
            low, high = _extremes(numbers, t, h, k)
            words[t, groups + k] = to_half(low)
            lowest = kind(from_half(words[t, groups + k]))
            spread = kind(np.nan) if low == kind(-np.inf) else high - lowest  # an infinite number less itself is NaN
            words[t, k] = _scale_word(spread / kind(15), kind(_LEAST))
            scale = kind(from_half(words[t, k]))
            for i in range(numbers.shape[3]):
                by_group[k, i] = _code((numbers[t, h, k, i] - lowest) / scale, kind(0), kind(15))
        for j in range(half):
            codes[t, j] = np.uint8(low_half[j] | (high_half[j] << np.int32(4)))


@_jit
def _extremes(numbers, t, h, k):
    """The lowest and the highest number of a group; both NaN if there is a NaN."""
    kind = numbers.dtype.type
    low = high = _rank(bits_of(numbers[t, h, k, 0]))
    for i in range(numbers.shape[3]):
        rank = _rank(bits_of(numbers[t, h, k, i]))
        low, high = rank if rank < low else low, rank if rank > high else high
    lowest, highest = float_of(_rank(low)), float_of(_rank(high))
    if lowest == lowest and highest == highest:
        return lowest, highest
    return kind(np.nan), kind(np.nan)


def _expansion(number_of):
    """8 codes from `at` on, times `scale` plus `lowest`, become numbers from `to` on.

    In vectors, because a loop over so few codes would run one by one. `number_of` writes how codes become numbers.
    """

    @intrinsic
    def expand(typing_context, codes, at, numbers, to, scale, lowest):
        def write(context, builder, signature, arguments):
            word, number = (ir.VectorType(context.get_value_type(array.dtype), _LANES) for array in (codes, numbers))
            source, target = (
                builder.bitcast(
                    builder.gep(context.make_array(array)(context, builder, value).data, [index]), vector.as_pointer()
                )
                for array, value, index, vector in ((codes, *arguments[:2], word), (numbers, *arguments[2:4], number))
            )
            scale, lowest = (_splat(builder, value, number) for value in arguments[4:])
            result = builder.fmul(number_of(builder, builder.load(source, align=1), number), scale, flags=["contract"])
            builder.store(builder.fadd(result, lowest, flags=["contract"]), target, align=1)
            return context.get_dummy_value()

        return types.none(codes, at, numbers, to, scale, lowest), write

    return expand


def _splat(builder, number, vector):
    """A vector of one number."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(first, first, zeros)


_expand_low = _expansion(lambda b, code, floats: b.uitofp(b.and_(code, ir.Constant(code.type, [15] * _LANES)), floats))
_expand_high = _expansion(lambda b, code, floats: b.uitofp(b.lshr(code, ir.Constant(code.type, [4] * _LANES)), floats))
_expand8 = _expansion(lambda b, code, floats: b.sitofp(code, floats))


@_jit
def decode8(rows, scales, target, to, stride, start, stop):
    """rows [N, D] of codes and scales [N, n] from `start` to `stop` -> numbers in target [...].

    They go to `to`, `to + stride` and so on. Offsets and one call, because a slice or a call costs more than 8 codes.
    """
    kind, size = target.dtype.type, rows.shape[1]
    codes = rows.reshape(-1)
    for n in range(start, stop):
        at, scale, i = n * size, scales[n, 0], 0
        while i + _LANES <= size:
            _expand8(codes, at + i, target, to + i, scale, kind(-0.0))
            i += _LANES
        while i < size:
            target[to + i] = kind(codes[at + i]) * scale
            i += 1
        to += stride


@_jit
def decode4(rows, scales, target, to, stride, start, stop):
    """The same for rows [N, V / 2] with two codes a byte, and scales [N, 2 V / group]."""
    kind, half, groups = target.dtype.type, rows.shape[1], scales.shape[1] // 2
    codes, size = rows.reshape(-1), 2 * half // groups
    for n in range(start, stop):
        for k in range(groups // 2):
            at, i, scale, lowest = n * half + k * size, to + k * size, scales[n, k], scales[n, groups + k]
            other, j = groups // 2 + k, i + half  # the group in the upper halves of the same bytes
            other_scale, other_lowest = scales[n, other], scales[n, groups + other]
            whole = size - size % _LANES
            for d in range(0, whole, _LANES):
                _expand_low(codes, at + d, target, i + d, scale, lowest)
                _expand_high(codes, at + d, target, j + d, other_scale, other_lowest)
            for d in range(whole, size):
                target[i + d] = kind(codes[at + d] & np.uint8(15)) * scale + lowest
                target[j + d] = kind(codes[at + d] >> np.uint8(4)) * other_scale + other_lowest
        to += stride


@_jit
def decode_scales(words, number):
    """The float16 words [N, n] of scales as numbers [N, n]."""
    scales = np.empty(words.shape, number)
    source, target = words.reshape(-1), scales.reshape(-1)
    for i in range(len(source)):
        target[i] = from_half(source[i])
    return scales
