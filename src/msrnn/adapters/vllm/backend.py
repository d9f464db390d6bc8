"""The attention backend: which spec, which metadata, which implementation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
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

from ...policy import Policy
from . import metrics
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
        return False

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
class Metadata(AttentionMetadata):  # type: ignore[misc]
    """A batch: requests with one new token come first, then those with more.

    blocks [R], seen [R] (tokens before this batch), starts [R + 1] (where a request's new tokens begin).
    """

    steps: int
    longest: int
    blocks: Tensor
    seen: Tensor
    starts: list[int]
    block_list: list[int]
    seen_list: list[int]


class Builder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    """Everything that a layer needs to know of a batch, worked out once for all layers."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layers = vllm_config.compilation_config.static_forward_context
        self.counts = metrics.wanted() and layer_names[0] == next(iter(bounded_layers(self.layers)), None)
        self.meter: metrics.Meter | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        steps = next((row for row, length in enumerate(lengths) if length > 1), len(lengths))
        blocks, seen = common.block_table_tensor[:, 0].long(), common.compute_num_computed_tokens().long()
        on_host = steps < len(lengths) or blocks.device.type == "cpu"  # a batch of steps needs no word from the device
        block_list, seen_list = (blocks.tolist(), seen.tolist()) if on_host else ([], [])
        longest = max(seen_list[:steps], default=0)
        if self.counts and on_host:
            self.count(blocks, seen_list, starts[-1])
        return Metadata(steps, longest, blocks, seen, starts, block_list, seen_list)

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
