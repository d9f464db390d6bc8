"""Policies: which token leaves a layer's state when it is full, and how a person writes that down.

One frozen dataclass covers the whole family (full, Window, Window+i, H2O, TOVA and what lies between). This file
knows nothing about tensors or models: a capacity written as a fraction or as bytes is resolved from plain numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

from .budgets.allocate import allocate

Scope = Literal["layer", "kv_head", "query_head"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_SUFFIX: dict[str, Scope] = {"layer": "layer", "head": "kv_head", "query-head": "query_head"}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHIPPED = Path(__file__).parent / "profiles"
_EXAMPLES = "tova:512, tova+4:512, tova-head:512, window:512, window+4:512, h2o:512, h2o-layer:512, fade:512, full"


@dataclass(frozen=True)
class Policy:
    """At most `capacity` tokens stay; past that, the free token with the lowest score leaves after each step.

    score = momentum x score + attention weight: 0 is TOVA, 1 is H2O. Positions below `first` and the newest `last`
    tokens are never free. `scope` says who shares a decision. `capacity=None` keeps everything.
    """

    capacity: int | None
    first: int = 0
    last: int = 0
    momentum: float = 0.0
    scope: Scope = "layer"

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            if not _is_whole(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number, 0 or more")
        if self.scope not in SCOPES:
            raise ValueError(f"unknown scope {self.scope!r}{_hint(self.scope, SCOPES)}; allowed: {', '.join(SCOPES)}")
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum is {self.momentum!r}; it must lie from 0 (TOVA) to 1 (H2O)")
        if self.capacity is None:
            return
        if not _is_whole(self.capacity) or self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity!r}; it must be at least 1 (or use 'full')")
        if self.first + self.last > self.capacity:
            raise ValueError(
                f"{self.first} first and {self.last} last slots are protected, "
                f"more than the capacity of {self.capacity}"
            )

    @property
    def blind(self) -> bool:
        """No attention weight is ever needed: nothing leaves, or exactly one token is free to."""
        return self.capacity is None or self.first + self.last == self.capacity

    def __str__(self) -> str:
        name, changes = _in_words(self)
        size = [] if self.capacity is None else [str(self.capacity)]
        return f"{name}:{','.join(size + changes)}" if size or changes else name


@dataclass(frozen=True)
class Plan:
    """One policy per layer. Its text form names the average capacity where the layers differ."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if not self.policies:
            raise ValueError("a plan needs at least one layer")

    def __len__(self) -> int:
        return len(self.policies)

    def __getitem__(self, layer: int) -> Policy:
        return self.policies[layer]

    @property
    def uniform(self) -> bool:
        return len(set(self.policies)) == 1

    @property
    def average(self) -> float | None:
        """Mean capacity over the layers; None where a layer keeps everything."""
        sizes = [p.capacity for p in self.policies if p.capacity is not None]
        return sum(sizes) / len(sizes) if len(sizes) == len(self.policies) else None

    def __str__(self) -> str:
        if self.uniform:
            return str(self.policies[0])
        words = [_in_words(policy) for policy in self.policies]
        names = sorted({name for name, _ in words})
        shared = [change for change in words[0][1] if all(change in changes for _, changes in words)]
        average = "full in some layers" if self.average is None else f"avg={self.average:g}"
        return f"{'/'.join(names)}:{','.join([average, *shared])}"


def full() -> Policy:
    return Policy(None)


def window(capacity: int, first: int = 0) -> Policy:
    """The newest tokens, and the `first` ones of all (Window+i)."""
    if _is_whole(capacity) and first > capacity:
        raise ValueError(f"{first} first slots are protected, more than the capacity of {capacity}")
    return Policy(capacity, first=first, last=capacity - first)


def h2o(capacity: int, first: int = 0, scope: Scope = "kv_head") -> Policy:
    """Half of the state for the newest tokens, half for those with the most attention so far."""
    return Policy(capacity, first=first, last=capacity // 2, momentum=1.0, scope=scope)


def tova(capacity: int, first: int = 0, scope: Scope = "layer") -> Policy:
    """The token that the current query attends to least leaves."""
    return Policy(capacity, first=first, scope=scope)


def fade(capacity: int, first: int = 0, scope: Scope = "kv_head") -> Policy:
    """Between TOVA and H2O: attention is remembered but fades, the more slowly the more tokens are kept.

    Not in the paper: chosen by experiments/search.py on half of the books. On the other half it is better than TOVA and
    than H2O at every capacity from 64 to 1,024 (docs/budgets.md).
    """
    return Policy(capacity, first=first, last=capacity // 2, momentum=memory(1.5, capacity), scope=scope)


def memory(forgotten: float, capacity: int) -> float:
    """A momentum whose memory grows with the capacity: of a score, exp(-`forgotten`) is left after as many steps."""
    return max(0.0, 1 - forgotten / capacity)


def parse(text: str, *, length: int | None = None, slot_bytes: int | None = None) -> Policy:
    """Read `tova:512`, `window+4:512`, `h2o-layer:512`, `tova:512,last=1`, `tova:512,last=1/8`,
    `tova:512,momentum=1-4/k`, `full`.

    A capacity may be a fraction of `length` (`tova:1/8`) or a size in bytes per sequence (`tova:2GiB`), where
    `slot_bytes` is what one token costs over all layers.
    """
    text, profile = split_profile(text)
    if profile:
        raise ValueError(f"{text!r} with a profile is one policy per layer, not a single one; use plan() or cache()")
    form = _Form.read(text)
    if form.name == "full":
        return form.build(None)
    return form.build(_capacity(text, form.size, length, slot_bytes))


def spread(text: str, capacities: Sequence[int]) -> Plan:
    """The same kind of policy with another capacity in every layer; `text` names the kind and may name the average."""
    form = _Form.read(text)
    if form.name == "full":
        raise ValueError("'full' keeps everything, so it has no capacities by layer; use e.g. 'tova'")
    mean = sum(capacities) / max(len(capacities), 1)
    if form.size and (not form.size.isdigit() or abs(int(form.size) - mean) > 0.5):
        raise ValueError(f"{text!r} asks for an average of {form.size}, but the capacities by layer average {mean:g}")
    return Plan(tuple(form.build(capacity) for capacity in capacities))


def kind_of(text: str) -> str:
    """A kind of policy, to be given sizes: text such as `tova`, `h2o-layer`, `tova,last=1/8`, `tova,profile=FILE`."""
    policy, profile = split_profile(text)
    if _Form.read(policy).size:
        raise ValueError(f"policy {text!r} names a size; give the kind alone, e.g. {_stem(policy)}")
    spread(policy, read_profile(profile) if profile else [1 << 20])
    return text


def split_profile(text: str) -> tuple[str, str | None]:
    """`tova:256,profile=FILE` as the policy and the profile's file or name; what follows `profile=` is all its name."""
    policy, mark, name = text.partition(",profile=")
    if mark and not name.strip():
        raise ValueError(f"{text!r} names no profile; write e.g. tova:256,profile=profile.json")
    return policy, name.strip() or None


def profile_path(name: str | Path) -> Path:
    """The file of a profile: a path, or the name of one that comes with the package."""
    own = _SHIPPED / f"{name}.json"
    return own if not Path(name).exists() and own.is_file() else Path(name)


def open_profile(path: str | Path) -> dict[str, Any]:
    """A profile file: JSON with a list of whole numbers under `capacities`, or one for each average it was made for."""
    file = profile_path(path)
    try:
        profile = json.loads(file.read_text())
    except OSError as error:
        shipped = ", ".join(sorted(other.stem for other in _SHIPPED.glob("*.json")))
        other = f"; msrnn comes with: {shipped}" if shipped else ""
        raise ValueError(f"profile {path} cannot be read: {error.strerror or error}{other}") from error
    except ValueError as error:
        raise ValueError(f"profile {path} is not JSON: {error}") from error
    if not isinstance(profile, dict) or not _is_capacities(profile.get("capacities")):
        raise ValueError(f'profile {path} needs "capacities": a list of one whole number of at least 1 per layer')
    others = profile.get("allocations", {})
    if not isinstance(others, dict) or not all(map(_is_capacities, others.values())):
        raise ValueError(f'profile {path}: "allocations" must give a list like "capacities" for each average')
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
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(f"profile {path} has no capacities for an average of {average}: {error}") from error


def _is_capacities(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(_is_whole(c) and c > 0 for c in given)


def _profiled(text: str, profile: str) -> Plan:
    """A policy's text and a profile as a plan; the text may name one of the profile's averages."""
    size = _Form.read(text).size
    return spread(text, read_profile(profile, int(size) if size.isdigit() else None))


PolicyLike = str | Policy | Plan | Sequence[str | Policy]


def plan(policy: PolicyLike, layers: int, *, length: int | None = None, slot_bytes: int | None = None) -> Plan:
    """Any spelling of a policy as one policy per layer."""
    if isinstance(policy, Plan):
        made = policy
    elif isinstance(policy, Policy):
        made = Plan((policy,) * layers)
    elif isinstance(policy, str) and ",profile=" in policy:
        text, profile = split_profile(policy)
        made = _profiled(text, profile or "")
    elif isinstance(policy, str):
        made = Plan((parse(policy, length=length, slot_bytes=slot_bytes),) * layers)
    elif isinstance(policy, Sequence):
        made = Plan(tuple(p if isinstance(p, Policy) else parse(p, length=length) for p in policy))
    else:
        raise TypeError(f"a policy is text such as 'tova:512', a Policy or one per layer, not {type(policy).__name__}")
    if len(made) != layers:
        raise ValueError(f"the plan has {len(made)} layers, the model {layers}; give one policy per layer")
    return made


_NAME = re.compile(r"(?P<name>[a-z0-9]+)(?:-(?P<scope>query-head|head|layer))?(?:\+(?P<first>\d+))?")


@dataclass(frozen=True)
class _Form:
    """A policy's text taken apart; the capacity is still as written."""

    name: str
    scope: Scope | None
    first: int
    size: str
    changes: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, text: str) -> _Form:
        head, *changes = (part.strip() for part in text.strip().lower().split(","))
        name, _, size = head.partition(":")
        if "=" in size:  # full:scope=kv_head has changes but no size
            size, changes = "", [size, *changes]
        match = _NAME.fullmatch(name)
        if not match or match["name"] not in _PRESETS:
            raise ValueError(f"unknown policy {text!r}{_hint(name, _SPELLINGS, ':' + size if size else '')}; "
                             f"allowed: {_EXAMPLES}")  # fmt: skip
        base, scope = match["name"], match["scope"]
        if scope and base in ("window", "full"):
            raise ValueError(f"{text!r}: {base} decides without attention, so it has no '-{scope}'; write {base}")
        if base == "full" and (size or match["first"]):
            raise ValueError(f"{text!r}: full keeps everything, so it takes no size; write full")
        pairs = tuple((key.strip(), value.strip()) for key, _, value in (c.partition("=") for c in changes))
        return cls(base, _SUFFIX[scope] if scope else None, int(match["first"] or 0), size, pairs)

    def build(self, capacity: int | None) -> Policy:
        if capacity is None:
            base = full()
        elif self.name == "window":
            base = window(capacity, self.first)
        elif self.name == "h2o":
            base = h2o(capacity, self.first, self.scope or "kv_head")
        elif self.name == "fade":
            base = fade(capacity, self.first, self.scope or "kv_head")
        else:
            base = tova(capacity, self.first, self.scope or "layer")
        values = {f.name: getattr(base, f.name) for f in fields(base)}
        return Policy(**(values | dict(_override(key, value, capacity) for key, value in self.changes)))


_PRESETS = ("full", "window", "h2o", "tova", "fade")
_SPELLINGS = (*_PRESETS, "tova-head", "tova-layer", "h2o-head", "h2o-layer", "window+4", "tova+4")


_MEMORY = re.compile(r"1-(\d+(?:\.\d+)?)/k")


def _override(key: str, value: str, capacity: int | None) -> tuple[str, object]:
    allowed = ("first", "last", "momentum", "scope")
    if key not in allowed:
        raise ValueError(f"unknown setting {key!r}{_hint(key, allowed)}; allowed: {', '.join(allowed)}")
    if key == "scope":
        return key, value
    try:
        if key == "last" and "/" in value and capacity is not None:  # a share of each layer's own capacity
            return key, int(Fraction(value) * capacity)
        if key == "momentum" and (grows := _MEMORY.fullmatch(value)) and capacity is not None:
            return key, memory(float(grows[1]), capacity)
        return key, float(value) if key == "momentum" else int(value)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{key}={value!r} is not a number") from None


def _capacity(text: str, size: str, length: int | None, slot_bytes: int | None) -> int:
    if re.fullmatch(r"-?\d+", size):
        return int(size)
    if re.fullmatch(r"\d+/\d+", size):
        top, bottom = map(int, size.split("/"))
        if not 0 < top <= bottom:
            raise ValueError(f"{text!r}: the fraction must lie above 0 and at most at 1")
        if length is None:
            raise ValueError(f"{text!r} is a fraction of a length that is not known here; write the number of slots")
        return max(1, int(Fraction(top, bottom) * length))
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b)", size):
        if slot_bytes is None:
            raise ValueError(f"{text!r} is a size in bytes and no model is known here; write the number of slots")
        wanted = int(Fraction(match[1]) * _UNITS[match[2].upper()])
        slots = wanted // slot_bytes - 1  # one more slot holds the newcomer while it is attended to
        if slots < 1:
            raise ValueError(
                f"{text!r}: {wanted} bytes hold no state; this model needs at least {2 * slot_bytes} bytes"
            )
        return slots
    raise ValueError(
        f"{text!r} has no valid capacity; write slots ({_stem(text)}:512), a fraction of the length "
        f"({_stem(text)}:1/8) or bytes ({_stem(text)}:2GiB)"
    )


def _stem(text: str) -> str:
    return text.strip().split(":")[0].split(",")[0]


def _in_words(policy: Policy) -> tuple[str, list[str]]:
    """A preset's name and what differs from it."""
    name, base = _nearest_preset(policy)
    changed = [f.name for f in fields(policy) if getattr(policy, f.name) != getattr(base, f.name)]
    return name, [f"{key}={getattr(policy, key)}" for key in changed]


def _nearest_preset(policy: Policy) -> tuple[str, Policy]:
    """The preset that needs the fewest changes to say `policy`, as its name and its settings."""
    if policy.capacity is None:
        return "full", full()
    plus = f"+{policy.first}" if policy.first else ""
    options = {}
    for suffix, scope in (("", "layer"), ("-head", "kv_head"), ("-query-head", "query_head")):
        options[f"tova{suffix}{plus}"] = tova(policy.capacity, policy.first, scope)  # type: ignore[arg-type]
    if policy.first + policy.capacity // 2 <= policy.capacity:
        for suffix, scope in (("", "kv_head"), ("-layer", "layer"), ("-query-head", "query_head")):
            options[f"h2o{suffix}{plus}"] = h2o(policy.capacity, policy.first, scope)  # type: ignore[arg-type]
            options[f"fade{suffix}{plus}"] = fade(policy.capacity, policy.first, scope)  # type: ignore[arg-type]
    options[f"window{plus}"] = window(policy.capacity, policy.first)

    def changes(name: str) -> int:
        return sum(getattr(options[name], f.name) != getattr(policy, f.name) for f in fields(policy))

    name = min(options, key=changes)  # the first of equals: tova, h2o, fade, window
    return name, options[name]


def _hint(given: str, allowed: Sequence[str], tail: str = "") -> str:
    close = get_close_matches(given, allowed, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}{tail if close[0] != 'full' else ''}'?" if close else ""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
