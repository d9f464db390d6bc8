"""The attention hook: how a model's calls with a bounded cache reach the recurrence, and only those.

transformers looks up attention functions by a name in the config. For the time of a call with a bounded cache that name
is ours; every other call runs exactly as before, whatever the model's own implementation is (SDPA, flash, flex, paged).
The cache hands a layer's new keys on as `Pending` objects that only our function can open, so no other path can attend
to them and pass for bounded.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedConfig, PreTrainedModel

from ..core.attention import Attention
from .continuous_batching import refuse_bounded_caches
from .geometry import Unsupported, same_shape, text_config

if TYPE_CHECKING:
    from .cache import BoundedLayer

NAME = "msrnn"
_lock = threading.Lock()
F = TypeVar("F", bound=Callable[..., Any])


class BoundIgnored(RuntimeError):
    """Some path was about to attend past a bounded state."""


def outside_graphs(function: F) -> F:
    """A compiled model leaves its graph here and comes back."""
    return cast("F", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def prepare(model: PreTrainedModel) -> None:
    """Let calls of this model find our attention whenever they come with a bounded cache."""
    if not model._can_set_attn_implementation():
        name = text_config(model).model_type
        raise Unsupported(f"{name} does not use transformers' AttentionInterface; msrnn cannot bound it")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    refuse_bounded_caches()
    hooked = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    switch = next((one for one in hooked if isinstance(one, _Switch)), None)
    if switch is not None:
        _switches[id(switch.config)] = switch
        return
    switch = _Switch(text_config(model))
    _switches[id(switch.config)] = switch
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(switch.enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(switch.leave, with_kwargs=True, always_call=True)


class _Switch:
    """Our name in the model's config, from the start to the end of a call with a bounded cache.

    PyTorch runs no hook at the end of a call that KeyboardInterrupt cuts off. What such a call has left here goes when
    its module is called again.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self.before: str | None = None
        self.calls: dict[int, list[tuple[PreTrainedModel, Any]]] = {}  # those under way, by thread

    def __deepcopy__(self, memo: dict[int, Any]) -> _Switch:
        return _Switch(copy.deepcopy(self.config, memo))

    def enter(self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = _bounded_cache(args, kwargs)
        if cache is not None or self.calls:
            self._enter(module, cache, kwargs.get("input_ids"))

    def leave(self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.calls and _bounded_cache(args, kwargs) is not None:
            self._leave(module)

    @property
    def active(self) -> bool:
        """Whether this thread is in a call with a bounded cache."""
        return threading.get_ident() in self.calls

    @outside_graphs
    def _enter(self, module: PreTrainedModel, cache: Any, ids: Tensor | None) -> None:
        if self.calls:
            self._leave(module)  # a call of this module that never came to its end
        if cache is None:
            return
        if not same_shape(cache.config, self.config):
            raise BoundIgnored("this cache was made for another model; make one with msrnn.cache(model, policy)")
        cache.check()
        if ids is not None and ids.shape[-1] == 0:
            raise BoundIgnored(_nothing_new(cache.get_seq_length()))
        with _lock:  # in this order: a signal between any two lines leaves nothing that `_leave` does not mend
            if self.config._attn_implementation != NAME:
                self.before = self.config._attn_implementation
            self.calls.setdefault(threading.get_ident(), []).append((module, cache))
            self.config._attn_implementation = NAME
            cache.calls += 1

    @outside_graphs
    def _leave(self, module: PreTrainedModel) -> None:
        thread = threading.get_ident()
        with _lock:
            calls = self.calls.get(thread, [])
            mine = next((call for call in calls if call[0] is module), None)
            if mine is not None:
                mine[1].calls = max(0, mine[1].calls - 1)
            others = [call for call in calls if call is not mine]
            if not others and self.calls.keys() <= {thread}:
                self.config._attn_implementation = self.before
            if others:
                self.calls[thread] = others
            else:
                self.calls.pop(thread, None)


def _nothing_new(read: int) -> str:
    """Why a call has no token: `generate` skips as many as the cache has read."""
    if read == 0:
        return "there are no tokens; give at least one"
    return (
        f"this cache has read {read} tokens, so none of the given ones is new: begin another text with a new cache, or "
        "give all that was read and what follows"
    )


def _bounded_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bounded cache among a call's arguments, if any."""
    for value in (kwargs.get("past_key_values"), *args):
        if isinstance(value, Cache) and getattr(value, "is_bounded", False):
            return value
    return None


# by the id of their config, which lives as long as they do
_switches: weakref.WeakValueDictionary[int, _Switch] = weakref.WeakValueDictionary()


def _own_name(config: Any) -> str | None:
    """The model's own attention, if another thread than this one has put our name in the config."""
    switch = _switches.get(id(config))
    return None if switch is None or switch.active else switch.before


def mask(*positional: Any, **arguments: Any) -> Any:
    """The registered mask function."""
    own = _own_name(arguments.get("config"))
    if own is None:
        return DeferredMask(arguments)
    return AttentionMaskInterface()[own](*positional, **arguments) if own in AttentionMaskInterface() else None


@dataclass
class DeferredMask:
    """What a mask would be made from: our attention needs only the padding and the window."""

    arguments: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)

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
        if "real" not in self.results:
            padding = self.arguments.get("attention_mask")
            all_real = padding is None or bool(padding[:, -columns:].all())
            self.results["real"] = None if all_real else padding[:, -columns:].bool()  # type: ignore[index]
        return cast("Tensor | None", self.results["real"])

    def restarts(self, positions: Tensor | None, seen: Tensor, columns: int) -> bool:
        """Whether a row that has read something is given position 0 again; asked once a call, as it waits on a GPU."""
        if "restarts" not in self.results and positions is not None and positions.ndim == 2:
            real = self.real(columns)
            zero = (positions == 0) & (seen[:, None] > 0).to(positions.device)
            self.results["restarts"] = bool((zero if real is None else zero & real.to(zero.device)).any())
        return bool(self.results.get("restarts", False))


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
        f"the model's attention opened a bounded cache itself ({how}), which would ignore the bound; use a model whose "
        "attention goes through transformers' AttentionInterface, and call it with the cache made for it"
    )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """The registered attention function: the recurrence. query [B, H, T, D] -> [B, T, H, V]."""
    if not isinstance(key, Pending):
        options = {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window, "is_causal": is_causal}
        options = kwargs | {name: option for name, option in options.items() if option is not None}
        return _own_attention(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(key.layer, query, attention_mask, Attention(scale, softcap, None, s_aux), dropout, is_causal, kwargs)


def _own_attention(module: torch.nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, Any]:
    """The model's own attention, for a call in another thread than the one that put our name in the config."""
    own = _own_name(getattr(module, "config", None))
    if own is None:
        raise BoundIgnored(
            "the model dropped the bounded cache it was given (gradient checkpointing does, in training)"
        )
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return cast("tuple[Tensor, Any]", AttentionInterface().get_interface(own, eager)(module, *tensors, **options))


@outside_graphs
def _attend(
    layer: BoundedLayer,
    query: Tensor,
    mask: Any,
    attention: Attention,
    dropout: float,
    is_causal: bool | None,
    extra: dict[str, Any],
) -> tuple[Tensor, None]:
    """Check the call, then the recurrence, in the layout that models expect: [B, T, H, V]."""
    try:
        _check(layer, mask, dropout, is_causal, extra)
        layer.check_tokens(query)
    except Exception:
        layer.refuse()
        raise
    layer.busy = True  # stays if this is cut off
    output = layer.attend(query, replace(attention, window=mask.window), mask.real(query.shape[2]))
    layer.busy = False
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
    _check_columns(layer, mask, extra.get("position_ids"))


def _check_columns(layer: BoundedLayer, mask: DeferredMask, positions: Tensor | None) -> None:
    """The mask must count the columns that this layer has read, and positions must go on."""
    new, before = layer.new_columns, layer.get_seq_length()
    if mask.columns != before + new:
        raise BoundIgnored(
            f"this layer has read {before} columns, the first {mask.columns - new}: a call was cut off "
            "between layers; reset() the cache and begin again"
        )
    padding = mask.arguments.get("attention_mask")
    if padding is not None and padding.shape[1] != before + new:
        raise BoundIgnored(
            f"the attention mask has {padding.shape[1]} columns; {before} were read before and {new} "
            "are new, so it must have the sum of both. Was the same text fed twice?"
        )
    if padding is not None and len(padding) not in (1, layer.new_rows):
        raise BoundIgnored(
            f"the attention mask has {len(padding)} rows for {layer.new_rows} sequences; give one row for each"
        )
    if new > 1 and layer.slots is not None and mask.restarts(positions, layer.slots.seen, new):
        raise BoundIgnored(
            "positions begin again at 0, but this cache has read some text. Was it fed twice? "
            "If not, the model does not count on from a cache: give it position_ids"
        )
