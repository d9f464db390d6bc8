"""Measure which tokens stay: texts are read under each policy, traced and scored, and the traces become records.

Traces that are already in the folder are not measured again, so a run that was stopped resumes.
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
from ..hf.best import resolve
from ..hf.identity import model_identity
from ..rnn import RNN
from ..system.memory import Peak
from ..system.provenance import command, commit, machine, now, versions
from . import retention
from .policy_names import family
from .tagger import load_tagger
from .words import characters, encode, mean_by_class, tagged, token_classes

LENGTH = 4096
Row = tuple[str, Cell, dict[str, float]]  # metric, cell, columns to add up over texts
Parts = dict[str, dict[str, float]]
Place = tuple[str, tuple[tuple[str, Any], ...]]  # metric, cell


@dataclass
class TokenizedText:
    """A text as token ids, each with its word class (None: without word classes)."""

    name: str
    ids: list[int]
    classes: list[str] | None


@dataclass
class Totals:
    """The sums of one policy: for each metric and cell, the columns of each text."""

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

    Of each text the first `length` tokens are read. `words` adds statistics by word class. Policies of the same
    capacity are compared with the first of them, e.g. `tova-head:256` with `tova:256`.
    """
    by_name = {"text": texts} if isinstance(texts, str) else dict(texts)
    names = [str(resolve(one, model)) for one in ([policies] if isinstance(policies, str) else policies)]
    tokenized = prepare(tokenizer, by_name, length, words)
    check(names, tokenized)
    totals = {policy: Totals() for policy in names}
    for text in tokenized:
        traced: dict[str, Trace] = {}
        for policy in names:
            traced[policy] = _trace(model, text, policy, traces, progress(f"{policy} on {text.name}"))
            totals[policy].add(text.name, rows(traced[policy], text.classes, _reference(traced, policy)))
            totals[policy].seconds += float(traced[policy].notes["seconds"])
            totals[policy].peak = max(totals[policy].peak, int(traced[policy].notes["peak bytes"]))
    settings = {"length": length, "texts": sorted(by_name)}
    return [one for policy in names for one in records(totals[policy], model, policy, settings, seed)]


def prepare(tokenizer: Any, texts: Mapping[str, str], length: int, words: bool) -> list[TokenizedText]:
    """The texts' first tokens and their classes; the tagger is loaded once, before any model runs."""
    tagger = load_tagger() if words else None
    tokenized = []
    for name, text in texts.items():
        ids, spans = encode(tokenizer, text, length)
        classes = token_classes(text, spans, tagged(text, tagger, characters(spans))) if words else None
        tokenized.append(TokenizedText(name, ids, classes))
    return tokenized


def check(policies: Sequence[str], tokenized: Sequence[TokenizedText]) -> None:
    """Refuse policies and texts without evictions, before anything is read."""
    if not policies or not tokenized:
        raise ValueError("retention needs at least one text and one policy")
    for policy in policies:
        sizes = [size for size in entry(policy).capacities if size is not None]
        if not sizes:
            raise ValueError(f"{policy} keeps everything, so there is nothing to see; use e.g. tova:256")
        short = [one for one in tokenized if len(one.ids) <= min(sizes) + 1]
        if short:
            raise ValueError(
                f"{short[0].name} has {len(short[0].ids)} tokens, so nothing ever leaves {policy}; give a longer text, "
                "or a smaller capacity"
            )


def _trace(
    model: PreTrainedModel, text: TokenizedText, policy: str, folder: str | Path | None, progress: Progress | None
) -> Trace:
    """Trace the text, or load the trace of an earlier run with the same model, policy and text."""
    path = None if folder is None else Path(folder) / f"{_file_name(text.name)}.{_file_name(policy)}.safetensors"
    if path is not None and path.exists():
        earlier = Trace.load(path)
        same = earlier.tokens is not None and earlier.tokens[0].tolist() == text.ids
        same = same and earlier.policy == policy
        same = same and earlier.notes.get("profile", "") == entry(policy).capacities_digest
        if same and earlier.notes.get("fingerprint") == model_identity(model):
            return earlier
    trace = trace_text(model, text.ids, policy, progress)
    trace.notes |= {"text": text.name, "profile": entry(policy).capacities_digest}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.save(path)
    return trace


def trace_text(model: PreTrainedModel, ids: Sequence[int], policy: str, progress: Progress | None = None) -> Trace:
    """The trace of one text, with time, memory and loss in its notes."""
    state = RNN(model, policy).start(trace=True)
    with Peak(model.device) as peak:
        result = score(model, ids, state.cache, progress=progress)
    trace = state.trace
    trace.policy = policy
    trace.tokens = torch.tensor([list(ids)])
    facts = {"nll": result.nll, "tokens": result.tokens, "seconds": result.seconds, "peak bytes": peak.bytes}
    trace.notes = {name: str(value) for name, value in facts.items()} | {"fingerprint": model_identity(model)}
    return trace


def _reference(traced: Mapping[str, Trace], policy: str) -> Trace | None:
    """The first policy of the same capacity, which this one is compared with; None if it is that one."""
    first = next(name for name in traced if _slots(name) == _slots(policy))
    return None if first == policy else traced[first]


def _slots(policy: str) -> int:
    """By layer on average, as a policy is named."""
    return round(entry(policy).capacity or 0)


def rows(trace: Trace, classes: Sequence[str] | None = None, reference: Trace | None = None) -> Iterator[Row]:
    """The statistics of one trace, as columns to be summed over texts."""
    yield from _recency(trace)
    yield from _early(trace)
    ages = retention.ages_for(trace.length)
    for age, share in zip(ages, retention.survival(trace, ages).mean(0).tolist(), strict=True):
        yield "held by age", {"age": age}, _one(share)
    yield from _steps(trace, classes)
    yield from _agreement(trace)
    yield from _units(trace)
    if reference is not None:
        agreement = float(retention.agreement_with(trace, reference).nanmean())
        yield f"agreement with {reference.policy}", {}, _one(agreement)
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
    """Only where the units of a layer decide on their own."""
    if max(deaths.shape[1] for deaths in trace.deaths) > 1:
        yield from _by_layer("agreement of heads", retention.head_agreement(trace))
        yield from _by_layer("agreement of heads on older tokens", retention.head_agreement(trace, only_older=True))
        yield from _by_layer("states' worth of distinct tokens", retention.distinct(trace))


def records(
    total: Totals, model: PreTrainedModel, policy: str, settings: Mapping[str, Any], seed: int
) -> Iterator[Record]:
    where: dict[str, Any] = {"machine": machine(model.device), "versions": versions(), "commit": commit()}
    for (name, cell), parts in total.parts.items():
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
            seconds=round(total.seconds, 3),
            peak_bytes=total.peak,
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
