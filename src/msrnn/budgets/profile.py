"""Profiles: one capacity per layer or per KV head, measured on a model, in a JSON file with what they were made from.

By KV head, a list of capacities stands for each layer. A profile names the model it was made for, and another model is
refused (`hf/identity.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..plan import Plan, PolicyLike, per_layer
from ..policy import check_kind, split_policy
from .allocate import allocate

KIND = "msrnn profile 1"
Capacities = list[int] | list[list[int]]  # by layer, or by layer and KV head
_LARGEST, _MOST_LAYERS, _LARGEST_FILE = 2**31, 10_000, 1 << 24
_SHIPPED = Path(__file__).parents[1] / "profiles"


def plan_for(policy: PolicyLike, layers: int, *, length: int | None = None) -> Plan:
    """Any spelling of a policy as one policy per layer; `tova:256,profile=FILE` takes its capacities from a file."""
    if isinstance(policy, str) and (name := split_policy(policy).profile):
        text = split_policy(policy)
        size = int(text.size) if text.size.isdigit() else None
        policy = per_layer(text.policy, read_profile(name, size))
    return Plan.of(policy, layers, length=length)


def check_policy_kind(text: str) -> None:
    """Refuse what is not a kind of policy without a size; a profile that it names must be readable."""
    name = split_policy(text).profile
    check_kind(str(split_policy(text).policy))
    if name:
        read_profile(name)


def check_by_head(kind: str) -> None:
    """Refuse a kind of policy whose KV heads have no budgets of their own."""
    check_policy_kind(kind)
    per_layer(kind, [[1 << 20]])


def check_scales(name: str | Path) -> None:
    """Refuse a profile that cannot give capacities for any average."""
    if "curves" not in open_profile(name):
        raise ValueError(
            f"profile {name} has no curves, so its capacities do not scale to a number of bytes; "
            "write the average that it was made for, or make one with msrnn calibrate"
        )


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with the package."""
    return sorted(file.stem for file in _SHIPPED.glob("*.json"))


def profile_path(name: str | Path) -> Path:
    """The file of a profile: a path, or the name of one that ships with the package."""
    own = _SHIPPED / f"{name}.json"
    return own if not Path(name).exists() and own.is_file() else Path(name)


def open_profile(path: str | Path) -> dict[str, Any]:
    """A profile file: JSON with one whole number per layer, or a list of one per KV head, under `capacities`."""
    profile = _read_json(path)
    shape = _shape(profile.get("capacities")) if isinstance(profile, dict) else None
    if not isinstance(profile, dict) or shape is None:
        raise ValueError(
            f'profile {path} needs "capacities": a list of one whole number of at least 1 per layer, '
            "or for every layer a list of one per KV head"
        )
    others, what = profile.get("allocations", {}), "layers" if isinstance(shape, int) else "layers and KV heads"
    if not isinstance(others, dict) or any(_shape(other) is None for other in others.values()):
        raise ValueError(f'profile {path}: "allocations" must give a list like "capacities" for each average')
    if any(_shape(other) != shape for other in others.values()):
        raise ValueError(f'profile {path}: "allocations" must have the same {what} as "capacities"')
    if "curves" in profile and not _are_curves(profile["curves"], shape):
        pairs = "pairs of a size and a loss"
        raise ValueError(f'profile {path}: "curves" must have {pairs} for the same {what} as "capacities"')
    if not _is_model(profile.get("model")):
        raise ValueError(f'profile {path}: "model" must be a table with numbers under "weights"')
    return profile


def is_by_head(path: str | Path) -> bool:
    """Whether a profile gives every KV head a capacity, not every layer."""
    return isinstance(open_profile(path)["capacities"][0], list)


def goal(path: str | Path) -> str:
    """What the losses of a profile count (`calibrate --for`); only perplexity, in those that do not say."""
    return str(open_profile(path).get("for", "perplexity"))


def _read_json(path: str | Path) -> object:
    file = profile_path(path)
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"it has {file.stat().st_size:,} bytes, and a profile has a few thousand")
        content: object = json.loads(file.read_text())
    except OSError as error:
        shipped = ", ".join(shipped_profiles())
        other = f"; msrnn comes with: {shipped}" if shipped else ""
        raise ValueError(f"profile {path} cannot be read: {error.strerror or error}{other}") from error
    except UnicodeDecodeError:
        raise ValueError(f"profile {path} is not JSON: it is no UTF-8 text; give a file of msrnn calibrate") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"profile {path} is not JSON: {error}") from error
    return content


def read_profile(path: str | Path, average: int | None = None) -> Capacities:
    """The capacities of a profile file, by layer or by KV head.

    Where another average is asked for than it was made for, from its curves, if it has any.
    """
    profile = open_profile(path)
    others, capacities = profile.get("allocations", {}), profile["capacities"]
    if average is None or average == profile.get("average"):
        return list(capacities)
    if str(average) in others or "curves" not in profile:
        return list(others.get(str(average), capacities))
    try:
        return allocate_average(profile["curves"], average)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ValueError(f"profile {path} has no capacities for an average of {average}: {error}") from error


def allocate_average(curves: Sequence[Any], average: int) -> Capacities:
    """Capacities of this average along curves as a profile has them: [size, loss] pairs by layer, or by KV head."""
    if not _is_pair(curves[0][0]):
        heads = [len(layer) for layer in curves]
        sizes = allocate([dict(curve) for layer in curves for curve in layer], average * sum(heads))
        return [sizes[end - count : end] for count, end in zip(heads, accumulate(heads), strict=True)]
    return allocate([dict(curve) for curve in curves], average * len(curves))


def _shape(capacities: object) -> int | tuple[int, ...] | None:
    """The number of layers, or that of KV heads in every layer; None: these are no capacities."""
    if not isinstance(capacities, list) or not 0 < len(capacities) <= _MOST_LAYERS:
        return None
    if all(map(_is_capacity, capacities)):
        return len(capacities)
    if all(isinstance(heads, list) and heads and all(map(_is_capacity, heads)) for heads in capacities):
        return tuple(map(len, capacities))
    return None


def _is_capacity(given: object) -> bool:
    return _is_whole(given) and 0 < given < _LARGEST  # type: ignore[operator]


def _are_curves(given: object, shape: int | tuple[int, ...]) -> bool:
    """Pairs of a capacity and a finite loss for every layer, or for every KV head of every layer."""
    if isinstance(shape, int):
        return isinstance(given, list) and len(given) == shape and all(map(_is_curve, given))
    if not isinstance(given, list) or len(given) != len(shape):
        return False
    return all(_are_curves(layer, heads) for layer, heads in zip(given, shape, strict=True))


def _is_curve(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(map(_is_pair, given))


def _is_pair(given: object) -> bool:
    return isinstance(given, list) and len(given) == 2 and _is_capacity(given[0]) and _is_finite(given[1])


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
