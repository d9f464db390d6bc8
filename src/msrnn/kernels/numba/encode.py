"""`encode` compiled for the CPU: the same arguments and results as `kernels/torch/encode.py`, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.formats import code_sizes, scale_count
from ...policy import KV
from ..torch import encode as torch_encode
from .compile import jit
from .formats import decode4, decode8, decode_scales, encode4, encode8
from .threads import parallel_for

_jit = jit(set())


def encode(key: Tensor, value: Tensor, kv: KV, out: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """See `kernels/torch/encode.py`. Rows of 16 bits are left to it."""
    if key.dtype not in (torch.float32, torch.float64) or value.dtype != key.dtype:
        return torch_encode.encode(key, value, kv, out)
    results = _encode(key, value, kv)
    return results if out is None else tuple(ours.copy_(new) for ours, new in zip(out, results, strict=True))


def _encode(key: Tensor, value: Tensor, kv: KV) -> tuple[Tensor, ...]:
    shape, (key_size, value_size) = key.shape[:3], code_sizes(kv, key.shape[3], value.shape[3])
    key_codes = key.new_empty(*shape, key_size, dtype=torch.int8)
    value_codes = key.new_empty(*shape, value_size, dtype=torch.int8 if kv == "int8" else torch.uint8)
    scales = key.new_empty(*shape, scale_count(kv, value.shape[3]), dtype=torch.float16)
    codes = (key_codes.numpy(), value_codes.numpy(), scales.numpy().view(np.uint16))
    rows = [tensor.detach().transpose(1, 2).contiguous() for tensor in (key, value)]  # the order that models have
    numbers = [torch.empty_like(tensor) for tensor in rows]
    tasks = [(b, h) for b in range(shape[0]) for h in range(shape[1])]
    arrays = (tensor.numpy() for tensor in (*rows, *numbers))
    parallel_for(_encode8_head if kv == "int8" else _encode4_head, tasks, key.numel() + value.numel(), *codes, *arrays)
    return key_codes, value_codes, scales, numbers[0].transpose(1, 2), numbers[1].transpose(1, 2)


@_jit
def _encode8_head(b, h, key_codes, value_codes, words, keys, values, new_keys, new_values):  # type: ignore[no-untyped-def]
    """All tokens of one head, 8-bit keys and values."""
    for t in range(keys.shape[1]):
        words[b, h, t, 0] = encode8(keys[b, t, h], key_codes[b, h, t])
        words[b, h, t, 1] = encode8(values[b, t, h], value_codes[b, h, t])
    scales = decode_scales(words[b, h], keys.dtype.type)
    decode8(key_codes[b, h], scales, *_places(b, h, new_keys))
    decode8(value_codes[b, h], scales[:, 1:], *_places(b, h, new_values))


@_jit
def _encode4_head(b, h, key_codes, value_codes, words, keys, values, new_keys, new_values):  # type: ignore[no-untyped-def]
    """All tokens of one head, 8-bit keys and 4-bit values."""
    unpacked = np.empty(values.shape[3], np.uint8)
    for t in range(keys.shape[1]):
        words[b, h, t, 0] = encode8(keys[b, t, h], key_codes[b, h, t])
        encode4(values[b, t, h], value_codes[b, h, t], words[b, h, t, 1:], unpacked)
    scales = decode_scales(words[b, h], keys.dtype.type)
    decode8(key_codes[b, h], scales, *_places(b, h, new_keys))
    decode4(value_codes[b, h], scales[:, 1:], *_places(b, h, new_values))


@_jit
def _places(b, h, numbers):  # type: ignore[no-untyped-def]
    """Where the numbers [B, T, G, D] of one head are: all of them in a row, the first, the step, and how many."""
    tokens, heads, size = numbers.shape[1:]
    return numbers.reshape(-1), (b * tokens * heads + h) * size, heads * size, 0, tokens
