"""Experiments as TOML files: which task, which policies, which settings. Unknown keys are refused, never ignored."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..budgets.profile import read_profile
from ..plan import Plan, PolicyLike, per_layer
from ..policy import Policy, check_size, needs_model, parse_policy, split_policy

Resolve = Callable[[str], PolicyLike]  # what `best:256` or `tova:64MiB` stands for on a model
BASELINE = "baseline"  # the paper's short context: the plain model on a text cut into contexts of so many tokens


@dataclass(frozen=True)
class Entry:
    """One line of a table: a policy under its name, or the plain model (`policy` None), whole or on short contexts.

    `capacities` are those of its layers (None: full), or the length of the short contexts. `resolved` is what `best`
    or a size in bytes stands for on the model.
    """

    label: str
    policy: PolicyLike | None
    capacities: tuple[int | None, ...] = ()
    context: int | None = None
    resolved: str = ""

    @property
    def capacity(self) -> float | None:
        """The average over the layers; None where a layer is full."""
        sizes = [size for size in self.capacities if size is not None]
        if not sizes or len(sizes) < len(self.capacities):
            return None
        return sizes[0] if len(set(sizes)) == 1 else sum(sizes) / len(sizes)

    @property
    def capacities_digest(self) -> str:
        """Tells capacities by layer from others under the same name: a profile file may change, and so may `best`."""
        if len(set(self.capacities)) < 2 and not self.resolved:
            return ""
        return "/" + sha256(f"{self.resolved}{self.capacities!r}".encode()).hexdigest()[:8]

    def never_evicts(self, length: int) -> bool:
        """Whether a text of so many tokens is read just as the plain model reads it."""
        unresolved = self.policy is not None and not self.capacities
        return not unresolved and all(size is None or size >= length for size in self.capacities)


@dataclass(frozen=True)
class Experiment:
    """The keys that every task shares. `policies` without a size are measured at each of `capacities`.

    From Python, `policies` may hold `Policy` and `Plan` objects as well as text.
    """

    task: str
    policies: tuple[str | Policy | Plan, ...] = ("full",)
    capacities: tuple[int, ...] = ()
    model: str | None = None
    dtype: str = "auto"
    data: str | None = None
    batch: int = 1
    seed: int = 0
    limit: int | None = None
    engine: bool | None = None  # generate with msrnn's engine or with transformers; default: the engine on a GPU
    settings: Any = field(default=None)
    path: str = ""

    def entries(self, resolve: Resolve | None = None) -> list[Entry]:
        """`full` first: the others are compared with it. Without a model, what depends on it is only checked."""
        policies = [sized for policy in self.policies for sized in self._with_sizes(policy)]
        entries = [entry(policy, resolve) for policy in dict.fromkeys(policies)]
        return sorted(entries, key=lambda one: one.label != "full")

    def _with_sizes(self, policy: str | Policy | Plan) -> list[str | Policy | Plan]:
        if not isinstance(policy, str) or policy == "full" or split_policy(policy).size:
            return [policy]
        text = split_policy(policy)
        if not self.capacities:
            example = text.with_size(512)
            raise ValueError(f"{self.path}: policy {policy!r} has no size; write {example}, or give `capacities`")
        return [text.with_size(size) for size in self.capacities]


def entry(policy: str | Policy | Plan, resolve: Resolve | None = None) -> Entry:
    """`full`, `tova:512`, `tova:256,profile=FILE`, ..., a policy object, or `baseline:512` for the short context."""
    if not isinstance(policy, str):
        capacities = tuple(one.capacity for one in (policy.parts if isinstance(policy, Plan) else (policy,)))
        return Entry(str(policy), policy, capacities) if any(capacities) else Entry(str(policy), None)
    text = split_policy(policy)
    size = int(text.size) if text.size.isdigit() else None
    if text.kind == BASELINE:
        if size is None or size < 2:
            raise ValueError(f"{policy!r}: the baseline needs a context of at least 2 tokens; write baseline:512")
        return Entry(policy, None, (size,), size)
    if needs_model(policy):
        return _on_model(policy, resolve)
    if text.profile:
        plan = per_layer(text.policy, read_profile(text.profile, size))  # the model is checked by the cache
        return Entry(policy, policy, tuple(part.capacity for part in plan.parts))
    parsed = parse_policy(policy)
    return Entry(policy, None) if parsed.capacity is None else Entry(policy, parsed, (parsed.capacity,))


def _on_model(text: str, resolve: Resolve | None) -> Entry:
    """`best:256` or `tova:64MiB` under its own name, as what it stands for on a model."""
    check_size(text)
    if profile := split_policy(text).profile:
        read_profile(profile)
    if resolve is None:
        return Entry(text, text)
    resolved = str(resolve(text))
    return replace(entry(resolved), label=text, resolved=resolved)


def read_experiment(path: str | Path, tasks: Mapping[str, type]) -> Experiment:
    """The experiment of a TOML file. `tasks` has the settings class of every task by its name."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        example = "experiments/ has those of the paper, e.g. experiments/pg19.toml"
        raise ValueError(f"experiment {path} cannot be read: {error.strerror or error}; {example}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    return make_experiment(table, tasks, str(path))


def make_experiment(table: Mapping[str, Any], tasks: Mapping[str, type], path: str = "") -> Experiment:
    """An experiment from the keys of a TOML file; those of the task become its settings."""
    where = path or "experiment"
    name = table.get("task")
    if not isinstance(name, str) or name not in tasks:
        raise ValueError(f"{where}: task is {name!r}; {_allowed(str(name), tasks)}")
    common = {f.name for f in fields(Experiment)} - {"settings", "path"}
    own = {f.name for f in fields(tasks[name])}
    _check_keys(table, sorted(common | own), where)
    settings = from_table(tasks[name], {k: v for k, v in table.items() if k in own}, where)
    shared = {k: v for k, v in table.items() if k in common and k not in own}
    experiment: Experiment = from_table(Experiment, shared, where)
    experiment = replace(experiment, settings=settings, path=path)
    experiment.entries()  # refuse a policy that cannot be parsed now, not hours later
    return experiment


def from_table(kind: type, table: Mapping[str, Any], where: str) -> Any:
    """An instance of a settings class from a TOML table, each value of the type that its field has."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: a table was expected, not {table!r}")
    hints = get_type_hints(kind)
    _check_keys(table, [f.name for f in fields(kind)], where)
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in required if name not in table]
    if missing:
        raise ValueError(f"{where}: {missing[0]!r} is missing")
    try:
        return kind(**{key: _typed(value, hints[key], f"{where}: {key}") for key, value in table.items()})
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from None


def _check_keys(table: Mapping[str, Any], allowed: list[str], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise ValueError(f"{where}: unknown key {key!r}; {_allowed(key, allowed)}")


def _typed(value: Any, hint: Any, where: str) -> Any:
    if hint is Any:
        return value
    if get_origin(hint) in (Union, UnionType):
        hint = next(one for one in get_args(hint) if one is not type(None))  # TOML has texts, not policy objects
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


def _allowed(name: str, names: Collection[str]) -> str:
    """The names that are allowed, after the one that may have been meant."""
    close = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"{f'did you mean {close[0]!r}? Allowed' if close else 'allowed'}: {', '.join(names)}"
