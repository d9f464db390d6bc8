"""The attention backend: which spec, which metadata, which implementation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..policy import Policy
from . import metrics
from .batch import Batch, Fixed, batch_of
from .plugin import Refused
from .spec import BoundedSpec, bounded


class BoundedBackend(AttentionBackend):  # type: ignore[misc]
    """Attention over bounded states. A layer's own policy is known once the model is loaded: see `of`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True
    layer: ClassVar[tuple[Policy, int] | None] = None

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        from .impl import BoundedImpl

        return BoundedImpl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True  # our own; others are refused

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Whole blocks, in an order that no other backend asks for.

        vLLM ends the start where workers differ in this: so one that the policy did not reach cannot go on unbounded.
        """
        return KVCacheLayout.LBHNC, KVCacheLayout.LBNHC

    @classmethod
    def customize_spec(cls, spec: Any) -> BoundedSpec:
        if cls.layer is None:
            raise Refused(f"a layer was not bounded, because vLLM asks for its memory before it is loaded: {spec}")
        return bounded(spec, *cls.layer)

    @staticmethod
    @cache
    def of(policy: Policy, heads: int) -> type[BoundedBackend]:
        """The backend of layers with this policy and so many query heads."""
        return type("BoundedBackend", (BoundedBackend,), {"layer": (policy, heads)})

    @classmethod
    def bounds(cls, layer: Any) -> bool:
        """Whether a layer of vLLM has a backend of ours."""
        backend = getattr(layer, "attn_backend", None)
        return isinstance(backend, type) and issubclass(backend, cls)


@dataclass
class Metadata(Batch, AttentionMetadata):  # type: ignore[misc]
    """A batch, as vLLM hands it to every layer."""


class Builder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    """Everything that a layer needs to know of a batch, worked out once for all layers."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layers = vllm_config.compilation_config.static_forward_context
        self.counts = metrics.wanted() and layer_names[0] == next(iter(bounded_layers(self.layers)), None)
        self.meter: metrics.Meter | None = None
        graphs = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
        self.fixed = Fixed(max(vllm_config.scheduler_config.max_num_seqs, graphs), device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        blocks, seen = self.fixed.put(common.block_table_tensor[:, 0], common.compute_num_computed_tokens())
        made = Metadata(**vars(batch_of(blocks, seen, common.query_start_loc_cpu.tolist())))
        if self.counts and made.seen_list:
            self.count(blocks, made.seen_list, made.starts[-1])
        return made

    def count(self, blocks: Tensor, seen: list[int], tokens: int) -> None:
        """Publish what the requests of this batch hold now."""
        first = self.layers[self.layer_names[0]]
        if self.meter is None:
            of = (layer.impl.layout(layer) for layer in bounded_layers(self.layers).values())
            carved = first.impl.blocks(first)
            self.meter = metrics.Meter(carved, first.impl.policy.capacity, sum(layout.nbytes for layout in of))
        self.meter.note(blocks, seen, tokens)


def bounded_layers(layers: dict[str, Any]) -> dict[str, Any]:
    """vLLM's layers that have a backend of ours, by name."""
    return {name: layer for name, layer in layers.items() if BoundedBackend.bounds(layer)}
