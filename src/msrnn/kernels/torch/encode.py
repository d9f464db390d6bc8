"""`encode` in plain PyTorch: keys and values in a slot format of fewer bits. On any device."""

from __future__ import annotations

from torch import Tensor

from ...core import formats
from ...policy import KV


def encode(key: Tensor, value: Tensor, kv: KV) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """key [B, G, T, D], value [B, G, T, V] -> codes of both, scales [B, G, T, n], the key and value they stand for."""
    codes = formats.encode(key, value, kv)
    return *codes, *formats.decode(*codes, kv, key.dtype)
