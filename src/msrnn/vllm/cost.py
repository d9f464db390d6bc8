"""What a request costs inside vLLM: the bytes of its blocks, one per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..hf.geometry import Geometry
from ..plan import Plan, average_capacity
from .block import Layout


def price(layers: Sequence[Geometry], plan: Plan, dtype: torch.dtype, length: int) -> tuple[int, int]:
    """Bytes of one request over all layers: its states, and vLLM's own cache at `length` tokens."""
    state = full = 0
    for layer, policy in zip(layers, plan.policies, strict=True):
        if average_capacity(policy) is None:
            raise ValueError("'full' is not bounded: serve with plain vLLM, or give a capacity, e.g. tova:512")
        size = layer.head_size
        state += Layout(policy, layer.heads, layer.kv_heads, size, size, dtype, layer.window).nbytes
        full += min(length, layer.window or length) * layer.slot_bytes(dtype)
    return state, full
