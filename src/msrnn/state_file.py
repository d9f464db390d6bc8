"""Saved states: one safetensors file with every layer's slots, for one model, policy and dtype, and a checksum.

A file that does not fit is refused with the reason. A checksum proves no good will, so everything that a kernel would
index by is checked as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .core.slots import TENSORS, Slots
from .hf.cache import BoundedCache, BoundedLayer
from .hf.geometry import Unsupported
from .hf.identity import model_identity
from .policy import parse_policy
from .system.files import load_tensors, save_tensors

_KIND = "msrnn state 2"
_OPTIONAL = ("scores", "gains")


class StateError(ValueError):
    """A state that cannot be used, or a file that does not hold one."""


def save_state(
    path: str | Path, cache: BoundedCache, tokens: Sequence[int] | None = None, notes: dict[str, str] | None = None
) -> None:
    slots = [layer.slots for layer in cache.bounded if layer.slots is not None]
    if not slots:
        raise StateError("this state has read nothing yet; there is nothing to save")
    if len(slots) != len(cache.layers):
        raise Unsupported("this model has layers without keys and values, whose state msrnn cannot save yet")
    tensors = {f"{i}.{name}": t.cpu().contiguous() for i, s in enumerate(slots) for name, t in s.tensors().items()}
    tensors["counts"] = torch.tensor([[-1 if s.limit is None else s.limit, s.fed] for s in slots])
    if tokens is not None:
        seen = slots[0].seen.tolist()
        if seen != [len(tokens)]:
            raise StateError(f"{len(tokens)} tokens were given for a state that has read {seen}; give all")
        tensors["tokens"] = torch.tensor(tokens)
    about = (notes or {}) | {"kind": _KIND} | _owner(cache)
    save_tensors(path, tensors, about | {"digest": _digest(about, tensors)})


def load_state(path: str | Path, cache: BoundedCache) -> None:
    """Fill an empty cache from a file that was saved for the same model, policy and dtype."""
    about, tensors = read_state_file(path)
    for name, ours in _owner(cache).items():
        if about.get(name) != ours:
            raise StateError(f"{path} was made for another {name}: {_show(about.get(name))}, not {_show(ours)}")
    for index, layer in enumerate(cache.bounded):
        layer.slots = _slots(path, index, tensors, layer)
        layer.is_initialized = True


def read_state_file(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a state file, once it is known to be whole and unaltered."""
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
    return about, tensors


def _slots(path: str | Path, index: int, tensors: dict[str, Tensor], layer: BoundedLayer) -> Slots:
    named: dict[str, Any] = {name: tensors.get(f"{index}.{name}") for name in TENSORS}
    missing = [name for name, tensor in named.items() if tensor is None and name not in _OPTIONAL]
    if missing or "counts" not in tensors:
        raise StateError(f"{path} has no {', '.join(missing or ['counts'])} for layer {index}; save the state again")
    limit, fed = tensors["counts"][index].tolist()
    return Slots(**named, limit=None if limit < 0 else limit, fed=fed)


def _owner(cache: BoundedCache) -> dict[str, str]:
    """What a state belongs to, in the order in which a mismatch is reported."""
    policies = json.dumps([str(policy) for policy in cache.plan.policies])
    identity = model_identity(cache.model)
    return {"dtype": str(cache.model.dtype), "policy": policies, "prompt mode": cache.prompt, "model": identity}


def _digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].dtype}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].view(torch.uint8).numpy().tobytes() if tensors[name].numel() else b"")
    return digest.hexdigest()


def _show(text: str | None) -> str:
    """A policy per layer is shown once if all are the same."""
    if text and text.startswith("["):
        policies = json.loads(text)
        if len(set(policies)) == 1:
            return str(policies[0])
        return f"{len(policies)} layers, {parse_policy(policies[0])} to {parse_policy(policies[-1])}"
    return text or "unknown"
