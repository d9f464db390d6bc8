"""Which tokens stay, measured: texts are read under each policy, traced and scored, and the traces become records.

With a folder for traces, what it holds already is not read again, so a stopped run goes on where it was.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.trace import Trace
from ..eval.experiment import entry
from ..eval.metrics import interval, mean, perplexity
from ..eval.perplexity import Progress, score
from ..eval.record import Cell, Record
from ..eval.task import Metric
from ..hf.cost import Peak
from ..rnn import RNN, fingerprint
from ..system.provenance import command, commit, machine, now, versions
from . import retention
from .records import family
from .tagger import load_tagger
from .words import characters, encode, mean_by_class, tagged, token_classes

LENGTH = 4096
Row = tuple[str, Cell, dict[str, float]]  # metric, cell, columns to add up over texts
Parts = dict[str, dict[str, float]]
Place = tuple[str, tuple[tuple[str, Any], ...]]  # metric, cell


@dataclass
class Reading:
    """A text as tokens, each with its word class (None: not asked for)."""

    name: str
    ids: list[int]
    classes: list[str] | None


@dataclass
class Tally:
    """What one policy has shown so far: for each metric and cell, the columns of each text."""

    parts: defaultdict[Place, Parts] = field(default_factory=lambda: defaultdict(dict))
    seconds: float = 0.0
    peak: int = 0

    def add(self, text: str, rows: Iterator[Row]) -> None:
        for metric, cell, columns in rows:
            self.parts[metric, tuple(cell.items())][text] = columns


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: str | Mapping[str, str],
    policies: str | Sequence[str],
    *,
    length: int = LENGTH,
    words: bool = True,
    traces: str | Path | None = None,
    progress: Callable[[str], Progress | None] = lambda name: None,
    seed: int = 0,
) -> list[Record]:
    """Records of task `retention` for a text, or several by name, under a policy, or several.

    Of each text the first `length` tokens are read. `words` also tells word classes apart. Policies of the same
    capacity are compared with the first of them, e.g. `tova-head:256` with `tova:256`.
    """
    named = {"text": texts} if isinstance(texts, str) else dict(texts)
    wanted = [policies] if isinstance(policies, str) else list(policies)
    readings = prepare(tokenizer, named, length, words)
    check(wanted, readings)
    tallies = {policy: Tally() for policy in wanted}
    for reading in readings:
        done: dict[str, Trace] = {}
        for policy in wanted:
            done[policy] = _trace(model, reading, policy, traces, progress(f"{policy} on {reading.name}"))
            tallies[policy].add(reading.name, rows(done[policy], reading.classes, _first_alike(done, policy)))
            tallies[policy].seconds += float(done[policy].notes["seconds"])
            tallies[policy].peak = max(tallies[policy].peak, int(done[policy].notes["peak bytes"]))
    settings = {"length": length, "texts": sorted(named)}
    return [one for policy in wanted for one in records(tallies[policy], model, policy, settings, seed)]


def prepare(tokenizer: Any, texts: Mapping[str, str], length: int, words: bool) -> list[Reading]:
    """The texts' first tokens and their classes; the tagger comes once, before any model runs."""
    tagger = load_tagger() if words else None
    made = []
    for name, text in texts.items():
        ids, spans = encode(tokenizer, text, length)
        classes = token_classes(text, spans, tagged(text, tagger, characters(spans))) if words else None
        made.append(Reading(name, ids, classes))
    return made


def check(policies: Sequence[str], readings: Sequence[Reading]) -> None:
    """Refuse what would trace nothing, before anything is read."""
    if not policies or not readings:
        raise ValueError("retention needs at least one text and one policy")
    for policy in policies:
        sizes = [size for size in entry(policy).capacities if size is not None]
        if not sizes:
            raise ValueError(f"{policy} keeps everything, so there is nothing to see; use e.g. tova:256")
        short = [one for one in readings if len(one.ids) <= min(sizes) + 1]
        if short:
            few = f"{short[0].name} has {len(short[0].ids)} tokens"
            raise ValueError(f"{few}, so nothing ever leaves {policy}; give a longer text, or a smaller capacity")


def _trace(
    model: PreTrainedModel, reading: Reading, policy: str, folder: str | Path | None, progress: Progress | None
) -> Trace:
    """Read the text, or take the trace that an earlier run of the same left in the folder."""
    path = None if folder is None else Path(folder) / f"{_file_name(reading.name)}.{_file_name(policy)}.safetensors"
    if path is not None and path.exists():
        known = Trace.load(path)
        same = known.tokens is not None and known.tokens[0].tolist() == reading.ids
        same = same and known.policy == policy and known.notes.get("profile", "") == entry(policy).capacities_digest
        if same and known.notes.get("fingerprint") == fingerprint(model):
            return known
    made = read(model, reading.ids, policy, progress)
    made.notes |= {"text": reading.name, "profile": entry(policy).capacities_digest}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
    return made


def read(model: PreTrainedModel, ids: Sequence[int], policy: str, progress: Progress | None = None) -> Trace:
    """The trace of one text, with what it cost and how well it was predicted in its notes."""
    state = RNN(model, policy).start(trace=True)
    with Peak(model.device) as peak:
        found = score(model, ids, state.cache, progress=progress)
    trace = state.trace
    trace.policy = policy
    trace.tokens = torch.tensor([list(ids)])
    facts = {"nll": found.nll, "tokens": found.tokens, "seconds": found.seconds, "peak bytes": peak.bytes}
    trace.notes = {name: str(value) for name, value in facts.items()} | {"fingerprint": fingerprint(model)}
    return trace


def _first_alike(done: Mapping[str, Trace], policy: str) -> Trace | None:
    """The first policy of the same capacity, which this one is compared with; None if it is that one."""
    alike = next(name for name in done if _slots(name) == _slots(policy))
    return None if alike == policy else done[alike]


def _slots(policy: str) -> int:
    """By layer on average, as a policy is named."""
    return round(entry(policy).capacity or 0)


def rows(trace: Trace, classes: Sequence[str] | None = None, beside: Trace | None = None) -> Iterator[Row]:
    """Everything one trace says, as columns to be added up over texts."""
    yield from _recency(trace)
    yield from _early(trace)
    ages = retention.ages_for(trace.length)
    for age, share in zip(ages, retention.survival(trace, ages).mean(0).tolist(), strict=True):
        yield "held by age", {"age": age}, _one(share)
    yield from _steps(trace, classes)
    yield from _agreement(trace)
    yield from _units(trace)
    if beside is not None:
        yield f"agreement with {beside.policy}", {}, _one(float(retention.agreement_with(trace, beside).nanmean()))
    if "nll" in trace.notes:
        yield "perplexity", {}, {name: float(trace.notes[name]) for name in ("nll", "tokens")}


def _one(value: float) -> dict[str, float]:
    return {"sum": value, "count": 1.0}


def _by_layer(metric: str, values: Tensor) -> Iterator[Row]:
    """The mean over layers, then each layer."""
    if not values.isnan().all():
        yield metric, {}, _one(float(values.nanmean()))
        for layer, value in enumerate(values.tolist()):
            yield metric, {"layer": layer}, _one(value)


def _recency(trace: Trace) -> Iterator[Row]:
    yield from _by_layer("recent share", retention.mean_recent_share(trace))


def _early(trace: Trace) -> Iterator[Row]:
    yield from _by_layer("first token held", retention.held_at_end(trace, [0]))
    yield from _by_layer("tokens 2 to 25 held", retention.held_at_end(trace, retention.EARLY))
    yield from _by_layer("any token held", retention.held_at_end(trace, range(trace.length)))


def _steps(trace: Trace, classes: Sequence[str] | None) -> Iterator[Row]:
    steps = retention.steps_kept(trace)
    yield "steps kept", {}, _one(float(steps.mean()))
    for name, place in (("1", slice(0, 1)), ("2 to 25", slice(1, 25))):
        yield "steps kept", {"tokens": name}, _one(float(steps[:, place].mean()))
    if classes is not None:
        for name, (value, count) in mean_by_class(steps, classes).items():
            yield "steps kept", {"class": name}, {"sum": value * count, "count": float(count)}


def _agreement(trace: Trace) -> Iterator[Row]:
    if len(trace.deaths) < 2:
        return
    for name, only_older in (("agreement of layers", False), ("agreement of layers on older tokens", True)):
        square = retention.layer_agreement(trace, only_older=only_older)
        if square.isnan().all():
            continue
        yield name, {}, _one(retention.off_diagonal(square))
        for distance in range(1, len(square)):
            yield name, {"distance": distance}, _one(float(square.diagonal(distance).nanmean()))
    chance = retention.chance_agreement(trace)
    if chance == chance:
        yield "agreement by chance on older tokens", {}, _one(chance)


def _units(trace: Trace) -> Iterator[Row]:
    """Only where the units of a layer decide for themselves."""
    if max(deaths.shape[1] for deaths in trace.deaths) > 1:
        yield from _by_layer("agreement of heads", retention.head_agreement(trace))
        yield from _by_layer("agreement of heads on older tokens", retention.head_agreement(trace, only_older=True))
        yield from _by_layer("states' worth of distinct tokens", retention.distinct(trace))


def records(
    tally: Tally, model: PreTrainedModel, policy: str, settings: Mapping[str, Any], seed: int
) -> Iterator[Record]:
    where: dict[str, Any] = {"machine": machine(model.device), "versions": versions(), "commit": commit()}
    for (name, cell), parts in tally.parts.items():
        parts = {text: columns for text, columns in parts.items() if all(v == v for v in columns.values())}
        if not parts:
            continue
        metric: Metric = perplexity() if name == "perplexity" else mean(name, "sum")
        value, low, high = interval(parts, metric, seed)
        yield Record(
            task="retention",
            model=Path(str(model.config.name_or_path)).name or "unnamed",
            policy=policy,
            capacity=entry(policy).capacity,
            metric=name,
            value=value,
            low=low,
            high=high,
            samples=int(sum(columns.get("count", 1) for columns in parts.values())),
            groups=len(parts),
            seed=seed,
            dtype=str(model.dtype).removeprefix("torch."),
            seconds=round(tally.seconds, 3),
            peak_bytes=tally.peak,
            run=f"retention {family(policy)} {settings['length']}",
            cell=dict(cell),
            settings=dict(settings),
            parts=parts,
            date=now(),
            command=command(),
            **where,
        )


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", text)
