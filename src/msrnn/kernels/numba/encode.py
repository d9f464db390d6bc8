"""`encode` compiled for the CPU: the same arguments and results as `kernels/torch/encode.py`, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.buffers import buffer
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
    results = _encode(key, value, kv, lambda name, shape, dtype: torch.empty(shape, dtype=dtype))
    return results if out is None else tuple(ours.copy_(new) for ours, new in zip(out, results, strict=True))


def encode_in_buffers(key: Tensor, value: Tensor, kv: KV) -> tuple[Tensor, ...]:
    """The same for rows of 32 or 64 bits, in memory that this thread's next call overwrites."""
    return _encode(key, value, kv, lambda name, shape, dtype: buffer(f"encoded {name}", shape, dtype, key.device))


def _encode(key: Tensor, value: Tensor, kv: KV, memory: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    shape, (key_size, value_size) = tuple(key.shape[:3]), code_sizes(kv, key.shape[3], value.shape[3])
    key_codes = memory("key codes", (*shape, key_size), torch.int8)
    value_codes = memory("value codes", (*shape, value_size), torch.int8 if kv == "int8" else torch.uint8)
    scales = memory("scales", (*shape, scale_count(kv, value.shape[3])), torch.float16)
    rows = [tensor.detach().transpose(1, 2).contiguous() for tensor in (key, value)]  # the order that models have
    new_key, new_value = (memory(name, tuple(tensor.shape), key.dtype) for name, tensor in zip("kv", rows, strict=True))
    arrays = [tensor.numpy() for tensor in (key_codes, value_codes, scales, *rows, new_key, new_value)]
    arrays[2] = arrays[2].view(np.uint16)
    tasks = [(b, h) for b in range(shape[0]) for h in range(shape[1])]
    parallel_for(_encode8_head if kv == "int8" else _encode4_head, tasks, key.numel() + value.numel(), *arrays)
    return key_codes, value_codes, scales, new_key.transpose(1, 2), new_value.transpose(1, 2)


@_jit
def _encode8_head(b, h, key_codes, value_codes, words, keys, values, new_keys, new_values):  # type: ignore[no-untyped-def]
    """All tokens of one head, 8-bit keys and values."""
    encode8(keys[b], h, key_codes[b, h], words[b, h])
    encode8(values[b], h, value_codes[b, h], words[b, h, :, 1:])
    scales = decode_scales(words[b, h], keys.dtype.type)
    decode8(key_codes[b, h], scales, *_places(b, h, new_keys))
    decode8(value_codes[b, h], scales[:, 1:], *_places(b, h, new_values))


@_jit
def _encode4_head(b, h, key_codes, value_codes, words, keys, values, new_keys, new_values):  # type: ignore[no-untyped-def]
    """All tokens of one head, 8-bit keys and 4-bit values."""
    encode8(keys[b], h, key_codes[b, h], words[b, h])
    encode4(values[b], h, value_codes[b, h], words[b, h, :, 1:])
    scales = decode_scales(words[b, h], keys.dtype.type)
    decode8(key_codes[b, h], scales, *_places(b, h, new_keys))
    decode4(value_codes[b, h], scales[:, 1:], *_places(b, h, new_values))


@_jit
def _places(b, h, numbers):  # type: ignore[no-untyped-def]
    """Where the numbers [B, T, G, D] of one head are: all of them in a row, the first, the step, and how many."""
    tokens, heads, size = numbers.shape[1:]
    return numbers.reshape(-1), (b * tokens * heads + h) * size, heads * size, 0, tokens
