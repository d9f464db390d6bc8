"""Models of a given shape with random weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from ..hf import load as models

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512,
    },
    "llama-2-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
}  # fmt: skip


def config(shape: str, **changes: float) -> PreTrainedConfig:
    """The configuration of a named shape, or that of a model: a hub name or a folder."""
    if shape in SHAPES:
        return LlamaConfig(**(SHAPES[shape] | changes), eos_token_id=None)
    if "/" not in shape and not shape.startswith("."):
        raise ValueError(f"unknown shape {shape!r}; allowed: {', '.join(SHAPES)}, a hub name (org/model) or a folder")
    return models.config(shape)


def make(shape: str, dtype: torch.dtype, device: str, seed: int = 0, **changes: float) -> PreTrainedModel:
    """A model of that shape with random weights, on the device from the start."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config(shape, **changes), dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


@torch.no_grad()
def steady(model: PreTrainedModel, strength: float = 4.0) -> None:
    """Steady attention, for a model with query biases: a token's weight is similar from row to row.

    Every head's queries share a direction, in the dimensions that rotate slowly. With plain random weights the rows are
    unrelated, which no trained model's are, and which is the scan's worst case. A trained model's are more alike still
    (benchmarks/near_decisions.py).
    """
    for name, bias in model.named_parameters():
        if name.endswith("q_proj.bias"):
            half = bias.view(model.config.num_attention_heads, 2, -1)
            slow = half.shape[2] * 5 // 8
            half.zero_()
            half[:, :, slow:] = strength * torch.randn_like(half[:, :, slow:])


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights a step must read: all but the embedding's, of which it reads one row per sequence."""
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return int(total if embedding is head else total - embedding.numel() * embedding.element_size())
