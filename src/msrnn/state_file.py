"""Saved states: one safetensors file with every layer's slots, for one model, policy and dtype, and a checksum.

A file that does not fit is refused with the reason. A checksum shows that a file is intact, not that its indices are
valid, so everything that a kernel would index by is checked as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .core.checks import fault
from .core.heads import join, parts_of, units_of
from .core.slots import TENSORS, Slots
from .hf.cache import BoundedCache
from .hf.geometry import Geometry, Unsupported, geometry
from .hf.identity import model_identity
from .plan import HeadPolicies, LayerPolicy, parse_layer_policy, parts
from .policy import Policy
from .system.files import load_tensors, save_tensors

_KIND = "msrnn state 2"
_OPTIONAL = ("scales", "scores", "gains", "memory", "residual")
_WINDOWS = "windows"  # metadata: each layer's own sliding window; files of models without any may lack it
_OWNER = ("dtype", "model", "policy", "prompt mode")  # what a state belongs to, in the order mismatches are told in


class StateError(ValueError):
    """A state that cannot be used, or a file that does not hold one."""


def save_state(
    path: str | Path, cache: BoundedCache, tokens: Sequence[int] | None = None, notes: dict[str, str] | None = None
) -> None:
    cache.check()
    layers = [layer.slots for layer in cache.bounded if layer.slots is not None]
    if not layers:
        raise StateError("this state has read nothing yet; there is nothing to save")
    if len(layers) != len(cache.layers):
        raise Unsupported("this model has layers without keys and values, whose state msrnn cannot save yet")
    slots = [part for layer in layers for part in parts_of(layer)]
    policies, windows = cache.plan.policies, [layer.window for layer in geometry(cache.model)]
    for (name, policy, window), one in zip(_parts(policies, windows), slots, strict=True):
        if message := fault(one, policy, window):
            raise StateError(f"this state is damaged, so it is not saved: in {name} {message}")
    tensors = {f"{i}.{name}": t.cpu().contiguous() for i, s in enumerate(slots) for name, t in s.tensors().items()}
    tensors["counts"] = torch.tensor([[-1 if s.limit is None else s.limit, s.fed] for s in slots])
    if tokens is not None:
        seen = slots[0].seen.tolist()
        if seen != [len(tokens)]:
            raise StateError(f"{len(tokens)} tokens were given for a state that has read {seen}; give all")
        tensors["tokens"] = torch.tensor(tokens)
    about = (notes or {}) | {"kind": _KIND, _WINDOWS: json.dumps(windows)} | _owner(cache)
    save_tensors(path, tensors, about | {"digest": _digest(about, tensors)})


def load_state(path: str | Path, cache: BoundedCache) -> None:
    """Fill an empty cache from a file that was saved for the same model, policy and dtype."""
    layers = geometry(cache.model)
    about, tensors = _read(path)
    for name, ours in _owner(cache).items():
        if about[name] != ours:
            raise StateError(f"{path} was made for another {name}: {_difference(about[name], ours)}")
    slots = iter(_check(path, cache.plan.policies, tensors, [layer.window for layer in layers]))
    by_layer = [[next(slots) for _ in parts(policy)] for policy in cache.plan.policies]
    for index, (own, layer) in enumerate(zip(by_layer, layers, strict=True)):
        _check_shape(path, index, own, layer, cache)
    for own, bounded in zip(by_layer, cache.bounded, strict=True):
        bounded.slots, bounded.is_initialized = join(own, bounded.policy), True


def read_state_file(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a state file, once it is known to be whole, unaltered and possible."""
    about, tensors = _read(path)
    policies = _policies(path, about["policy"])
    _check(path, policies, tensors, _windows(path, about.get(_WINDOWS), len(policies)))
    return about, tensors


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors, unaltered since they were saved."""
    if not Path(path).is_file():
        raise StateError(f"{path} is not a file; save a state there first")
    try:
        about, tensors = load_tensors(path)
    except ValueError as error:
        raise StateError(f"{path} is cut short or is not a state file: {error}") from error
    if about.get("kind") != _KIND:
        raise StateError(f"{path} is not a state file of this version of msrnn; save it again")
    if about.pop("digest", None) != _digest(about, tensors):
        raise StateError(f"{path} was altered after it was saved: its contents do not match its checksum")
    missing = [name for name in _OWNER if name not in about]
    if missing:
        raise StateError(f"{path} does not say which {missing[0]} it is for; save the state again")
    return about, tensors


def _parts(policies: Sequence[LayerPolicy], windows: Sequence[int | None]) -> Iterator[tuple[str, Policy, int | None]]:
    """The name, policy and window of all slots in a file, in their order: of layers, or of their KV heads."""
    for layer, (policy, window) in enumerate(zip(policies, windows, strict=True)):
        for head, part in enumerate(parts(policy)):
            name = f"layer {layer}"
            yield f"{name}, KV head {head}," if isinstance(policy, HeadPolicies) else name, part, window


def _check(
    path: str | Path, policies: Sequence[LayerPolicy], tensors: dict[str, Tensor], windows: Sequence[int | None]
) -> list[Slots]:
    """The slots of every layer, or of every KV head where each has its own.

    A checksum shows that a file is intact, not that its indices are valid: what kernels rely on is checked here.
    """
    owners = list(_parts(policies, windows))
    slots = [_slots(path, index, name, tensors, len(owners)) for index, (name, _, _) in enumerate(owners)]
    names = {f"{index}.{name}" for index in range(len(owners)) for name in TENSORS} | {"counts", "tokens"}
    if unknown := sorted(set(tensors) - names):
        raise StateError(f"{path} holds {unknown[0][:60]!r}, which no state of {len(policies)} layers has")
    for one, (name, policy, window) in zip(slots, owners, strict=True):
        if message := fault(one, policy, window):
            raise StateError(f"{path} cannot be used: in {name} {message}")
    _check_together(path, slots, [name for name, *_ in owners], tensors.get("tokens"))
    return slots


def _check_together(path: str | Path, slots: list[Slots], names: list[str], tokens: Tensor | None) -> None:
    """All have read the same."""
    first = slots[0]
    for name, one in zip(names, slots, strict=True):
        if one.fed != first.fed or not torch.equal(one.seen, first.seen):
            raise StateError(f"{path} cannot be used: layers 0 and {name[6:]} have not read the same number of tokens")
    if tokens is None:
        return
    if tokens.dtype != torch.int64 or tokens.ndim != 1 or [len(tokens)] != first.seen.tolist() or int(tokens.min()) < 0:
        raise StateError(f"{path} cannot be used: its tokens are not the {first.seen.tolist()} that were read")


def _check_shape(path: str | Path, index: int, parts: Sequence[Slots], layer: Geometry, cache: BoundedCache) -> None:
    """The layer's heads, their size, and the dtype are the model's."""
    shards = getattr(cache.model, "tp_size", None) or 1
    heads, kv_heads = layer.heads // shards, max(1, layer.kv_heads // shards)
    stored, slots = max(kv_heads, units_of(cache.plan[index], heads, kv_heads)), parts[0]
    shape, ours = (sum(part.keys.shape[1] for part in parts), slots.sizes[0]), (stored, layer.head_size)
    if shape not in (ours, (heads, layer.head_size)):  # some configs name KV heads that their models do not have
        raise StateError(f"{path} cannot be used: layer {index} has {shape} heads and their size, the model {ours}")
    if any(part.sizes != slots.sizes or part.keys.dtype != slots.keys.dtype for part in parts):
        raise StateError(f"{path} cannot be used: the KV heads of layer {index} are not alike")
    for dtype in {part.dtype_for(cache.model.dtype) for part in parts} - {cache.model.dtype}:
        raise StateError(f"{path} cannot be used: layer {index} is {dtype}, not {cache.model.dtype}")


def _policies(path: str | Path, text: str) -> list[LayerPolicy]:
    """One policy per layer, from the file's metadata."""
    try:
        texts = json.loads(text)
        if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
            raise ValueError("a list of texts was expected")
        known = {one: parse_layer_policy(one) for one in set(texts)}
    except (ValueError, TypeError, RecursionError) as error:
        raise StateError(f"{path} has no valid policies: {_brief(str(error))}") from error
    return [known[one] for one in texts]


def _windows(path: str | Path, text: str | None, layers: int) -> list[int | None]:
    """Each layer's own sliding window, from the file's metadata."""
    if text is None:
        return [None] * layers
    try:
        windows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} has no valid windows: {_brief(str(error))}") from error
    valid = isinstance(windows, list) and all(one is None or (type(one) is int and one > 0) for one in windows)
    if not valid or len(windows) != layers:
        raise StateError(f"{path} has no valid windows for {layers} layers: {_brief(text)}")
    return cast("list[int | None]", windows)


def _slots(path: str | Path, index: int, owner: str, tensors: dict[str, Tensor], count: int) -> Slots:
    named: dict[str, Any] = {name: tensors.get(f"{index}.{name}") for name in TENSORS}
    missing = [name for name, tensor in named.items() if tensor is None and name not in _OPTIONAL]
    if missing or "counts" not in tensors:
        raise StateError(f"{path} has no {', '.join(missing or ['counts'])} for {owner}; save the state again")
    counts = tensors["counts"]
    if counts.dtype != torch.int64 or counts.shape != (count, 2):
        raise StateError(f"{path} has counts {tuple(counts.shape)} for {count} slots; save the state again")
    limit, fed = counts[index].tolist()
    return Slots(**named, limit=None if limit < 0 else limit, fed=fed)


def _owner(cache: BoundedCache) -> dict[str, str]:
    policies = json.dumps([str(policy) for policy in cache.plan.policies])
    identity = model_identity(cache.model)
    return dict(zip(_OWNER, (str(cache.model.dtype), identity, policies, cache.prompt), strict=True))


def _digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].dtype}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _difference(theirs: str, ours: str) -> str:
    """Two settings; of policies by layer, those of the first layer in which they differ."""
    their, our = _by_layer(theirs), _by_layer(ours)
    if len(set(their)) == len(set(our)) == 1:
        return f"{_brief(their[0])}, not {_brief(our[0])}"
    if len(their) == len(our) > 0:
        layer, *pair = next((i, *pair) for i, pair in enumerate(zip(their, our, strict=True)) if pair[0] != pair[1])
        return f"layer {layer} had {_brief(pair[0])}, not {_brief(pair[1])}"
    return f"{_brief(theirs)}, not {_brief(ours)}"


def _by_layer(text: str) -> list[str]:
    """The policies of a text that has one per layer; no other text has any."""
    try:
        policies = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        policies = None
    valid = isinstance(policies, list) and all(isinstance(one, str) for one in policies)
    return cast("list[str]", policies) if valid else []


def _brief(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."
