"""Requests that begin with a prefix start from its saved state.

vLLM's KV connector is its interface for keys and values from elsewhere: the scheduler asks how many of a prompt's
tokens need not be computed, and the workers fill the request's blocks before the batch runs. Here they come from a
state file, made by `msrnn state build`. A prompt is compared with the prefix token by token, so a request never starts
from a state that does not match it. vLLM counts positions on from the prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from ..core.slots import Slots, lowest_empty
from . import metrics, settings
from .backend import bounded_layers
from .plugin import Refused
from .prefix import FILES, Prefix, read_prefixes

logger = init_logger("vllm.msrnn")


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """Which prefix goes into which block before a batch."""

    pairs: list[tuple[str, int]] = field(default_factory=list)


class PrefixConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM creates one in the scheduler and one in every worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        files = vllm_config.kv_transfer_config.kv_connector_extra_config.get(FILES, {})
        self.prefixes = read_prefixes(tuple(sorted(files.items())))
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise Refused("prefixes need all layers in one KV cache group of vLLM, and this model has several")
        self.loads = Loads()
        self.layers = vllm_config.compilation_config.static_forward_context
        self.counters: Any = None
        model = vllm_config.model_config
        for prefix in self.prefixes.values():
            prefix.check(model.model, model.revision, model.dtype, [str(policy) for policy in settings.policies()])

    # Called in the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        prefix = None if num_computed_tokens else self.match(request)
        return (0 if prefix is None else len(prefix.tokens)), False

    def match(self, request: Any) -> Prefix | None:
        """The longest prefix that a request begins with; if it names one (`prefix_id`), that one or none."""
        name = ((request.sampling_params and request.sampling_params.extra_args) or {}).get("prefix_id")
        candidates: Iterable[Prefix] = self.prefixes.values()
        if name is not None:
            candidates = [prefix for prefix in candidates if prefix.name == name]
        matches = [prefix for prefix in candidates if prefix.matches(request.prompt_token_ids or ())]
        if name is not None and not matches:
            logger.warning("request %s names the prefix %r, but does not begin with it", request.request_id, name)
        return max(matches, key=lambda prefix: len(prefix.tokens), default=None)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        prefix = self.match(request)
        assert prefix is not None, "it matched in get_num_new_matched_tokens"
        ((block,),) = blocks.get_block_ids()
        self.loads.pairs.append((prefix.name, block))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self.loads = self.loads, Loads()
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None

    # Called in a worker.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the batch runs: copy every layer's slots of the prefix into the request's block."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for name, block in loads.pairs:
            self.load(self.prefixes[name], block)
        if loads.pairs and metrics.enabled():
            self.count(loads)

    def load(self, prefix: Prefix, block: int) -> None:
        for name, layer in bounded_layers(self.layers).items():
            copy_prefix(layer.impl.blocks(layer), block, prefix, extract_layer_index(name))

    def count(self, loads: Loads) -> None:
        if self.counters is None:
            from prometheus_client import Counter

            about = "Requests that started from a prefix's state, and the tokens they did not have to read."
            self.counters = [Counter(f"msrnn_prefix_{unit}", about, ["prefix_id"]) for unit in ("hits", "tokens")]
        hits, tokens = self.counters
        for name, _ in loads.pairs:
            hits.labels(name).inc()
            tokens.labels(name).inc(len(self.prefixes[name].tokens))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loaded before the batch began."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def copy_prefix(blocks: Slots, block: int, prefix: Prefix, layer: int) -> None:
    """Copy a layer's slots, or those of this process's share of its heads, into a block."""
    rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    for name, target in blocks.tensors().items():
        if name in ("next", "seen"):
            continue
        source = prefix.tensors[f"{layer}.{name}"][0]
        local = source if len(source) == target.shape[1] else source.chunk(world)[rank]
        if local.shape != target.shape[1:]:
            shapes = f"{tuple(source.shape)} do not fit {tuple(target.shape[1:])}"
            raise Refused(f"prefix {prefix.name}: its {name} {shapes}")
        target[block] = local.to(target.device)
    blocks.next[block] = lowest_empty(blocks.positions[block : block + 1])[0]
    blocks.seen[block] = len(prefix.tokens)
