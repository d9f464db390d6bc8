"""The attention backend that vLLM sees: the size of a block, the metadata of a batch, the implementation class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..core.heads import parts_of
from ..plan import LayerPolicy, parts
from . import metrics
from .batch import Batch, StaticInputs, batch_of
from .block import clear
from .plugin import Refused
from .spec import BoundedSpec, bounded_spec


class BoundedBackend(AttentionBackend):  # type: ignore[misc]
    """Attention over bounded states. Once the model is loaded, a layer gets a subclass by its policy: `backend_for`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

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
        """Whole blocks, in an order that no other backend has.

        vLLM refuses to start where workers differ in this: a worker without the policy cannot run unbounded.
        """
        return KVCacheLayout.LBHNC, KVCacheLayout.LBNHC

    @classmethod
    def customize_spec(cls, spec: Any) -> BoundedSpec:
        raise Refused(f"a layer has no policy yet, because vLLM asks for its block size before it is loaded: {spec}")


def backend_for(policy: LayerPolicy, heads: int, window: int | None = None) -> type[BoundedBackend]:
    """The backend class of layers with this policy, so many query heads and this window of the model's own.

    vLLM asks the class, not a layer, for the size of a block; so there is one class for each size.
    """
    return _backend(policy, heads, window)  # to `cache`, a default that is given is another call than one left out


@cache
def _backend(policy: LayerPolicy, heads: int, window: int | None) -> type[BoundedBackend]:

    class LayerBackend(BoundedBackend):
        @classmethod
        def customize_spec(cls, spec: Any) -> BoundedSpec:
            return bounded_spec(spec, policy, heads, window)

    return LayerBackend


def bounded_layers(layers: dict[str, Any]) -> dict[str, Any]:
    """Those of vLLM's layers whose backend is ours, by name."""
    backends = {name: getattr(layer, "attn_backend", None) for name, layer in layers.items()}
    ours = [name for name, kind in backends.items() if isinstance(kind, type) and issubclass(kind, BoundedBackend)]
    return {name: layers[name] for name in ours}


@dataclass
class Metadata(Batch, AttentionMetadata):  # type: ignore[misc]
    """A batch, as vLLM passes it to every layer."""


class Builder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    """Builds the metadata of a batch once for all layers."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layers = vllm_config.compilation_config.static_forward_context
        self.publishes = metrics.enabled() and layer_names[0] == next(iter(bounded_layers(self.layers)), None)
        self.meter: metrics.Meter | None = None
        captured = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
        self.inputs = StaticInputs(max(vllm_config.scheduler_config.max_num_seqs, captured), device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        blocks, seen = self.inputs.put(common.block_table_tensor[:, 0], common.compute_num_computed_tokens())
        starts = common.query_start_loc_cpu.tolist()
        metadata = Metadata(**vars(batch_of(blocks, seen, starts, seen_on_host(common, starts))))
        if metadata.begins:
            self.clear(metadata)
        if self.publishes:
            self.publish(metadata)
        return metadata

    def clear(self, metadata: Metadata) -> None:
        """Empty the blocks of requests whose first token is a step: here, so that a CUDA graph need not do it."""
        rows = slice(0, metadata.steps)
        for layer in (self.layers[name] for name in self.layer_names):
            for slots in parts_of(layer.impl.blocks(layer)):
                clear(slots, metadata.blocks[rows], metadata.seen[rows])
        metadata.begins = False

    def publish(self, metadata: Metadata) -> None:
        """Update /metrics with what the requests of this batch hold now; of KV heads with budgets, the first counts."""
        first = self.layers[self.layer_names[0]]
        if self.meter is None:
            layouts = (layer.impl.layout(layer) for layer in bounded_layers(self.layers).values())
            request_bytes = sum(layout.nbytes for layout in layouts)
            self.meter = metrics.meter(parts(first.impl.policy)[0].capacity or 0, request_bytes)
        positions = parts_of(first.impl.blocks(first))[0].positions
        self.meter.update(positions, metadata.blocks, metadata.seen_list, metadata.sizes)


def seen_on_host(common: CommonAttentionMetadata, starts: list[int]) -> list[int]:
    """The tokens that each request had read before a batch, without a wait for the device.

    vLLM's upper bound is exact but for tokens that speculative decoding takes back, which is refused.
    """
    ends = getattr(common, "seq_lens_cpu_upper_bound", None)
    lengths = common.seq_lens.tolist() if ends is None else ends.tolist()
    sizes = (end - start for start, end in pairwise(starts))
    return [max(0, length - size) for length, size in zip(lengths, sizes, strict=False)]
