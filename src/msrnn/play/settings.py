"""What a page may ask for: the limits, and a request's settings once they are known to be usable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..budgets.profile import plan_for, read_profile
from ..policy import check_size, needs_model, split_policy
from ..system.sizes import human
from .reading import MAX_TOKENS


class Refused(ValueError):
    """Input that cannot be used; the message is for the page."""


@dataclass(frozen=True)
class Limits:
    """What one server gives to all its pages."""

    tokens: int = MAX_TOKENS
    characters: int = 1_000_000
    capacity: int = 16_384
    state: int = 2 << 30  # bytes: so many slots of an 8B model in bfloat16
    policies: int = 2
    runs: int = 8
    full_tokens: int = 8_192  # full attention reads no further: its cache and time grow
    question: int = 2_000  # characters


@dataclass(frozen=True)
class Settings:
    """What a page asked for."""

    kind: str  # "text" or "chat"
    text: str
    policies: tuple[str, ...]
    full: bool
    model: str | None
    speed: float | None  # tokens per second, None: as fast as it goes

    @classmethod
    def parse(cls, request: Any, limits: Limits, profiles: tuple[str, ...], rules: tuple[str, ...] = ()) -> Settings:
        """From a page's JSON; refuses what no model could run. `profiles` and `rules` are the files it may name."""
        if not isinstance(request, dict):
            raise Refused("the request is not a JSON object")
        kind, text = request.get("kind", "text"), request.get("text", "")
        if kind not in ("text", "chat"):
            raise Refused(f"unknown kind of run {kind!r}; allowed: text, chat")
        if kind == "text":
            check_text(text, limits)
        policies = request.get("policies")
        if not isinstance(policies, list) or not 1 <= len(policies) <= limits.policies:
            raise Refused(f"give one or {limits.policies} policies")
        for policy in policies:
            check_policy(policy, limits, profiles, rules)
        model = request.get("model")
        if model is not None and (not isinstance(model, str) or len(model) > 300):
            raise Refused("a model is the name of a hub model, a folder or a .gguf file")
        full = bool(request.get("full", True))
        return cls(kind, text if kind == "text" else "", tuple(policies), full, model or None, speed_of(request))


def speed_of(request: dict[str, Any]) -> float | None:
    speed = request.get("speed")
    if speed is None:
        return None
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0.1 <= speed <= 1e6:
        raise Refused(f"speed is {speed!r}; it must lie from 0.1 to 1,000,000 tokens per second")
    return float(speed)


def check_text(text: Any, limits: Limits) -> None:
    if not isinstance(text, str) or not text.strip():
        raise Refused("there is no text to read; paste some, drop a file, or press “Use the example”")
    if len(text) > limits.characters:
        raise Refused(
            f"the text has {len(text):,} characters, the playground takes {limits.characters:,}; "
            "cut it, or read it all with `msrnn trace`"
        )
    strange = sum(letter < " " and letter not in "\t\n\r\f\v" for letter in text) + text.count("\ufffd")
    if "\x00" in text or strange > 0.01 * len(text):
        raise Refused("this is not text but binary data; give a plain text file in UTF-8")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise Refused("this text has broken characters (lone surrogates); save it as UTF-8 and try again")


def check_policy(text: Any, limits: Limits, profiles: tuple[str, ...], rules: tuple[str, ...] = ()) -> None:
    """Refuse a policy that cannot run, names a file it may not, or would take the whole memory."""
    if not isinstance(text, str) or len(text) > 200:
        raise Refused("a policy is a short text such as tova:256")
    kind, profile = split_policy(text).kind, split_policy(text).profile
    name = kind.split(",")[0]
    # a rule in a file is code to run: only who started the server may name one
    if name not in rules and any(mark in name for mark in ("/", "\\", ".py")):
        raise Refused(
            f"{text!r} names a file; the page takes policies by name only, e.g. tova:256 or key_difference:256"
        )
    if profile is not None and profile not in profiles:
        known = ", ".join(profiles) or "none"
        raise Refused(f"unknown profile {profile!r}; profiles here: {known}. Add one with msrnn play --profile FILE")
    if profile is not None and not needs_model(text):
        plan_for(text, len(read_profile(profile)))
        return
    size = check_size(text, length=limits.tokens)
    if size is None:
        way_out = "give a bounded policy, e.g. tova:256 (the page can compare it with full attention)"
        raise Refused(f"full forgets nothing; {way_out}")
    if size.unit == "bytes" and size.number > limits.state:
        raise Refused(f"{text!r}: a state of {human(size.number)} is more than the {human(limits.state)} allowed here")
    if size.unit == "slots" and size.number > limits.capacity:
        raise Refused(f"{text!r}: a capacity of {size.number:,} is more than the {limits.capacity:,} allowed here")
