"""Experiments as TOML files: which task, which policies, which settings. Unknown keys are refused, never ignored."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..policy import PolicyLike, parse, read_profile, split_profile, spread

BASELINE = "baseline"  # the paper's short context: the plain model, its text cut into pieces of so many tokens


@dataclass(frozen=True)
class Entry:
    """One line of a table: a policy under its name, or the plain model (`policy` None), whole or in short pieces.

    `sizes` are the capacities of its layers, or the length of the pieces.
    """

    label: str
    policy: PolicyLike | None
    sizes: tuple[int, ...] = ()
    piece: int | None = None

    @property
    def capacity(self) -> float | None:
        """The average over the layers; None for `full`."""
        if len(set(self.sizes)) < 2:
            return self.sizes[0] if self.sizes else None
        return sum(self.sizes) / len(self.sizes)

    @property
    def mark(self) -> str:
        """Tells capacities by layer from others under the same name: a profile may be made anew."""
        return "" if len(set(self.sizes)) < 2 else "/" + sha256(repr(self.sizes).encode()).hexdigest()[:8]

    def never_evicts(self, length: int) -> bool:
        """Whether a text of so many tokens is read just as the plain model reads it."""
        return all(size >= length for size in self.sizes)


@dataclass(frozen=True)
class Experiment:
    """What every task takes. `policies` without a size are taken at each of `capacities`."""

    task: str
    policies: tuple[str, ...] = ("full",)
    capacities: tuple[int, ...] = ()
    model: str | None = None
    dtype: str = "auto"
    data: str | None = None
    batch: int = 1
    seed: int = 0
    limit: int | None = None
    engine: bool | None = None  # whether msrnn's engine writes, or transformers' generate; on a GPU unless said
    settings: Any = field(default=None)
    path: str = ""

    def entries(self) -> list[Entry]:
        """`full` first: the others are compared with it."""
        texts = [text for given in self.policies for text in self._sized(given)]
        made = [entry(text) for text in dict.fromkeys(texts)]
        return sorted(made, key=lambda one: one.label != "full")

    def _sized(self, text: str) -> list[str]:
        if ":" in text or text == "full":
            return [text]
        if not self.capacities:
            raise ValueError(f"{self.path}: policy {text!r} has no size; write {text}:512, or give `capacities`")
        head, comma, rest = text.partition(",")
        return [f"{head}:{size}{comma}{rest}" for size in self.capacities]


def entry(text: str) -> Entry:
    """`full`, `tova:512`, `tova:256,profile=FILE`, ..., and `baseline:512` for the short context."""
    name, _, size = text.partition(":")
    if name == BASELINE:
        if not size.isdigit() or int(size) < 2:
            raise ValueError(f"{text!r}: the baseline needs a context of at least 2 tokens; write baseline:512")
        return Entry(text, None, (int(size),), int(size))
    kind, profile = split_profile(text)
    if profile:
        average = kind.partition(":")[2].partition(",")[0]
        sizes = read_profile(profile, int(average) if average.isdigit() else None)
        spread(kind, sizes)  # refuses what does not go together; the text itself lets the model be checked later
        return Entry(text, text, tuple(sizes))
    policy = parse(text)
    return Entry(text, None) if policy.capacity is None else Entry(text, policy, (policy.capacity,))


def read_experiment(path: str | Path, tasks: Mapping[str, type]) -> Experiment:
    """The experiment of a TOML file. `tasks` has the settings class of every task by its name."""
    try:
        given = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"experiment {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    return make_experiment(given, tasks, str(path))


def make_experiment(given: Mapping[str, Any], tasks: Mapping[str, type], path: str = "") -> Experiment:
    where = path or "experiment"
    name = given.get("task")
    if not isinstance(name, str) or name not in tasks:
        raise ValueError(f"{where}: task is {name!r}{_hint(str(name), tasks)}; allowed: {', '.join(tasks)}")
    common = {f.name for f in fields(Experiment)} - {"settings", "path"}
    own = {f.name for f in fields(tasks[name])}
    for key in given:
        if key not in common | own:
            allowed = sorted(common | own)
            raise ValueError(f"{where}: unknown key {key!r}{_hint(key, allowed)}; allowed: {', '.join(allowed)}")
    settings = fill(tasks[name], {k: v for k, v in given.items() if k in own}, where)
    values = {k: v for k, v in given.items() if k in common and k not in own}
    made = fill(Experiment, values, where)
    made = Experiment(**({f.name: getattr(made, f.name) for f in fields(made)} | {"settings": settings, "path": path}))
    made.entries()  # a policy that cannot be read is refused now
    return made


def fill(kind: type, given: Mapping[str, Any], where: str) -> Any:
    """An instance of a settings class from the values of a TOML table, each of the type its field has."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: a table was expected, not {given!r}")
    hints, names = get_type_hints(kind), [f.name for f in fields(kind)]
    for key in given:
        if key not in names:
            raise ValueError(f"{where}: unknown key {key!r}{_hint(key, names)}; allowed: {', '.join(names)}")
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"{where}: {missing[0]!r} is missing")
    try:
        return kind(**{key: _typed(value, hints[key], f"{where}: {key}") for key, value in given.items()})
    except ValueError as error:
        said = str(error)
        raise ValueError(said if said.startswith(where) else f"{where}: {said}") from None


def _typed(value: Any, hint: Any, where: str) -> Any:
    if hint is Any:
        return value
    if get_origin(hint) in (Union, UnionType):
        hint = next(one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} is {value!r}; a list was expected")
        return tuple(_typed(one, get_args(hint)[0], where) for one in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise ValueError(f"{where} is {value!r}; {names.get(hint, hint.__name__)} was expected")
    return value


def _hint(given: str, allowed: Any) -> str:
    close = get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
