"""Requests that begin as a prefix or an earlier prompt did start from its state.

vLLM's KV connector is its interface for keys and values from elsewhere: the scheduler asks how many of a prompt's
tokens need not be computed, and the workers fill the request's blocks before the batch runs. Here they come from a
state file, made by `msrnn state build`, or from the pool of states that earlier requests left (`pool.py`). A prompt is
compared with a file token by token, and with the pool by a cryptographic hash of all its tokens, so a request never
starts from a state that does not match it. vLLM counts positions on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
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

from ..core.heads import LayerSlots, parts_of
from ..core.slots import Slots, lowest_empty
from . import metrics, settings
from .backend import bounded_layers
from .batch import Keep
from .host import HostPool
from .lane_count import least_in_pieces
from .plugin import Refused
from .pool import EVERY, INTERVAL, STATES, Index, kept_between, keys_of
from .prefix import FILES, Prefix, read_prefixes

logger = init_logger("vllm.msrnn")


@dataclass
class Copies(KVConnectorMetadata):  # type: ignore[misc]
    """What a worker copies: files (prefix, block) and loads (place, block) before a batch, saves (place: block) after.

    Within a batch that reads one prompt its block is also copied at `stops` (place: position, block), after so many
    tokens of the text. For the metrics: the tokens that the loads spare, and the states in the pool and evicted from it
    so far.
    """

    files: list[tuple[str, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: dict[int, int] = field(default_factory=dict)
    stops: dict[int, tuple[int, int]] = field(default_factory=dict)
    tokens: int = 0
    states: int = 0
    evictions: int = 0


@dataclass
class _Running:
    """A request that vLLM has given a block. `outdated`: it has read some of its text with other weights."""

    request: Any
    block: int
    outdated: bool = False


class PrefixConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM creates one in the scheduler and one in every worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.prefixes = read_prefixes(tuple(sorted(options.get(FILES, {}).items())))
        self.states, self.every = int(options.get(STATES, 0)), int(options.get(EVERY, INTERVAL))
        if len(kv_cache_config.kv_cache_groups) > 1:
            if self.prefixes:
                raise Refused("prefixes need all layers in one KV cache group of vLLM, and this model has several")
            logger.warning("states are not reused: this model's layers are in several KV cache groups of vLLM")
            self.states = 0
        self.copies = Copies()
        self.layers = vllm_config.compilation_config.static_forward_context
        model = vllm_config.model_config
        settings.resolve(model)
        for prefix in self.prefixes.values():
            prefix.check(model.model, model.revision, model.dtype, [str(policy) for policy in settings.policies()])
        # In the scheduler:
        self.index = Index(self.states)
        self.keys: dict[str, list[bytes]] = {}
        self.matches: dict[str, Prefix | None] = {}
        self.running: dict[str, _Running] = {}
        self.least_in_pieces = least_in_pieces(vllm_config)
        # In a worker:
        self.pool: HostPool | None = None
        self.files: HostPool | None = None  # the prefixes, in their order
        self.saved: set[str] = set()  # layers whose part of this batch's saves is copied
        self.stopped = False  # whether this batch is read in pieces that end at its stops
        self.missed = False  # whether the last one was not, though it had some
        self.counters: metrics.PrefixMeter | None = None

    # Called in the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if num_computed_tokens or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        prefix = self.match(request)
        return max(0 if prefix is None else len(prefix.tokens), self.match_pool(request)), False

    def match(self, request: Any) -> Prefix | None:
        """The longest prefix that a request begins with; if it names one (`prefix_id`), that one or none.

        Remembered, as vLLM asks again whenever it tries to schedule a request that waits.
        """
        if request.request_id not in self.matches:
            self.matches[request.request_id] = self.find(request)
        return self.matches[request.request_id]

    def find(self, request: Any) -> Prefix | None:
        """Files hold states of the plain model and of text: none for LoRA adapters, images and embeddings."""
        if not self.prefixes or request.lora_request is not None or not is_text(request):
            return None
        name = ((request.sampling_params and request.sampling_params.extra_args) or {}).get("prefix_id")
        candidates: Iterable[Prefix] = self.prefixes.values()
        if name is not None:
            candidates = [prefix for prefix in candidates if prefix.name == name]
        matches = [prefix for prefix in candidates if prefix.matches(request.prompt_token_ids or ())]
        if name is not None and not matches:
            logger.warning("request %s names the prefix %r, but does not begin with it", request.request_id, name)
        return max(matches, key=lambda prefix: len(prefix.tokens), default=None)

    def match_pool(self, request: Any) -> int:
        """How many tokens of a request the longest state in the pool has read; its last token must be computed."""
        return self.index.longest(self.keys_of(request)[: (request.num_tokens - 1) // self.every]) * self.every

    def keys_of(self, request: Any) -> list[bytes]:
        """The keys of a request's prompt; none where its tokens do not say all (images, embeddings)."""
        tokens = request.prompt_token_ids
        if not self.states or not tokens or not is_text(request) or request.sampling_params is None:
            return []
        keys = self.keys.get(request.request_id, [])
        if len(keys) != len(tokens) // self.every:
            keys = self.keys[request.request_id] = keys_of(tokens, self.every, isolation_of(request))
        return keys

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not self.states and not num_external_tokens:
            return
        ((block,),) = blocks.get_block_ids()
        old = self.running.get(request.request_id)
        # A session that takes more input keeps its block, and what it has read; who was preempted begins anew.
        outdated = old is not None and old.outdated and request.num_computed_tokens > 0
        self.running[request.request_id] = _Running(request, block, outdated)
        if not num_external_tokens:
            return
        prefix = self.match(request)
        if prefix is not None and len(prefix.tokens) == num_external_tokens:
            self.copies.files.append((prefix.name, block))
            return
        keys = self.keys_of(request)[: num_external_tokens // self.every]
        self.copies.loads.append((self.index.use(keys), block))
        self.copies.tokens += num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        copies, self.copies = self.copies, Copies()
        if self.states:
            self.add_saves(copies, scheduler_output.num_scheduled_tokens)
        copies.states, copies.evictions = len(self.index), self.index.evictions
        return copies

    def add_saves(self, copies: Copies, sizes: dict[str, int]) -> None:
        """What is kept of a batch: states at its end, and of a prompt that is read alone those before it, too."""
        # one that begins with a single token counts: vLLM may put it behind the prompt, where the worker reads both
        reads = sum(size > 1 or not self.running[name].request.num_computed_tokens for name, size in sizes.items())
        in_pieces = reads == 1 and self.least_in_pieces is not None and sum(sizes.values()) >= self.least_in_pieces
        for name, size in sizes.items():
            running = self.running[name]
            request, block = running.request, running.block
            keys, end = [] if running.outdated else self.keys_of(request), request.num_computed_tokens + size
            start = end - size if in_pieces else end - 1
            for position in kept_between(start, end, request.num_prompt_tokens, self.every) if keys else ():
                place = self.index.add(keys[: position // self.every])
                if place is None:
                    continue
                copies.saves.pop(place, None)  # it may be that of an earlier state of this batch, which has just left
                copies.stops.pop(place, None)
                if position == end:
                    copies.saves[place] = block
                else:
                    copies.stops[place] = position, block

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self.keys.pop(request.request_id, None)
        self.matches.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """vLLM asks for it where states are of no use any more, as with new weights.

        Requests that run on have read some of their text with the old ones, until they are given a block anew.
        """
        self.index.clear()
        for running in self.running.values():
            running.outdated = True
        return True

    # Called in a worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the pool's memory before the first request comes; once, as the scheduler counts on what is in it."""
        if self.states and self.pool is None:
            self.pool = HostPool(self.states, list(self.blocks().values()))
        if self.prefixes and self.files is None:
            self.files = HostPool(len(self.prefixes), list(self.blocks().values()), saves=False)
            for place, prefix in enumerate(self.prefixes.values()):
                self.lay_out(self.files, place, prefix)

    def shutdown(self) -> None:
        for pool in (self.pool, self.files):
            if pool is not None:
                pool.close()
        self.pool = self.files = None

    def lay_out(self, pool: HostPool, place: int, prefix: Prefix) -> None:
        """Put a file's state into a pool as it lies in a request's block, so that every layer is one copy."""
        for memory, (name, layer) in zip(pool.memory, bounded_layers(self.layers).items(), strict=True):
            copy_prefix(layer.impl.layout(layer).carve(memory), place, prefix, extract_layer_index(name))

    def blocks(self) -> dict[str, Tensor]:
        """Every layer's blocks as bytes, [blocks, bytes]; anew every time, as vLLM may move them."""
        return {name: bytes_of(layer) for name, layer in bounded_layers(self.layers).items()}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of every layer in the pool."""
        return {name: number for number, name in enumerate(bounded_layers(self.layers))}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the batch runs: copy states into the blocks of requests that start from one."""
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        if self.missed:
            raise RuntimeError(
                "states within a prompt were to be kept, but vLLM read it in one pass; please report this, and start "
                "with --prefix-pool 0"
            )
        places = list(self.prefixes)
        self.load(self.files, [(places.index(name), block) for name, block in copies.files])
        self.load(self.pool, copies.loads)

    def load(self, pool: HostPool | None, loads: Sequence[tuple[int, int]]) -> None:
        if loads:
            assert pool is not None
            layers = list(self.blocks().values())
            for place, block in loads:
                pool.load(layers, place, block)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loaded before the batch began."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer has run, and the others follow: time to copy its part of the states that are kept after the batch.

        Of a prompt in pieces it may be any piece, so the end of the batch is waited for.
        """
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        if copies.saves and attn_metadata.turns is None:
            self.save_all(copies, layer_name, bytes_of(self.layers[layer_name]))

    def save_all(self, copies: Copies, name: str, blocks: Tensor) -> None:
        for place, block in copies.saves.items():
            self.save(name, blocks[block], place)
        self.saved.add(name)

    def save(self, name: str, state: Tensor, place: int) -> None:
        assert self.pool is not None
        self.pool.save(self.numbers[name], state, place)

    def stops(self) -> dict[int, Keep]:
        """For a batch that is read in pieces: where one must end, and what keeps a layer's part of the state then."""
        if not self.has_connector_metadata():
            return {}
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        self.stopped = True
        return {position: partial(self.keep, block, place) for place, (position, block) in copies.stops.items()}

    def keep(self, block: int, place: int, layer: Any) -> None:
        self.save(layer.layer_name, bytes_of(layer)[block], place)

    def wait_for_save(self) -> None:
        """After the batch: what no layer has copied, as within a CUDA graph.

        vLLM calls this after an error of the batch, too, and that one is to be seen: a missed stop is raised when the
        next batch comes, before anything is loaded.
        """
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        self.missed = bool(copies.stops) and not self.stopped
        if copies.saves:
            for name, blocks in self.blocks().items():
                if name not in self.saved:
                    self.save_all(copies, name, blocks)
        self.saved, self.stopped = set(), False
        if metrics.enabled():
            self.count(copies)

    def count(self, copies: Copies) -> None:
        if self.counters is None:
            self.counters = metrics.PrefixMeter(0 if self.pool is None else self.pool.state_bytes)
        for name, _ in copies.files:
            self.counters.count_file(name, len(self.prefixes[name].tokens))
        if self.pool is not None:
            self.counters.count_pool(len(copies.loads), copies.tokens, copies.states, copies.evictions)


def is_text(request: Any) -> bool:
    """Whether the tokens of a request's prompt say all of it: chats with embeddings have both."""
    return not request.mm_features and getattr(request, "prompt_embeds", None) is None


def isolation_of(request: Any) -> str:
    """What besides its tokens tells a request's states from another's."""
    adapter = request.lora_request
    lora = None if adapter is None else (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
    return repr((request.cache_salt, lora))


def bytes_of(layer: Any) -> Tensor:
    """A layer's blocks, [blocks, bytes]."""
    memory: Tensor = layer.kv_cache.view(torch.uint8)
    return memory.as_strided((len(memory), layer.impl.layout(layer).nbytes), (memory.stride(0), 1))


def copy_prefix(blocks: LayerSlots, block: int, prefix: Prefix, layer: int) -> None:
    """Copy a layer's slots in a file, or those of this process's share of its heads, into a block."""
    slots, numbers = parts_of(blocks), prefix.numbers(layer)
    if len(numbers) > len(slots):  # KV heads with budgets of their own, of which this process holds some
        first = get_tensor_model_parallel_rank() * len(slots)
        numbers = numbers[first : first + len(slots)]
    for one, number in zip(slots, numbers, strict=True):
        _copy_part(one, block, prefix, number)


def _copy_part(blocks: Slots, block: int, prefix: Prefix, number: int) -> None:
    rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    for name, target in blocks.tensors().items():
        if name in ("next", "seen"):
            continue
        source = prefix.tensors[f"{number}.{name}"][0]
        first = 0 if len(source) == target.shape[1] else rank * len(source) // world  # processes may share a KV head
        local = source[first : first + target.shape[1]]
        if local.shape != target.shape[1:]:
            shapes = f"{tuple(source.shape)} do not fit {tuple(target.shape[1:])}"
            raise Refused(f"prefix {prefix.name}: its {name} {shapes}")
        target[block] = local
    blocks.next[block] = lowest_empty(blocks.positions[block : block + 1])[0]
    blocks.seen[block] = len(prefix.tokens)
