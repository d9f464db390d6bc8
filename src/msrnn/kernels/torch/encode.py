"""`encode` and `decode` in plain PyTorch: keys and values in a slot format of fewer bits, and back. On any device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...core import formats
from ...policy import KV


def encode(key: Tensor, value: Tensor, kv: KV, out: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """key [B, G, T, D], value [B, G, T, V] -> codes of both, scales [B, G, T, n], the key and value they stand for.

    All five go to `out` if given.
    """
    codes = formats.encode(key, value, kv)
    results = (*codes, *formats.decode(*codes, kv, key.dtype))
    return results if out is None else tuple(ours.copy_(new) for ours, new in zip(out, results, strict=True))


def decode(codes: Sequence[Tensor], kv: KV, out: tuple[Tensor, Tensor]) -> None:
    """codes: those of keys [B, G, T, D] and of values, and scales [B, G, T, n]; out: what they stand for."""
    for ours, rows in zip(out, formats.decode(codes[0], codes[1], codes[2], kv, out[0].dtype), strict=True):
        ours.copy_(rows)
