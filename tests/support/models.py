"""Tiny random models for tests: small enough that a test runs in milliseconds, varied enough that texts differ."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(attention: str = "sdpa", *, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Three layers, grouped-query attention, 64 tokens: `tiny_llama("eager", hidden_size=64)` changes the config."""
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(**(shape | changes))
    config._attn_implementation = attention
    return LlamaForCausalLM(config).eval()
