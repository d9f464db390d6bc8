"""What tells one model from another, so that a state or a profile made for one is refused by every other.

`model_identity` looks at a loaded model, `weights_digest` at its files; `check_profile` and `fits` at either, as
processes that serve a model do not load it themselves.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from ..budgets.profile import open_profile
from .load import ModelError, weight_files

_SAMPLES = 48  # weights that are compared
_CLOSE = 0.01  # bfloat16 rounds to 0.4 %; another training moves some weight by more than 1 %


class ProfileError(ValueError):
    """A profile that does not belong to the model."""


def model_identity(model: PreTrainedModel) -> str:
    """Architecture, shapes and a few numbers of every weight: cheap, and different for any other model."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        if weight.device.type != "meta":
            sample = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16]
            digest.update(sample.float().cpu().numpy().tobytes())
    return f"{model.config.model_type}, {model.num_parameters()} parameters, {digest.hexdigest()[:16]}"


def profile_identity(model: PreTrainedModel) -> dict[str, Any]:
    """The same for a profile, which holds in any dtype: a few weights are kept as numbers, to be compared loosely."""
    config = model.config.get_text_config(decoder=True)
    return {
        "name": Path(str(model.config.name_or_path)).name or config.model_type,
        "type": config.model_type,
        "layers": config.num_hidden_layers,
        "parameters": int(model.num_parameters()),
        "weights": _samples(model),
    }


def check_profile(path: str | Path, model: PreTrainedModel | PreTrainedConfig, revision: str | None = None) -> None:
    """Refuse a profile that was made for another model; one that names no model is taken as it is.

    Of a configuration the weights are those in its files. Where none of them can be compared, its name decides.
    """
    theirs = open_profile(path).get("model")
    if not isinstance(theirs, Mapping):
        return
    loaded = isinstance(model, PreTrainedModel)
    ours = profile_identity(model) if loaded else _stored_identity(model, revision, theirs.get("weights", {}))
    if difference := _difference(theirs, ours):
        raise ProfileError(
            f"profile {path} was made for another model, {theirs.get('name')} ({difference}); "
            "make one for this model with msrnn calibrate"
        )


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How two identities differ, in words; empty where they are those of one model."""
    differ = [name for name in ("type", "layers", "parameters") if name in ours and theirs.get(name) != ours[name]]
    if differ:
        return ", ".join(f"{theirs.get(name)} {name}, not {ours[name]}" for name in differ)
    if "weights" in ours:
        return "" if _alike(theirs.get("weights"), ours["weights"]) else "other weights"
    same = theirs.get("name") == ours["name"]
    return "" if same else f"no weights here to compare, and the name is not {ours['name']}"


def fits(profile: str | Path, model: PreTrainedModel | PreTrainedConfig, revision: str | None = None) -> bool:
    """Whether a profile was made for these weights: those of a loaded model, or a configuration's files."""
    try:
        check_profile(profile, model, revision)
    except ProfileError:
        return False
    return True


def _stored_identity(model: PreTrainedConfig, revision: str | None, wanted: Iterable[str]) -> dict[str, Any]:
    """What the files of a configuration tell of `profile_identity`; no `weights` where none are to be compared."""
    config, name = model.get_text_config(decoder=True), str(model.name_or_path)
    identity = {"name": Path(name).name, "type": config.model_type, "layers": config.num_hidden_layers}
    weights = _stored_samples(name, revision, wanted)
    return identity | {"weights": weights} if weights else identity


def _stored_samples(name: str, revision: str | None, wanted: Iterable[str]) -> dict[str, float]:
    """What `_samples` would see of some weights once loaded, read from the safetensors files on this machine."""
    try:
        files = [file for file in weight_files(name, revision) if file.suffix == ".safetensors"]
    except ModelError:
        return {}
    samples = dict[str, float]()
    for file in files:
        with safe_open(file, "pt") as weights:
            stored = set(weights.keys())
            samples |= {one: _stored_number(weights.get_slice(one)) for one in wanted if one in stored}
    return samples


def _stored_number(weight: Any) -> float:
    """The number that `_samples` takes: at a third of the weight, in reading order."""
    shape = weight.get_shape()
    if not shape:
        return float(weight[...])
    row, rest = divmod(math.prod(shape) // 3, math.prod(shape[1:]))
    return float(weight[row : row + 1].flatten()[rest])


def weights_digest(name: str | os.PathLike[str] | None = None, *, revision: str | None = None) -> str:
    """A hash of the names, sizes and some bytes of a model's weight files, without loading them."""
    files = weight_files(name, revision)
    if not files:
        raise ModelError(f"no weights of {str(name)!r} are on this machine; load the model once")
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(64):
                file.seek(size * part // 64)
                digest.update(file.read(1024))
    return digest.hexdigest()[:32]


def _samples(model: PreTrainedModel) -> dict[str, float]:
    """One number from each of some weights, by the weight's name."""
    weights = [(name, weight) for name, weight in sorted(model.named_parameters()) if _readable(weight)]
    chosen = weights[:: max(1, math.ceil(len(weights) / _SAMPLES))]
    return {name: float(f"{weight.detach().flatten()[weight.numel() // 3].item():.5g}") for name, weight in chosen}


def _readable(weight: torch.Tensor) -> bool:
    return weight.device.type != "meta" and weight.is_floating_point() and weight.numel() > 0


def _alike(theirs: object, ours: Mapping[str, float]) -> bool:
    """Whether the weights that both name are close; some must be named by both."""
    if not isinstance(theirs, Mapping):
        return False
    shared = [(theirs[name], ours[name]) for name in ours if name in theirs]
    return bool(shared) and all(math.isclose(a, b, rel_tol=_CLOSE, abs_tol=1e-6) for a, b in shared)
