"""One layer's attention inside vLLM: the recurrence on the slots in the requests' blocks."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ..core.attention import Attention
from ..core.heads import LayerSlots
from . import refusals, settings
from .backend import Metadata, backend_for
from .batch import attend, attend_piece
from .block import Layout
from .host import reserve_ring
from .lane_count import lane_count
from .pool import STATES
from .shard import attention_of, own_share
from .warmup import seconds, warm_up

logger = init_logger("vllm.msrnn")


class BoundedImpl(AttentionImpl[Metadata]):  # type: ignore[misc]
    """One per layer; the arguments are vLLM's. What would change what a layer sees is refused."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> None:
        config = get_current_vllm_config()
        refusals.check(config)
        refusals.check_layer(
            alibi_slopes=alibi_slopes,
            logits_soft_cap=logits_soft_cap,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            **extra,
        )
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.sinks, self.softcap, self.window = sinks, logits_soft_cap or None, sliding_window
        self._layers = config.compilation_config.static_forward_context
        self._config = config
        self._layouts: dict[torch.dtype, Layout] = {}

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Now the layer has a name, and so a policy; its backend class tells vLLM the size of a block.

        A window of the model's own is part of that: to vLLM all layers look alike.
        """
        settings.resolve(self._config.model_config)  # weights that are loaded again, and another engine came meanwhile
        name, layer = next((name, layer) for name, layer in self._layers.items() if getattr(layer, "impl", 0) is self)
        policy = settings.policy_of(extract_layer_index(name))
        self.policy = own_share(policy, self.num_kv_heads)
        layer.attn_backend, layer.sliding_window = backend_for(policy, self.num_heads, self.window), None

    @cached_property
    def attention(self) -> Attention:
        return attention_of(self.policy, self.num_heads, self.scale, self.softcap, self.sinks, self.window)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [tokens, H, D], key [tokens, G, D], value [tokens, G, V] -> output [tokens, H, V], filled in place."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("msrnn's attention does not quantise its output")
        if attn_metadata is None:  # vLLM's memory profile, before there are blocks
            self.warm_up(layer, query, key, value)
            return output.zero_()
        own = self.policy, self.attention, output
        if attn_metadata.turns is None:
            attend(self.blocks(layer), attn_metadata, query, key, value, *own)
        else:
            attend_piece(layer, partial(self.blocks, layer), attn_metadata, query, key, value, *own)
        return output

    def warm_up(self, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
        """On a GPU: compile what requests will need, and take as much memory as they will, so that vLLM counts it."""
        if query.is_cuda:
            layout = self.layout(layer, query.dtype)
            before = sum(seconds.values())
            requests = self._config.scheduler_config.max_num_seqs
            if (transfer := self._config.kv_transfer_config) and transfer.kv_connector_extra_config.get(STATES):
                reserve_ring(query.device)
            kinds, lanes = settings.kind_count(), lane_count(self._config)
            warm_up(layout, query, key, value, self.attention, requests, kinds, lanes)
            if (total := sum(seconds.values())) > before:
                parts = ", ".join(f"{part} {taken:.1f}" for part, taken in seconds.items())
                logger.info("kernels compiled and reads captured in %.1f s so far (%s)", total, parts)

    def layout(self, layer: Any, dtype: torch.dtype | None = None) -> Layout:
        dtype = layer.kv_cache.dtype if dtype is None else dtype
        if dtype not in self._layouts:
            sizes = (self.num_heads, self.num_kv_heads, self.head_size, layer.head_size_v)
            self._layouts[dtype] = Layout(self.policy, *sizes, dtype, self.window)
        return self._layouts[dtype]

    def blocks(self, layer: Any) -> LayerSlots:
        """The layer's memory as slots, one row per block.

        Views are made anew every time: vLLM gives layers temporary memory while it measures, and must get it back.
        """
        return self.layout(layer).carve(layer.kv_cache)
