"""Requests that begin with a prefix start from its state.

vLLM has a seam for keys and values that come from elsewhere, the KV connector: its scheduler asks how many of a
prompt's tokens need not be computed, and its workers are told to fill the request's blocks before the batch runs. What
comes from elsewhere here is a state, made by `msrnn state build`. A prompt is compared with the prefix token by token,
so a request can never start from what it does not begin with; positions go on after the prefix by themselves.
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

from ..core.slots import Slots
from . import metrics, settings
from .backend import bounded_layers
from .plugin import Refused
from .prefix import FILES, Prefix, read_all

logger = init_logger("vllm.msrnn")


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """Which prefix goes into which block before a batch."""

    into: list[tuple[str, int]] = field(default_factory=list)


class PrefixConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes one in the scheduler and one in every worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config.get(FILES, {})
        self.prefixes = read_all(tuple(sorted(given.items())))
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise Refused("prefixes need all layers in one group of vLLM's memory, and this model has several")
        self.loads = Loads()
        self.layers = vllm_config.compilation_config.static_forward_context
        self.hits: Any = None
        model = vllm_config.model_config
        for prefix in self.prefixes.values():
            prefix.check(model.model, model.revision, model.dtype, [str(policy) for policy in settings.policies()])

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        prefix = None if num_computed_tokens else self.match(request)
        return (0 if prefix is None else len(prefix.tokens)), False

    def match(self, request: Any) -> Prefix | None:
        """The longest prefix that a request begins with, or the one that it names, if it does begin with that."""
        named = ((request.sampling_params and request.sampling_params.extra_args) or {}).get("prefix_id")
        candidates: Iterable[Prefix] = self.prefixes.values()
        if named is not None:
            candidates = [prefix for prefix in candidates if prefix.name == named]
        found = [prefix for prefix in candidates if prefix.begins(request.prompt_token_ids or ())]
        if named is not None and not found:
            logger.warning("request %s names the prefix %r, but does not begin with it", request.request_id, named)
        return max(found, key=lambda prefix: len(prefix.tokens), default=None)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        prefix = self.match(request)
        assert prefix is not None, "it matched when it was asked"
        ((block,),) = blocks.get_block_ids()
        self.loads.into.append((prefix.name, block))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self.loads = self.loads, Loads()
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None

    # In a worker.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the batch runs: every layer's state of the prefix goes into the request's block."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for name, block in loads.into:
            self.load(self.prefixes[name], block)
        if loads.into and metrics.wanted():
            self.count(loads)

    def load(self, prefix: Prefix, block: int) -> None:
        for name, layer in bounded_layers(self.layers).items():
            put(layer.impl.blocks(layer), block, prefix, extract_layer_index(name))

    def count(self, loads: Loads) -> None:
        if self.hits is None:
            from prometheus_client import Counter

            about = "Requests that started from a prefix's state, and the tokens they did not have to read."
            self.hits = [Counter(f"msrnn_prefix_{what}", about, ["prefix_id"]) for what in ("hits", "tokens")]
        for name, _ in loads.into:
            self.hits[0].labels(name).inc()
            self.hits[1].labels(name).inc(len(self.prefixes[name].tokens))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loaded before the batch began."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def put(blocks: Slots, block: int, prefix: Prefix, layer: int) -> None:
    """A layer's state, or this process's share of its heads, into a block."""
    rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    for name, into in blocks.tensors().items():
        if name in ("next", "seen"):
            continue
        whole = prefix.tensors[f"{layer}.{name}"][0]
        mine = whole if len(whole) == into.shape[1] else whole.chunk(world)[rank]
        if mine.shape != into.shape[1:]:
            raise Refused(f"prefix {prefix.name}: its {name} {tuple(whole.shape)} do not fit {tuple(into.shape[1:])}")
        into[block] = mine.to(into.device)
    blocks.next[block] = blocks.positions[block].argmin(-1)
    blocks.seen[block] = len(prefix.tokens)
