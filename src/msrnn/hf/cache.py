"""`cache(model, policy)`: a bounded `past_key_values` for any decoder of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ..budgets.profile import plan_for
from ..core.attention import Attention
from ..core.heads import LayerRecorder, LayerSlots, check_heads, empty_slots, parts_of, read, recorder
from ..core.recurrence import Prompt
from ..core.rules import announce_rule
from ..plan import LayerPolicy, Plan, PolicyLike
from .attention import BoundIgnored, Pending, outside_graphs, prepare
from .best import resolve
from .geometry import Geometry, Unsupported, check_soft_cap, geometry, text_config


def cache(
    model: PreTrainedModel,
    policy: PolicyLike,
    *,
    prompt: Prompt = "recurrent",
    length: int | None = None,
    chunk: int | None = None,
) -> BoundedCache:
    """A bounded `past_key_values` for `generate` or a plain forward.

    `policy` is text (`best:256`, `tova:512`, `window+4:1/8`, `h2o:2GiB`, `tova:256,profile=FILE`), a Policy, or one per
    layer. A fraction is of `length`, the model's trained context unless given; say how long the text will be where it
    is longer than that, as `best` has other budgets then. A profile made for another model is refused.
    `prompt="oneshot"` reads every call's tokens under full attention and only then drops down to the capacity, as the
    paper's released code does. `chunk`: tokens of a prompt whose evictions are one scan (256 on a GPU, 128 on a CPU);
    results depend on it by rounding only. transformers' continuous batching has a cache of its own and takes no
    `past_key_values`.

    >>> cache = msrnn.cache(model, "tova:512")
    >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=50)
    """
    if prompt not in ("recurrent", "oneshot"):
        raise ValueError(f"unknown prompt mode {prompt!r}; allowed: recurrent, oneshot")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    layers, policy = geometry(model), resolve(policy, model, length=length)
    length = length or getattr(text_config(model), "max_position_embeddings", None)
    plan = plan_for(policy, len(layers), length=length)
    shards = getattr(model, "tp_size", None) or 1
    if shards > 1 and plan.by_head:
        raise Unsupported(
            f"the model's heads are spread over {shards} processes; budgets by KV head need them in one (a device_map)"
        )
    if shards > 1 and any(policy.scope == "layer" and not policy.blind for policy in plan.parts):
        raise Unsupported(
            f"the model's heads are spread over {shards} processes, and the heads of a layer decide together; "
            "use a policy by head (tova-head, h2o) or a device_map"
        )
    for rule in {policy.rule for policy in plan.parts if policy.rule is not None}:
        announce_rule(rule)
    if prompt == "oneshot" and any(policy.residual is not None for policy in plan.parts):
        raise ValueError("a residual needs every eviction in its turn; use prompt='recurrent'")
    check_soft_cap(model, plan)
    for layer, own in zip(layers, plan.policies, strict=True):
        check_heads(own, layer.kv_heads)
    prepare(model)
    return BoundedCache(model, plan, layers, prompt, chunk)


class BoundedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's slots as transformers' caches see them."""

    is_sliding = False
    is_croppable = False
    is_first = False  # whether no other layer's state changes before this one's in a call

    def __init__(self, policy: LayerPolicy, prompt: Prompt = "recurrent", chunk: int | None = None) -> None:
        super().__init__()
        self.policy, self.prompt, self.chunk = policy, prompt, chunk
        self.slots: LayerSlots | None = None
        self.recorder: LayerRecorder | None = None
        self.pending: tuple[Tensor, Tensor] | None = None
        self.busy = False  # whether a call is at work on the slots, or was cut off there

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Slots are made at the first attention, when the number of query heads and the window are known."""

    @outside_graphs
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.pending is not None:
            raise BoundIgnored(
                "the last call was cut off before msrnn attended to its keys; reset() the cache and begin again"
            )
        self.pending = key_states.detach(), value_states.detach()
        return cast("tuple[Tensor, Tensor]", tuple(Pending(tensor, self) for tensor in self.pending))

    def take_pending(self) -> tuple[Tensor, Tensor]:
        """The keys and values of this call, once."""
        assert self.pending is not None, "check_tokens comes first"
        pending, self.pending = self.pending, None
        return pending

    @property
    def new_columns(self) -> int:
        return 0 if self.pending is None else self.pending[0].shape[2]

    @property
    def new_rows(self) -> int:
        return 0 if self.pending is None else len(self.pending[0])

    def refuse(self) -> None:
        """A call was refused before any slot changed: the first layer forgets it, so the cache is as before the call.

        In a later layer the call stays pending, as layers before it have read its tokens.
        """
        if self.is_first:
            self.pending = None

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        """query [B, H, T, D], real [B, T] -> [B, H, T, V]: the pending tokens go through the recurrence."""
        key, value = self.take_pending()
        if self.slots is None:
            self.slots = empty_slots(self.policy, key, value, query.shape[1], attention.window)
            self.is_initialized = True
        if self.slots.seen.device != key.device:  # loaded from a file, or moved by hand
            self.slots = self.slots.to(key.device)
        real = None if real is None else real.to(query.device)
        tokens = (query.detach(), key, value)
        return read(self.slots, *tokens, self.policy, attention, real, self.chunk, self.recorder, self.prompt)

    def check_tokens(self, query: Tensor) -> None:
        """The pending tokens must be like those that are held: compiled code sees memory, not tensors."""
        if self.pending is None:
            raise BoundIgnored("attention was asked for keys that this cache did not hand out")
        if self.slots is not None and len(self.slots.seen) != len(query):
            raise ValueError(
                f"the cache holds {len(self.slots.seen)} sequences, {len(query)} were given; use a new cache"
            )
        key, value = self.pending
        stored, sizes, dtype = self._held(key, value)
        fits = (key.shape[3], value.shape[3]) == sizes and query.shape[3] == key.shape[3]
        if not fits or stored % key.shape[1] or query.shape[1] % stored:
            theirs, ours = tuple(key.shape[1::2]), (stored, sizes[0])
            raise ValueError(f"the cache holds {ours} heads and their size, {theirs} were given; use a new cache")
        if not dtype == query.dtype == key.dtype == value.dtype:
            raise ValueError(f"the cache holds {dtype}, {key.dtype} was given; use a new cache")

    def _held(self, key: Tensor, value: Tensor) -> tuple[int, tuple[int, int], torch.dtype]:
        """Heads, their sizes and the dtype of the slots; while there are none, those of the first tokens."""
        if self.slots is None:
            return key.shape[1], (key.shape[3], value.shape[3]), key.dtype
        parts = parts_of(self.slots)
        return sum(part.keys.shape[1] for part in parts), self.slots.sizes, parts[0].dtype_for(key.dtype)

    def get_seq_length(self) -> int:
        """Columns fed, padding included: positions and masks count these, not the slots held."""
        return 0 if self.slots is None else self.slots.fed

    @outside_graphs
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1  # of the sequence, not of the state

    @property
    def batch_size(self) -> int:
        return -1 if self.slots is None else len(self.slots.seen)

    def reset(self) -> None:
        self.slots = self.pending = None
        self.is_initialized = self.busy = False
        if self.recorder is not None:
            self.recorder = recorder(self.policy)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.slots is not None:
            self.slots = self.slots.select(indices)
        if self.recorder is not None:
            self.recorder.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.slots is not None:
            rows = torch.arange(len(self.slots.seen), device=self.slots.seen.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise BoundIgnored(
                "a bounded state cannot be rolled back: tokens that left are gone (crop, assisted decoding)"
            )

    def activate_past_recording(self) -> None:
        raise BoundIgnored("a bounded state cannot be rolled back, so it cannot serve assisted decoding")

    def offload(self) -> None:
        raise BoundIgnored("a bounded cache is not offloaded; it is small")

    prefetch = offload


class BoundedCache(Cache):  # type: ignore[misc]
    """`past_key_values` with at most `capacity` tokens in every layer, whatever the length of the text."""

    is_bounded = True
    calls = 0  # calls of the model under way that run on our attention

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        layers: list[Geometry],
        prompt: Prompt = "recurrent",
        chunk: int | None = None,
    ) -> None:
        bounded = {
            layer.index: BoundedLayer(policy, prompt, chunk)
            for layer, policy in zip(layers, plan.policies, strict=True)
        }
        own = DynamicCache(config=text_config(model)).layers  # as the model would have them
        self._set(model, plan, prompt, [bounded.get(index, layer) for index, layer in enumerate(own)])

    def _set(self, model: PreTrainedModel, plan: Plan, prompt: Prompt, layers: list[Any]) -> None:
        self.model, self.plan, self.prompt, self.config = model, plan, prompt, text_config(model)
        super().__init__(layers=layers)
        if isinstance(layers[0], BoundedLayer):
            layers[0].is_first = True

    @classmethod
    def with_layers(cls, like: BoundedCache, layers: list[Any]) -> BoundedCache:
        """A cache for the same model and plan, with layers of another kind."""
        twin = cls.__new__(cls)
        twin._set(like.model, like.plan, like.prompt, layers)
        return twin

    def __repr__(self) -> str:
        return f"BoundedCache({self.plan}, prompt={self.prompt!r}, tokens read={self.get_seq_length()})"

    def _repr_html_(self) -> str:
        """The layer-by-token map of what is held now, for notebooks."""
        from ..play.display import cache_html

        return cache_html(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedCache:
        """A copy that goes its own way, as transformers' users reuse a prompt; the model is not copied."""
        twin = copy.copy(self)
        memo |= {id(self): twin, id(self.model): self.model, id(self.config): self.config}
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A cache that comes from another process finds its model prepared here too."""
        self.__dict__.update(state)
        prepare(self.model)

    @property
    def bounded(self) -> Iterator[BoundedLayer]:
        return (layer for layer in self.layers if isinstance(layer, BoundedLayer))

    def check(self) -> None:
        """Refuse a cache that a call which was cut off has left between two tokens."""
        columns = None
        for layer in self.bounded:
            if layer.busy or layer.pending is not None:
                where = "inside a layer" if layer.busy else "before msrnn attended to its keys"
                raise BoundIgnored(f"the last call was cut off {where}; reset() the cache and begin again")
            fed = layer.get_seq_length()
            if columns not in (None, fed):
                raise BoundIgnored(
                    f"one layer has read {fed} columns, the first {columns}: a call was cut off between layers; "
                    "reset() the cache and begin again"
                )
            columns = fed

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.calls == 0:
            raise BoundIgnored(
                "msrnn's attention does not run in this call, so the bound would be ignored: call the model itself, "
                "model(...) or model.generate(...), with a cache made for it by msrnn.cache(model, policy)"
            )
        return cast("tuple[Tensor, Tensor]", super().update(key_states, value_states, layer_idx, *args, **kwargs))

    @property
    def nbytes(self) -> int:
        """Bytes held now by the slots of all layers."""
        return sum(layer.slots.nbytes for layer in self.bounded if layer.slots is not None)

    @property
    def held(self) -> int:
        """The largest number of tokens any unit of any layer holds now."""
        return max((int(layer.slots.held.max()) for layer in self.bounded if layer.slots is not None), default=0)
