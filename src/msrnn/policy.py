"""Policies: which token leaves a layer's state when it is full, and how a person writes that down.

One frozen dataclass covers the whole family (full, Window, Window+i, H2O, TOVA and what lies between). This file
knows nothing about tensors, models or files: how many slots a number of bytes holds is for `hf/byte_budget.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from .system.sizes import parse_bytes

Scope = Literal["layer", "kv_head", "query_head"]
Gain = Literal["value_norm"]
KV = Literal["int8", "k8v4"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
GAINS: tuple[Gain, ...] = get_args(Gain)
KVS: tuple[KV, ...] = get_args(KV)
_SUFFIX: dict[str, Scope] = {"layer": "layer", "head": "kv_head", "query-head": "query_head"}
_BEST = "best"
_EXAMPLES = (
    "best:512, tova:512, tova+4:512, tova-head:512, window:512, window+4:512, h2o:512, h2o-layer:512, fade:512, "
    "blend:512, full"
)


@dataclass(frozen=True)
class Policy:
    """At most `capacity` tokens stay; past that, the free token with the lowest score leaves after each step.

    score = momentum x score + attention weight x gain: momentum 0 is TOVA, 1 is H2O. Positions below `first` and the
    newest `last` tokens are never free. `scope` says which heads share a decision. `capacity=None` keeps everything.
    `gain` is a factor per slot and KV head (`value_norm`: the norm of its value). `rule` names a research policy, whose
    own score takes the place of weight x gain (`msrnn/rules/`, or the path of a Python file). `kv` is the format of
    the slots: 8-bit keys and values (`int8`), 8-bit keys and 4-bit values (`k8v4`), or the model's own dtype.
    `residual`: tokens that leave join one mean key and value per KV head, which is attended to with the weight of the
    number of tokens in it; with each new one, those before count `residual` times as much.
    """

    capacity: int | None
    first: int = 0
    last: int = 0
    momentum: float = 0.0
    scope: Scope = "layer"
    gain: Gain | None = None
    rule: str | None = None
    kv: KV | None = None
    residual: float | None = None

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            if not _is_whole(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number, 0 or more")
        if self.scope not in SCOPES:
            raise ValueError(f"unknown scope {self.scope!r}{_hint(self.scope, SCOPES)}; allowed: {', '.join(SCOPES)}")
        if self.gain is not None and self.gain not in GAINS:
            raise ValueError(f"unknown gain {self.gain!r}{_hint(self.gain, GAINS)}; allowed: {', '.join(GAINS)}")
        if self.kv is not None and self.kv not in KVS:
            raise ValueError(f"unknown kv format {self.kv!r}{_hint(self.kv, KVS)}; allowed: {', '.join(KVS)}")
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum is {self.momentum!r}; it must lie from 0 (TOVA) to 1 (H2O)")
        if self.rule is not None and self.gain:
            raise ValueError(f"{self.rule} is a rule with a score of its own; it takes no gain")
        if self.residual is not None and (not isinstance(self.residual, int | float) or not 0 <= self.residual <= 1):
            raise ValueError(
                f"residual is {self.residual!r}; it must lie from 0 (the last that left) to 1 (all equally)"
            )
        if self.capacity is None:
            return
        if not _is_whole(self.capacity) or self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity!r}; it must be at least 1 (or use 'full')")
        if self.first + self.last > self.capacity:
            raise ValueError(
                f"{self.first} first and {self.last} last slots are protected, "
                f"more than the capacity of {self.capacity}"
            )

    @classmethod
    def parse(cls, text: str, *, length: int | None = None) -> Policy:
        """`Policy.parse("tova:512")`; see `parse_policy`."""
        return parse_policy(text, length=length)

    @property
    def blind(self) -> bool:
        """No attention weight is ever needed: nothing leaves, or exactly one token is free to."""
        return self.capacity is None or self.first + self.last == self.capacity

    @property
    def runs_everywhere(self) -> bool:
        """Whether all kernels take it: none of them takes a research rule, and some take no residual."""
        return self.rule is None and self.residual is None

    def __str__(self) -> str:
        name, changes = in_words(self)
        size = [] if self.capacity is None else [str(self.capacity)]
        return f"{name}:{','.join(size + changes)}" if size or changes else name


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
    """Between TOVA and H2O: attention is accumulated with a decay, the slower the more tokens are kept.

    Not in the paper: chosen by experiments/search.py on half of the books. On the other half it is better than TOVA and
    than H2O at every capacity from 64 to 1,024 (docs/budgets.md).
    """
    return Policy(capacity, first=first, last=capacity // 2, momentum=decay(1.5, capacity), scope=scope)


def blend(capacity: int, first: int = 0, scope: Scope = "kv_head") -> Policy:
    """`fade` with a residual: what leaves is blended into one key and value, which forget as fast as scores do."""
    return replace(fade(capacity, first, scope), residual=decay(1.5, capacity))


def decay(rate: float, capacity: int) -> float:
    """A momentum for memory that grows with the capacity: exp(-`rate`) of a score is left after `capacity` steps."""
    return max(0.0, 1 - rate / max(1, capacity))  # a capacity of 0 is refused with the policy


def parse_policy(text: str, *, length: int | None = None) -> Policy:
    """Read `tova:512`, `window+4:512`, `h2o-layer:512`, `tova:512,last=1`, `tova:512,last=1/8`,
    `tova:512,momentum=1-4/k`, `tova:512,gain=value_norm`, `tova:512,kv=int8`, `key_difference-head:512`,
    `./my_rule.py:512`, `full`.

    A capacity may be a fraction of `length` (`tova:1/8`). A size in bytes (`tova:2GiB`) and `best` depend on the model.
    """
    parts = split_policy(text)
    if is_best(text):
        raise ValueError(f"{text!r} depends on the model; give it to msrnn.cache or msrnn.RNN (msrnn info shows it)")
    if parts.profile:
        raise ValueError(f"{text!r} has a profile, so it is one policy per layer; give it to msrnn.cache or msrnn.RNN")
    form = _Form.read(text)
    if form.name == "full":
        return form.build(None)
    size = read_size(text, length)
    if size.unit == "bytes":
        raise ValueError(f"{text!r} is a size in bytes and no model is known here; write the number of slots")
    return form.build(size.number)


def with_capacity(text: str, capacity: int) -> Policy:
    """The kind of policy that `text` names, whatever its size, with this capacity."""
    form = _Form.read(text)
    if form.name == "full":
        raise ValueError("'full' keeps everything, so it has no capacities by layer; use e.g. 'tova'")
    return form.build(capacity)


@dataclass(frozen=True)
class PolicyText:
    """A policy's text in parts: `tova:256,last=8,profile=FILE` has the kind `tova,last=8` and the size `256`."""

    kind: str
    size: str = ""
    profile: str | None = None

    def with_size(self, size: int | str) -> str:
        return str(replace(self, size=str(size)))

    @property
    def policy(self) -> str:
        """The text without its profile."""
        name, *changes = self.kind.split(",")
        head = f"{name}:{self.size}" if self.size else name
        return ",".join([head, *changes])

    def __str__(self) -> str:
        return self.policy if self.profile is None else f"{self.policy},profile={self.profile}"


def split_policy(text: str) -> PolicyText:
    """A policy's text taken apart. What follows `profile=` is all its name, so it comes last."""
    policy, mark, name = text.partition(",profile=")
    if mark and not name.strip():
        raise ValueError(f"{text!r} names no profile; write e.g. tova:256,profile=profile.json")
    head, *changes = (part.strip() for part in policy.strip().split(","))
    kind, _, size = head.partition(":")
    if "=" in size:  # full:scope=kv_head has changes but no size
        size, changes = "", [size, *changes]
    return PolicyText(",".join([kind, *changes]), size, name.strip() or None)


def check_kind(text: str) -> None:
    """Refuse what is not a kind of policy to be given sizes, such as `tova`, `h2o-layer`, `tova,last=1/8`."""
    if split_policy(text).size:
        raise ValueError(f"policy {text!r} names a size; give the kind alone, e.g. {_stem(text)}")
    with_capacity(recommended(split_policy(text)).policy, 1 << 20)


def is_best(policy: object) -> bool:
    """Whether a text names the recommended policy, `best:256`, which depends on the model (`hf/best.py`)."""
    return isinstance(policy, str) and split_policy(policy).kind.split(",")[0].lower() == _BEST


def needs_model(policy: object) -> bool:
    """Whether the number of slots that a text names depends on the model: `best:256`, or a size in bytes."""
    return is_best(policy) or (isinstance(policy, str) and bool(_BYTES.fullmatch(split_policy(policy).size.lower())))


def check_size(text: str, *, length: int | None = None) -> Size | None:
    """The size of a policy, of `best` in plain slots (None: full); refuses what no model could run."""
    policy = recommended(split_policy(text)).policy
    if needs_model(text):
        size = read_size(text, length)
        with_capacity(policy, size.number)  # no slot takes less than a byte
        return size
    capacity = parse_policy(policy, length=length).capacity
    return None if capacity is None else Size(capacity, "slots")


def recommended(text: PolicyText) -> PolicyText:
    """`best:256,kv=k8v4` as `fade:256,kv=k8v4`, its size still in plain slots; any other text as it is.

    Without `kv=` the format depends on how many slots there are.
    """
    if not is_best(text.policy):
        return text
    changes = text.kind.lower().split(",")[1:]
    if other := [change for change in changes if not change.startswith("kv=")]:
        raise ValueError(f"{text}: best takes kv= and profile= only, not {other[0]}; write a policy such as fade:512")
    return replace(text, kind=",".join(["fade", *changes]))


_NAME = re.compile(r"(?P<name>.+\.py|[a-z0-9_]+)(?:-(?P<scope>query-head|head|layer))?(?:\+(?P<first>\d+))?")


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
        parts = split_policy(text)
        name, *changes = parts.kind.split(",")
        name, size = name if ".py" in name else name.lower(), parts.size.lower()
        match = _NAME.fullmatch(name)
        if not match or not (match["name"] in PRESETS or match["name"].endswith(".py") or match["name"] in _rules()):
            known = f"allowed: {_EXAMPLES}; research policies: {', '.join(_rules())}"
            raise ValueError(f"unknown policy {text!r}{_policy_hint(name, size)}; {known}")
        base, scope = match["name"], match["scope"]
        if scope and base in ("window", "full"):
            raise ValueError(f"{text!r}: {base} decides without attention, so it has no '-{scope}'; write {base}")
        if base == "full" and (size or match["first"]):
            raise ValueError(f"{text!r}: full keeps everything, so it takes no size; write full")
        pairs = tuple(
            (key.strip().lower(), value.strip().lower()) for key, _, value in (c.partition("=") for c in changes)
        )
        return cls(base, _SUFFIX[scope] if scope else None, int(match["first"] or 0), size, pairs)

    def build(self, capacity: int | None) -> Policy:
        values = {f.name: getattr(self._preset(capacity), f.name) for f in fields(Policy)}
        return Policy(**(values | dict(_override(key, value, capacity) for key, value in self.changes)))

    def _preset(self, capacity: int | None) -> Policy:
        if capacity is None:
            return full()
        if self.name == "window":
            return window(capacity, self.first)
        if self.name == "h2o":
            return h2o(capacity, self.first, self.scope or "kv_head")
        if self.name == "fade":
            return fade(capacity, self.first, self.scope or "kv_head")
        if self.name == "blend":
            return blend(capacity, self.first, self.scope or "kv_head")
        if self.name == "tova":
            return tova(capacity, self.first, self.scope or "layer")
        return Policy(capacity, self.first, scope=self.scope or "layer", rule=self.name)


PRESETS = ("tova", "h2o", "fade", "blend", "window", "full")
_SPELLINGS = (*PRESETS, _BEST, "tova-head", "tova-layer", "h2o-head", "h2o-layer", "window+4", "tova+4")
_DECAY = re.compile(r"1-(\d+(?:\.\d+)?)/k")
_BYTES = re.compile(r"\d+(\.\d+)?\s*[kmg]?i?b")


@cache
def _rules() -> tuple[str, ...]:
    """The research policies that come with msrnn: one file each."""
    return tuple(sorted(file.stem for file in (Path(__file__).parent / "rules").glob("[!_]*.py")))


def _override(key: str, value: str, capacity: int | None) -> tuple[str, object]:
    allowed = ("first", "last", "momentum", "scope", "gain", "kv", "residual")
    if key not in allowed:
        raise ValueError(f"unknown setting {key!r}{_hint(key, allowed)}; allowed: {', '.join(allowed)}")
    if key in ("scope", "gain", "kv"):
        return key, value
    try:
        if key == "last" and "/" in value and capacity is not None:  # a share of each layer's own capacity
            return key, int(Fraction(value) * capacity)
        if key in ("momentum", "residual") and (grows := _DECAY.fullmatch(value)) and capacity is not None:
            return key, decay(float(grows[1]), capacity)
        return key, float(value) if key in ("momentum", "residual") else int(value)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{key}={value!r} is not a number") from None


class Size(NamedTuple):
    """A size as a number of slots or of bytes."""

    number: int
    unit: Literal["slots", "bytes"]


def read_size(text: str, length: int | None = None) -> Size:
    """The size that a policy's text names: slots, a fraction of `length`, or bytes."""
    size = split_policy(text).size.lower()
    if re.fullmatch(r"-?\d+", size):
        return Size(int(size), "slots")
    if re.fullmatch(r"\d+/\d+", size):
        top, bottom = map(int, size.split("/"))
        if not 0 < top <= bottom:
            raise ValueError(f"{text!r}: the fraction must lie above 0 and at most at 1")
        if length is None:
            raise ValueError(f"{text!r} is a fraction of a length that is not known here; write the number of slots")
        return Size(max(1, int(Fraction(top, bottom) * length)), "slots")
    if _BYTES.fullmatch(size):
        return Size(parse_bytes(size), "bytes")
    raise ValueError(
        f"{text!r} has no valid capacity; write slots ({_stem(text)}:512), a fraction of the length "
        f"({_stem(text)}:1/8) or bytes ({_stem(text)}:2GiB)"
    )


def _stem(text: str) -> str:
    return text.strip().split(":")[0].split(",")[0]


def in_words(policy: Policy) -> tuple[str, list[str]]:
    """A preset's name and what differs from it."""
    name, base = _nearest_preset(policy)
    changed = [f.name for f in fields(policy) if getattr(policy, f.name) != getattr(base, f.name)]
    return name, [f"{key}={getattr(policy, key)}" for key in changed]


def _nearest_preset(policy: Policy) -> tuple[str, Policy]:
    """The preset that needs the fewest changes to say `policy`, as its name and its settings."""
    if policy.capacity is None:
        return "full", full()
    plus = f"+{policy.first}" if policy.first else ""
    if policy.rule is not None:
        suffix = {"layer": "", "kv_head": "-head", "query_head": "-query-head"}[policy.scope]
        return f"{policy.rule}{suffix}{plus}", Policy(
            policy.capacity, policy.first, scope=policy.scope, rule=policy.rule
        )
    options = {}
    for suffix, scope in (("", "layer"), ("-head", "kv_head"), ("-query-head", "query_head")):
        options[f"tova{suffix}{plus}"] = tova(policy.capacity, policy.first, scope)  # type: ignore[arg-type]
    if policy.first + policy.capacity // 2 <= policy.capacity:
        for suffix, scope in (("", "kv_head"), ("-layer", "layer"), ("-query-head", "query_head")):
            options[f"h2o{suffix}{plus}"] = h2o(policy.capacity, policy.first, scope)  # type: ignore[arg-type]
            options[f"fade{suffix}{plus}"] = fade(policy.capacity, policy.first, scope)  # type: ignore[arg-type]
            options[f"blend{suffix}{plus}"] = blend(policy.capacity, policy.first, scope)  # type: ignore[arg-type]
    options[f"window{plus}"] = window(policy.capacity, policy.first)

    def changes(name: str) -> int:
        return sum(getattr(options[name], f.name) != getattr(policy, f.name) for f in fields(policy))

    name = min(options, key=changes)  # the first of equals: tova, h2o, fade, blend, window
    return name, options[name]


def _policy_hint(name: str, size: str) -> str:
    """What may have been meant: a size alone (slots, a fraction, bytes) lacks a policy, another name is misspelt."""
    if not size and (re.fullmatch(r"\d+(/\d+)?", name) or _BYTES.fullmatch(name)):
        return f"; did you mean 'tova:{name}'?"
    return _hint(name, _SPELLINGS, f":{size}" if size else "")


def _hint(given: str, allowed: Sequence[str], tail: str = "") -> str:
    close = get_close_matches(given, allowed, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}{tail if close[0] != 'full' else ''}'?" if close else ""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
