"""Profiles: one capacity per layer, measured on a model, with what they were made from. Another model is refused.

The model is told by its shape and a few of its weights, close enough that a change of dtype does not matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..policy import open_profile

KIND = "msrnn profile 1"
_SAMPLED = 48  # weights that are compared
_CLOSE = 0.01  # bfloat16 rounds to 0.4 %; another training moves some weight by more than 1 %


class ProfileError(ValueError):
    """A profile that does not belong to the model."""


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """What a profile belongs to."""
    config = model.config.get_text_config(decoder=True)
    return {
        "name": Path(str(model.config.name_or_path)).name or config.model_type,
        "type": config.model_type,
        "layers": config.num_hidden_layers,
        "parameters": int(model.num_parameters()),
        "weights": _sample(model),
    }


def _sample(model: PreTrainedModel) -> dict[str, float]:
    """One number from each of some weights, by the weight's name."""
    weights = [(name, weight) for name, weight in sorted(model.named_parameters()) if _readable(weight)]
    chosen = weights[:: max(1, math.ceil(len(weights) / _SAMPLED))]
    return {name: float(f"{weight.detach().flatten()[weight.numel() // 3].item():.5g}") for name, weight in chosen}


def _readable(weight: torch.Tensor) -> bool:
    return weight.device.type != "meta" and weight.is_floating_point() and weight.numel() > 0


def check_model(path: str | Path, model: PreTrainedModel) -> None:
    """Refuse a profile that was made for another model; one without a word on its model is taken as it is."""
    made_for, mine = open_profile(path).get("model"), identity(model)
    if not isinstance(made_for, Mapping):
        return
    differ = [name for name in ("type", "layers", "parameters") if made_for.get(name) != mine[name]]
    if not differ and _alike(made_for.get("weights"), mine["weights"]):
        return
    what = ", ".join(f"{made_for.get(name)} {name}, not {mine[name]}" for name in differ) or "other weights"
    raise ProfileError(
        f"profile {path} was made for another model, {made_for.get('name')} ({what}); "
        "make one for this model with msrnn calibrate"
    )


def _alike(theirs: object, mine: Mapping[str, float]) -> bool:
    """Whether the weights that both know are close; some must be known to both."""
    if not isinstance(theirs, Mapping):
        return False
    shared = [(theirs[name], mine[name]) for name in mine if name in theirs]
    return bool(shared) and all(math.isclose(a, b, rel_tol=_CLOSE, abs_tol=1e-6) for a, b in shared)


def dump(profile: Mapping[str, Any]) -> str:
    """A profile as JSON that a person can read: one line per list of numbers."""
    lines = [f"{json.dumps(name)}: {_value(value)}" for name, value in profile.items()]
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
    if isinstance(value, dict) and len(json.dumps(value)) > 110:
        return "{\n  " + ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
    return json.dumps(value)
