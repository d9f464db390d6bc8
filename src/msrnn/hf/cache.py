"""transformers: `cache(model, policy)` makes any decoder a bounded multi-state RNN, through its own registries.

The cache hands a layer's new keys on as `Pending` objects that only our registered attention function can open, so
no other path can attend to them and pass for bounded. Nothing is patched: calls without our cache run as before.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..budgets.profile import check_model
from ..core import recurrence
from ..core.attention import Attention
from ..core.recurrence import CHUNK, OnEvict
from ..core.reference import Prompt
from ..core.slots import State
from ..policy import Plan, Policy, PolicyLike, plan, split_profile

NAME = "msrnn"
_BOUNDED = ("full_attention", "sliding_attention")
_PASSED = ("conv", "linear_attention", "mamba", "moe", "mlp")  # layers that hold no row per token

F = TypeVar("F", bound=Callable[..., Any])


def _outside_graphs(function: F) -> F:
    """A compiled model leaves its graph here and comes back."""
    return cast("F", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class BoundIgnored(RuntimeError):
    """Some path was about to attend past a bounded state."""


class Unsupported(ValueError):
    """A model that cannot be bounded, or not yet."""


def cache(
    model: PreTrainedModel,
    policy: PolicyLike,
    *,
    prompt: Prompt = "recurrent",
    length: int | None = None,
    chunk: int = CHUNK,
) -> BoundedCache:
    """A bounded `past_key_values` for `generate` or a plain forward.

    `policy` is text (`tova:512`, `window+4:1/8`, `h2o:2GiB`, `tova:256,profile=FILE`), a Policy, or one per layer. A
    fraction is of `length`, the model's trained context unless given. A profile made for another model is refused.
    `prompt="oneshot"` reads every call's tokens under full attention and only then drops down to the capacity, as the
    paper's released code does.
    """
    if prompt not in ("recurrent", "oneshot"):
        raise ValueError(f"unknown prompt mode {prompt!r}; allowed: recurrent, oneshot")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    layers = geometry(model)
    if isinstance(policy, str) and (named := split_profile(policy)[1]):
        check_model(named, model)
    length = length or getattr(text_config(model), "max_position_embeddings", None)
    slot_bytes = sum(layer.slot_bytes(model.dtype) for layer in layers)
    made = plan(policy, len(layers), length=length, slot_bytes=slot_bytes)
    shards = getattr(model, "tp_size", None) or 1
    if shards > 1 and any(policy.scope == "layer" and not policy.blind for policy in made.policies):
        raise Unsupported(
            f"the model's heads are spread over {shards} processes, and the heads of a layer decide together; "
            "use a policy by head (tova-head, h2o) or a device_map"
        )
    _switch(model)
    return BoundedCache(model, made, layers, prompt, chunk)


@dataclass(frozen=True)
class Geometry:
    """The shape of one attention layer, as its config tells: what one slot costs and the layer's own window."""

    index: int
    heads: int
    kv_heads: int
    head_size: int
    window: int | None

    def slot_bytes(self, dtype: torch.dtype, scope: str = "layer") -> int:
        """Keys and values of one token; where every query head decides alone, each has its own."""
        stored = self.heads if scope == "query_head" else self.kv_heads
        return 2 * stored * self.head_size * dtype.itemsize


def text_config(model: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    config = model.config if isinstance(model, PreTrainedModel) else model
    return config.get_text_config(decoder=True)


def geometry(model: PreTrainedModel | PreTrainedConfig) -> list[Geometry]:
    """The layers that can be bounded; refuses by name what cannot."""
    config = text_config(model)
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False) or getattr(model, "is_encoder_decoder", False):
        raise Unsupported(f"{kind} is an encoder-decoder; msrnn bounds decoders only")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise Unsupported(f"{kind} caches latent attention (kv_lora_rank), not keys and values; msrnn cannot bound it")
    if getattr(config, "num_kv_shared_layers", None):
        raise Unsupported(f"{kind} shares keys and values between layers; msrnn cannot bound it yet")
    types, _ = get_layer_types_and_kwargs(config)
    strange = sorted(set(types) - {*_BOUNDED, *_PASSED})
    if strange:
        raise Unsupported(f"{kind} has layers of type {', '.join(strange)}; msrnn can bound {', '.join(_BOUNDED)}")
    bounded = [(index, name) for index, name in enumerate(types) if name in _BOUNDED]
    if not bounded or "mamba" in kind:
        raise Unsupported(f"{kind} has no attention layers that hold keys and values; there is nothing to bound")
    if not hasattr(config, "num_attention_heads"):
        raise Unsupported(f"{kind} has no attention heads; there is nothing to bound")
    return [_layer(config, index, name == "sliding_attention") for index, name in bounded]


def _layer(config: PreTrainedConfig, index: int, slides: bool) -> Geometry:
    if getattr(config, "is_heterogeneous", False):  # head sizes that differ by layer, as in Gemma 4
        config = config.per_layer_config[index]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(index, heads, kv_heads, size, getattr(config, "sliding_window", None) if slides else None)


def _switch(model: PreTrainedModel) -> None:
    """Route the model's attention through ours, which runs the old one wherever our cache is not in use."""
    config = text_config(model)
    current = config._attn_implementation or "eager"
    if not model._can_set_attn_implementation():
        raise Unsupported(f"{config.model_type} does not use transformers' AttentionInterface; msrnn cannot bound it")
    if current.startswith(NAME):
        return
    plain = current
    if any(word in current for word in ("flash", "flex", "paged", "/")):  # these look at their own name in the config
        plain = "sdpa" if model._supports_sdpa else "eager"
    name = f"{NAME}_{plain}"
    AttentionInterface.register(name, partial(_attention, plain))
    AttentionMaskInterface.register(name, partial(_mask, plain))
    model.set_attn_implementation(name)
    if text_config(model)._attn_implementation != name:
        raise Unsupported(f"{config.model_type} would not take another attention implementation; msrnn cannot bound it")


class Columns(int):
    """A number of columns that a bounded cache named: how a mask made for one is told from any other."""


def _mask(plain: str, *positional: Any, **arguments: Any) -> Any:
    """The registered mask function: deferred for a bounded cache, the model's own mask for all other calls."""
    if isinstance(arguments.get("kv_length"), Columns):
        return DeferredMask(arguments)
    return ALL_MASK_ATTENTION_FUNCTIONS[plain](*positional, **arguments)


@dataclass
class DeferredMask:
    """What a mask would be made from: our attention needs only the padding and the window."""

    arguments: dict[str, Any]
    built: dict[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        return int(self.arguments["kv_length"])

    @property
    def window(self) -> int | None:
        return cast("int | None", self.arguments.get("local_size"))

    @property
    def custom(self) -> bool:
        """More than causal, window and padding: packed sequences, images that see ahead, a user's own function."""
        return not self.arguments.get("allow_is_causal_skip", True)

    def real(self, columns: int) -> Tensor | None:
        """[B, columns]: which of the newest columns are tokens, None where all are."""
        if "real" not in self.built:
            padding = self.arguments.get("attention_mask")
            self.built["real"] = None if padding is None or bool(padding[:, -columns:].all()) else padding[:, -columns:]
        return cast("Tensor | None", self.built["real"])

    def restarts(self, positions: Tensor | None, seen: Tensor, columns: int) -> bool:
        """Whether a row that has read something is given position 0 again; asked once a call, as it waits on a GPU."""
        if "restarts" not in self.built and positions is not None and positions.ndim == 2:
            real = self.real(columns)
            zero = (positions == 0) & (seen[:, None] > 0).to(positions.device)
            self.built["restarts"] = bool((zero if real is None else zero & real.to(zero.device)).any())
        return bool(self.built.get("restarts", False))


class Pending:
    """What the cache hands on in place of new keys or values: their shape and layer, and nothing to attend to.

    Only our attention function knows where they are; whatever else asks for more than the shape is refused.
    """

    def __init__(self, tensor: Tensor, layer: BoundedLayer) -> None:
        self.layer, self.shape, self.dtype, self.device = layer, tensor.shape, tensor.dtype, tensor.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _opened(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _opened(getattr(func, "__name__", str(func)))

    def _operator(self, *_: Any) -> Any:
        raise _opened("an operator")

    __getitem__ = __iter__ = __len__ = __neg__ = __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = _operator


def _opened(how: str) -> BoundIgnored:
    return BoundIgnored(
        f"the model's attention opened a bounded cache itself ({how}), which would ignore the bound; "
        f"use a model whose attention goes through transformers' AttentionInterface as '{NAME}'"
    )


def _attention(
    plain: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered attention: the recurrence for keys from our cache, the model's own attention for all others."""
    if not isinstance(key, Pending):
        if isinstance(attention_mask, DeferredMask):
            raise BoundIgnored(
                "the model dropped the bounded cache it was given (gradient checkpointing does, in training)"
            )
        named = {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window, "is_causal": is_causal}
        kwargs |= {name: given for name, given in named.items() if given is not None}
        forward = _plain(plain, module)
        return forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _bounded(
        key.layer, query, attention_mask, Attention(scale, softcap, None, s_aux), dropout, is_causal, kwargs
    )


@_outside_graphs
def _bounded(
    layer: BoundedLayer,
    query: Tensor,
    mask: Any,
    attention: Attention,
    dropout: float,
    is_causal: bool | None,
    extra: dict[str, Any],
) -> tuple[Tensor, None]:
    """The recurrence, in the layout that models expect: [B, T, H, V]."""
    _check(layer, mask, dropout, is_causal, extra)
    output = layer.attend(query, replace(attention, window=mask.window), mask.real(query.shape[2]))
    if torch.is_grad_enabled() and query.requires_grad:
        output.requires_grad_().register_hook(_no_gradient)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


def _no_gradient(_: Tensor) -> None:
    raise BoundIgnored("a bounded cache is for inference: no gradient goes back through it")


def _check(layer: BoundedLayer, mask: Any, dropout: float, is_causal: bool | None, extra: dict[str, Any]) -> None:
    """Whatever the recurrence would not honour is refused, not dropped."""
    if not isinstance(mask, DeferredMask):
        raise BoundIgnored(
            "a bounded cache takes a 2-D attention mask (1: token, 0: padding); a ready-made one was given"
        )
    if mask.custom:
        raise BoundIgnored(
            "a bounded cache takes causal text only; this call has a mask of another form "
            "(images, packed texts; for text alone leave token_type_ids out)"
        )
    if dropout:
        raise BoundIgnored("a bounded cache is for inference; call model.eval() first")
    if is_causal is False:
        raise BoundIgnored("a bounded cache needs causal attention")
    for name in ("position_bias", "attention_bias", "alibi", "head_mask"):
        if extra.get(name) is not None:
            raise BoundIgnored(f"a bounded cache does not know attention's {name}")
    new = layer.pending.shape[2] if layer.pending is not None else 0
    columns = layer.get_seq_length() + new
    if mask.columns != columns:
        raise BoundIgnored(
            f"this layer has read {layer.get_seq_length()} columns, the first {mask.columns - new}: a call was cut off "
            "between layers; reset() the cache and begin again"
        )
    padding = mask.arguments.get("attention_mask")
    if padding is not None and padding.shape[1] != columns:
        raise BoundIgnored(
            f"the attention mask has {padding.shape[1]} columns; {layer.get_seq_length()} were read before and {new} "
            "are new, so it must have the sum of both. Was the same text fed twice?"
        )
    if new > 1 and layer.state is not None and mask.restarts(extra.get("position_ids"), layer.state.seen, new):
        raise BoundIgnored(
            "positions begin again at 0, but this cache has read some text. Was it fed twice? "
            "If not, the model does not count on from a cache: give it position_ids"
        )


def _plain(name: str, module: torch.nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The model's own attention function; 'eager' is not in the registry but beside the model's code."""
    if name in ALL_ATTENTION_FUNCTIONS:
        return cast("Callable[..., tuple[Tensor, Tensor | None]]", ALL_ATTENTION_FUNCTIONS[name])
    for kind in type(module).__mro__:
        beside = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if beside is not None:
            return cast("Callable[..., tuple[Tensor, Tensor | None]]", beside)
    raise Unsupported(f"{type(module).__name__} has no eager attention to fall back on")


class BoundedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's state as transformers' caches see it."""

    is_sliding = False
    is_croppable = False

    def __init__(self, policy: Policy, prompt: Prompt, chunk: int) -> None:
        super().__init__()
        self.policy, self.prompt, self.chunk = policy, prompt, chunk
        self.state: State | None = None
        self.pending: Tensor | None = None
        self.values_pending: Tensor | None = None
        self.on_evict: OnEvict | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The state is made at the first attention, when the number of query heads and the window are known."""

    @_outside_graphs
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.pending is not None:
            raise BoundIgnored(
                "the last call was cut off before msrnn attended to its keys; reset() the cache and begin again"
            )
        self.pending, self.values_pending = key_states.detach(), value_states.detach()
        return cast("tuple[Tensor, Tensor]", (Pending(self.pending, self), Pending(self.values_pending, self)))

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        """Take the pending keys and values into the state and answer the queries."""
        key, value = self.pending, self.values_pending
        if key is None or value is None:
            raise BoundIgnored("attention was asked for keys that this cache did not hand out")
        if self.state is None:
            self.state = State.empty(self.policy, key, value, query.shape[1], attention.window)
            self.is_initialized = True
        if len(self.state.seen) != len(query):
            raise ValueError(
                f"the cache holds {len(self.state.seen)} sequences, {len(query)} were given; use a new cache"
            )
        self.pending = self.values_pending = None
        real = None if real is None else real.to(query.device)
        arguments = (self.state, query.detach(), key, value, self.policy, attention, real, self.prompt, self.chunk)
        return recurrence.run(*arguments, on_evict=self.on_evict)

    def get_seq_length(self) -> int:
        """Columns fed, padding included: positions and masks count these, not the slots held."""
        return 0 if self.state is None else self.state.fed

    @_outside_graphs
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return Columns(self.get_seq_length() + query_length), 0

    def get_max_length(self) -> int:
        return -1  # of the sequence, not of the state

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else len(self.state.seen)

    def reset(self) -> None:
        self.state = self.pending = self.values_pending = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(len(self.state.seen), device=self.state.seen.device)
            self.state = self.state.rows(rows.repeat_interleave(repeats))

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

    def __init__(self, model: PreTrainedModel, plan: Plan, layers: list[Geometry], prompt: Prompt, chunk: int) -> None:
        self.model, self.plan, self.prompt, self.config = model, plan, prompt, text_config(model)
        bounded = {
            layer.index: BoundedLayer(policy, prompt, chunk)
            for layer, policy in zip(layers, plan.policies, strict=True)
        }
        own = DynamicCache(config=self.config).layers  # as the model would have them
        super().__init__(layers=[bounded.get(index, layer) for index, layer in enumerate(own)])

    def __repr__(self) -> str:
        return f"BoundedCache({self.plan}, prompt={self.prompt!r}, tokens read={self.get_seq_length()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedCache:
        """A copy that goes its own way, as transformers' users reuse a prompt; the model is not copied."""
        twin = copy.copy(self)
        memo |= {id(self): twin, id(self.model): self.model, id(self.config): self.config}
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    @property
    def bounded(self) -> Iterator[BoundedLayer]:
        return (layer for layer in self.layers if isinstance(layer, BoundedLayer))

    @_outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        current = self.config._attn_implementation or "eager"
        if not current.startswith(NAME):
            raise BoundIgnored(
                f"the model's attention was set to '{current}' after this cache was made, which would ignore the "
                "bound; make the cache again with msrnn.cache(model, policy)"
            )
        return cast("tuple[Tensor, Tensor]", super().update(key_states, value_states, layer_idx, *args, **kwargs))

    @property
    def nbytes(self) -> int:
        """Bytes held now by the states of all layers."""
        return sum(layer.state.nbytes for layer in self.bounded if layer.state is not None)

    @property
    def held(self) -> int:
        """The largest number of tokens any unit of any layer holds now."""
        return max((int(layer.state.held.max()) for layer in self.bounded if layer.state is not None), default=0)
