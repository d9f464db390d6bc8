"""Policies: which token leaves a layer's state when it is full, and how a person writes that down.

One frozen dataclass covers the whole family (full, Window, Window+i, H2O, TOVA and what lies between). This file
knows nothing about tensors, models or files: how many slots a number of bytes holds is for `hf/byte_budget.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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
_FORMATS = "int8 (8-bit keys and values), k8v4 (8-bit keys, 4-bit values)"
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
        if self.capacity is not None and (not _is_whole(self.capacity) or self.capacity < 1):
            raise ValueError(
                f"capacity is {self.capacity!r}; it must be at least 1 (or 'full', which keeps every token)"
            )
        for name in ("first", "last"):
            if not _is_whole(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number, 0 or more")
        if self.scope not in SCOPES:
            raise ValueError(_unknown("scope", self.scope, SCOPES))
        if self.gain is not None and self.gain not in GAINS:
            raise ValueError(_unknown("gain", self.gain, GAINS))
        if self.kv is not None and self.kv not in KVS:
            raise ValueError(f"unknown kv format {self.kv!r}; allowed: {_FORMATS}")
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum is {self.momentum!r}; it must lie from 0 (TOVA) to 1 (H2O)")
        if self.rule is not None and self.gain:
            raise ValueError(f"{self.rule} is a rule with a score of its own; it takes no gain")
        if self.residual is not None and (not isinstance(self.residual, int | float) or not 0 <= self.residual <= 1):
            raise ValueError(
                f"residual is {self.residual!r}; it must lie from 0 (the last that left) to 1 (all equally)"
            )
        if self.capacity is not None and self.first + self.last > self.capacity:
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
    if _is_whole(capacity) and first > capacity > 0:
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
    if split_policy(text).profile:
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
    policy, *names = (part.strip() for part in re.split(r",\s*profile\s*=", text))
    if len(names) > 1:
        raise ValueError(f"{text!r} gives two profiles, {names[0]} and {names[1]}; a policy takes one")
    if names == [""]:
        raise ValueError(f"{text!r} names no profile; write e.g. tova:256,profile=profile.json")
    head, *changes = (part.strip() for part in policy.split(","))
    kind, _, size = head.partition(":")
    if "=" in size:  # full:scope=kv_head has changes but no size
        size, changes = "", [size, *changes]
    return PolicyText(",".join([kind, *changes]), size, names[0] if names else None)


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
    form = replace(_Form.read(recommended(split_policy(text)).policy), text=text)
    size = None if form.name == "full" else read_size(text, length)
    form.build(size.number if size else None)  # no slot takes less than a byte
    return size


def recommended(text: PolicyText) -> PolicyText:
    """`best:256,kv=k8v4` as `fade:256,kv=k8v4`, its size still in plain slots; any other text as it is.

    Without `kv=` the format depends on how many slots there are.
    """
    if not is_best(text.policy):
        return text
    changes = text.kind.lower().split(",")[1:]
    if other := [change for change in changes if change and change.partition("=")[0].strip() != "kv"]:
        raise ValueError(f"'{text}': best takes kv= and profile= only, not {other[0]}; write a policy such as fade:512")
    _Form(str(text), "fade", None, 0, _settings(str(text), changes)).build(1)  # refuses other formats
    return replace(text, kind=",".join(["fade", *changes]))


_NAME = re.compile(r"(?P<name>.+\.py|[a-z0-9_]+)(?:-(?P<scope>query-head|head|layer))?(?:\+(?P<first>\d+))?")


@dataclass(frozen=True)
class _Form:
    """A policy's text taken apart, but for its capacity."""

    text: str
    name: str
    scope: Scope | None
    first: int
    changes: dict[str, str]

    @classmethod
    def read(cls, text: str) -> _Form:
        parts = split_policy(text)
        name, *changes = parts.kind.split(",")
        name, size = name if ".py" in name else name.lower(), parts.size.lower()
        match = _NAME.fullmatch(name)
        if not match or not (match["name"].endswith(".py") or match["name"] in (*PRESETS, _BEST, *_rules())):
            raise ValueError(_unknown_policy(text, name, size))
        base, scope, first = match["name"], match["scope"], match["first"]
        if base == _BEST and (scope or first):
            fade_text = text.lower().replace(_BEST, "fade", 1)
            raise ValueError(f"{text!r}: best takes no scope and no first tokens; write {fade_text.strip()}")
        if base == _BEST:
            raise ValueError(f"{text!r} depends on the model; give it to msrnn.cache or msrnn.RNN (see msrnn info)")
        if scope and base in ("window", "full"):
            raise ValueError(f"{text!r}: {base} decides without attention, so it has no '-{scope}'; write {base}")
        if base == "full" and (size or first):
            raise ValueError(f"{text!r}: full keeps everything, so it takes no size; write full")
        settings = _settings(text, changes, scope=scope, first=first)
        return cls(text, base, _SUFFIX[scope] if scope else None, int(first or 0), settings)

    def build(self, capacity: int | None) -> Policy:
        try:
            values = {f.name: getattr(self._preset(capacity), f.name) for f in fields(Policy)}
            return Policy(**(values | {key: _value(key, value, capacity) for key, value in self.changes.items()}))
        except ValueError as error:
            raise ValueError(f"{self.text!r}: {error}") from None

    def _preset(self, capacity: int | None) -> Policy:
        if capacity is None:
            return full()
        if self.name == "window":
            return window(capacity, self.first)
        if self.name in _BY_SCOPE:
            scope: dict[str, Scope] = {"scope": self.scope} if self.scope else {}
            return _BY_SCOPE[self.name](capacity, self.first, **scope)
        return Policy(capacity, self.first, scope=self.scope or "layer", rule=self.name)


PRESETS = ("tova", "h2o", "fade", "blend", "window", "full")
_SPELLINGS = (*PRESETS, _BEST, "tova-head", "tova-layer", "h2o-head", "h2o-layer", "window+4", "tova+4")
_BY_SCOPE: dict[str, Callable[..., Policy]] = {"tova": tova, "h2o": h2o, "fade": fade, "blend": blend}
# and a value each, for examples
_SETTINGS = {"first": 4, "last": 8, "momentum": 1, "scope": "layer", "gain": "value_norm", "kv": "int8", "residual": 1}
_DECAY = re.compile(r"1-(\d+(?:\.\d+)?)/k")
_BYTES = re.compile(r"\d+(\.\d+)?\s*[kmg]?i?b")


@cache
def _rules() -> tuple[str, ...]:
    """The research policies that come with msrnn: one file each."""
    return tuple(sorted(file.stem for file in (Path(__file__).parent / "rules").glob("[!_]*.py")))


def _settings(text: str, changes: Sequence[str], **named: str | None) -> dict[str, str]:
    """The settings behind a policy's name, each once; `named` are those in the name itself, such as `+4`."""
    settings: dict[str, str] = {}
    for change in changes:
        key, _, value = (part.strip().lower() for part in change.partition("="))
        if not change:
            raise ValueError(f"{text!r}: there is no setting behind a comma; add one, such as kv=int8, or leave it out")
        if key not in _SETTINGS:
            raise ValueError(f"{text!r}: {_unknown_setting(key)}")
        if not value:
            raise ValueError(f"{text!r}: {key} has no value; write e.g. {key}={_SETTINGS[key]}")
        if other := settings.get(key) or named.get(key):
            raise ValueError(f"{text!r} gives {key} twice, {other} and {value}; write it once")
        settings[key] = value
    return settings


def _value(key: str, text: str, capacity: int | None) -> object:
    """What a setting's text stands for at a capacity."""
    if key in ("scope", "gain", "kv"):
        return text
    try:
        if key == "last" and "/" in text and capacity is not None:  # a share of each layer's own capacity
            return int(Fraction(text) * capacity)
        if key in ("momentum", "residual") and (grows := _DECAY.fullmatch(text)) and capacity is not None:
            return decay(float(grows[1]), capacity)
        return float(text) if key in ("momentum", "residual") else int(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{key}={text!r} is not a number") from None


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


def _unknown_policy(text: str, name: str, size: str) -> str:
    """What may have been meant: a size alone (slots, a fraction, bytes) lacks a policy, another name is misspelt."""
    if "=" in name:
        return f"{text!r} names no policy; settings go behind one, as in tova:512,kv=int8"
    if not size and (re.fullmatch(r"\d+(/\d+)?", name) or _BYTES.fullmatch(name)):
        hint = f"tova:{name}"
    else:
        hint = _closest(name, _SPELLINGS)
        hint += f":{size}" if size and hint not in ("", "full") else ""
    return _unknown("policy", text, [f"{_EXAMPLES}; research policies: {', '.join(_rules())}"], hint)


def _unknown_setting(key: str) -> str:
    if key in ("capacity", "size", "slots", "budget", "k"):
        return f"unknown setting {key!r}; the capacity stands behind the policy's name, as in tova:512"
    return _unknown("setting", key, _SETTINGS, "kv" if key in ("format", "bits", "quant", "dtype") else None)


def _unknown(what: str, given: object, allowed: Iterable[str], hint: str | None = None) -> str:
    hint = _closest(str(given), allowed) if hint is None else hint
    known = f"did you mean {hint!r}? Allowed" if hint else "allowed"
    return f"unknown {what} {given!r}; {known}: {', '.join(allowed)}"


def _closest(given: str, allowed: Iterable[str]) -> str:
    return next(iter(get_close_matches(given, list(allowed), n=1, cutoff=0.5)), "")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
