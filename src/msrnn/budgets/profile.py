"""Profiles: one capacity per layer, measured on a model, in a JSON file with what they were made from.

A profile names the model it was made for, and another model is refused (`hf/identity.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..policy import Plan, PolicyLike, SlotBytes, check_kind, per_layer, split_policy
from .allocate import allocate

KIND = "msrnn profile 1"
_LARGEST, _MOST_LAYERS, _LARGEST_FILE = 2**31, 10_000, 1 << 24
_SHIPPED = Path(__file__).parents[1] / "profiles"


def plan_for(
    policy: PolicyLike, layers: int, *, length: int | None = None, slot_bytes: int | SlotBytes | None = None
) -> Plan:
    """Any spelling of a policy as one policy per layer; `tova:256,profile=FILE` takes its capacities from a file."""
    if isinstance(policy, str) and (name := split_policy(policy).profile):
        text = split_policy(policy)
        size = int(text.size) if text.size.isdigit() else None
        policy = per_layer(text.policy, read_profile(name, size))
    return Plan.of(policy, layers, length=length, slot_bytes=slot_bytes)


def check_policy_kind(text: str) -> None:
    """Refuse what is not a kind of policy without a size; a profile that it names must be readable."""
    name = split_policy(text).profile
    check_kind(str(split_policy(text).policy))
    if name:
        read_profile(name)


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with the package."""
    return sorted(file.stem for file in _SHIPPED.glob("*.json"))


def profile_path(name: str | Path) -> Path:
    """The file of a profile: a path, or the name of one that ships with the package."""
    own = _SHIPPED / f"{name}.json"
    return own if not Path(name).exists() and own.is_file() else Path(name)


def open_profile(path: str | Path) -> dict[str, Any]:
    """A profile file: JSON with a list of whole numbers under `capacities`, or one for each average it was made for."""
    file = profile_path(path)
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"it has {file.stat().st_size:,} bytes, and a profile has a few thousand")
        profile = json.loads(file.read_text())
    except OSError as error:
        shipped = ", ".join(shipped_profiles())
        other = f"; msrnn comes with: {shipped}" if shipped else ""
        raise ValueError(f"profile {path} cannot be read: {error.strerror or error}{other}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"profile {path} is not JSON: {error}") from error
    if not isinstance(profile, dict) or not _is_capacities(profile.get("capacities")):
        raise ValueError(f'profile {path} needs "capacities": a list of one whole number of at least 1 per layer')
    others = profile.get("allocations", {})
    if not isinstance(others, dict) or not all(map(_is_capacities, others.values())):
        raise ValueError(f'profile {path}: "allocations" must give a list like "capacities" for each average')
    layers = len(profile["capacities"])
    if any(len(other) != layers for other in others.values()):
        raise ValueError(f'profile {path}: "allocations" must have {layers} layers each, as "capacities" has')
    if "curves" in profile and not _are_curves(profile["curves"], layers):
        raise ValueError(f'profile {path}: "curves" must have, for each of {layers} layers, pairs of a size and a loss')
    if not _is_model(profile.get("model")):
        raise ValueError(f'profile {path}: "model" must be a table with numbers under "weights"')
    return profile


def read_profile(path: str | Path, average: int | None = None) -> list[int]:
    """The capacities by layer of a profile file.

    Where another average is asked for than it was made for, from its curves, if it has any.
    """
    profile = open_profile(path)
    others, capacities = profile.get("allocations", {}), profile["capacities"]
    if average is None or average == profile.get("average"):
        return list(capacities)
    if str(average) in others or "curves" not in profile:
        return list(others.get(str(average), capacities))
    try:
        curves = [dict(curve) for _, curve in zip(capacities, profile["curves"], strict=True)]
        return allocate(curves, average * len(capacities))
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ValueError(f"profile {path} has no capacities for an average of {average}: {error}") from error


def _is_capacities(given: object) -> bool:
    """One whole number per layer, of a size that a machine may have."""
    return isinstance(given, list) and 0 < len(given) <= _MOST_LAYERS and all(map(_is_capacity, given))


def _is_capacity(given: object) -> bool:
    return _is_whole(given) and 0 < given < _LARGEST  # type: ignore[operator]


def _are_curves(given: object, layers: int) -> bool:
    """For each layer pairs of a capacity and a finite loss."""
    if not isinstance(given, list) or len(given) != layers:
        return False
    points = [point for curve in given if isinstance(curve, list) for point in curve]
    pairs = all(isinstance(point, list) and len(point) == 2 for point in points)
    return pairs and all(map(bool, given)) and all(_is_capacity(size) and _is_finite(loss) for size, loss in points)


def _is_model(given: object) -> bool:
    """Whom a profile was made for; a profile need not say."""
    weights = given.get("weights", {}) if isinstance(given, Mapping) else {}
    return isinstance(weights, Mapping) and all(map(_is_finite, weights.values()))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
