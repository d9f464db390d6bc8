"""What a request costs inside vLLM: the bytes of its blocks, one per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from ..hf.geometry import Geometry, Unsupported, geometry
from ..policy import Plan
from .block import Layout


def layers_of(config: PreTrainedConfig) -> list[Geometry]:
    """The model's layers; refuses by name what cannot be bounded inside vLLM."""
    layers = geometry(config)
    sliding = sorted({layer.window for layer in layers if layer.window is not None})
    if sliding:
        raise Unsupported(
            f"{config.model_type} has layers with a sliding window of {sliding[0]:,}; not supported inside vLLM yet, "
            "use msrnn generate"
        )
    return layers


def price(layers: Sequence[Geometry], plan: Plan, dtype: torch.dtype, length: int) -> tuple[int, int]:
    """Bytes of one request over all layers: its states, and vLLM's own cache at `length` tokens."""
    state = full = 0
    for layer, policy in zip(layers, plan.policies, strict=True):
        if policy.capacity is None:
            raise ValueError("'full' is not bounded: serve with plain vLLM, or give a capacity, e.g. tova:512")
        size = layer.head_size
        state += Layout(policy, layer.heads, layer.kv_heads, size, size, dtype).nbytes
        full += length * layer.slot_bytes(dtype)
    return state, full
