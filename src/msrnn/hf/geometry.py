"""What a model's config says about its attention layers, and which models cannot be bounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from ..core.formats import slot_bytes
from ..core.slots import NO_SOFTCAP
from ..plan import Plan
from ..policy import KV

_BOUNDED = ("full_attention", "sliding_attention")
_STATELESS = ("conv", "linear_attention", "mamba", "moe", "mlp")  # layers that hold no row per token


class Unsupported(ValueError):
    """A model that cannot be bounded, or not yet."""


@dataclass(frozen=True)
class Geometry:
    """The shape of one attention layer: what one slot costs, and the layer's own sliding window."""

    index: int
    heads: int
    kv_heads: int
    head_size: int
    window: int | None

    def slot_bytes(self, dtype: torch.dtype, scope: str = "layer", kv: KV | None = None) -> int:
        """Keys and values of one token; where every query head decides on its own, each has its own."""
        stored = self.heads if scope == "query_head" else self.kv_heads
        return stored * slot_bytes(kv, self.head_size, self.head_size, dtype)


def text_config(model: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    config = model.config if isinstance(model, PreTrainedModel) else model
    return config.get_text_config(decoder=True)


def check_soft_cap(model: PreTrainedModel | PreTrainedConfig, plan: Plan) -> None:
    """Refuse a residual where logits have a soft cap: its logit is then not the mean of those of its tokens."""
    config = text_config(model)
    if getattr(config, "attn_logit_softcapping", None) and any(policy.residual is not None for policy in plan.parts):
        raise Unsupported(f"{config.model_type}: {NO_SOFTCAP}")


def geometry(model: PreTrainedModel | PreTrainedConfig) -> list[Geometry]:
    """The layers that can be bounded; refuses by name what cannot."""
    config = text_config(model)
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False) or getattr(model, "is_encoder_decoder", False):
        raise Unsupported(f"{name} is an encoder-decoder; msrnn bounds decoders only")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise Unsupported(f"{name} caches latent attention (kv_lora_rank), not keys and values; msrnn cannot bound it")
    if getattr(config, "num_kv_shared_layers", None):
        raise Unsupported(f"{name} shares keys and values between layers; msrnn cannot bound it yet")
    types, _ = get_layer_types_and_kwargs(config)
    unknown = sorted(set(types) - {*_BOUNDED, *_STATELESS})
    if unknown:
        raise Unsupported(f"{name} has layers of type {', '.join(unknown)}; msrnn can bound {', '.join(_BOUNDED)}")
    bounded = [(index, kind) for index, kind in enumerate(types) if kind in _BOUNDED]
    if not bounded or "mamba" in name:
        raise Unsupported(f"{name} has no attention layers that hold keys and values; there is nothing to bound")
    if not hasattr(config, "num_attention_heads"):
        raise Unsupported(f"{name} has no attention heads; there is nothing to bound")
    return [_layer(config, index, kind == "sliding_attention") for index, kind in bounded]


def _layer(config: PreTrainedConfig, index: int, slides: bool) -> Geometry:
    if getattr(config, "is_heterogeneous", False):  # head sizes that differ by layer, as in Gemma 4
        config = config.per_layer_config[index]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(index, heads, kv_heads, size, getattr(config, "sliding_window", None) if slides else None)


def same_shape(one: PreTrainedConfig, other: PreTrainedConfig) -> bool:
    """Whether two models can share a cache: one and the same, or two copies."""
    names = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    return one is other or all(getattr(one, name, None) == getattr(other, name, None) for name in names)
