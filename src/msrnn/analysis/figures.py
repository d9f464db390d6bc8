"""All figures by name: each is a function of records, or of one trace. `draw` makes those that have data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..eval.record import Record
from .benchmarks import SERVED
from .curves import perplexity_by_capacity, score_by_capacity
from .extrapolation import running_perplexity
from .league import HALVES, league_figure
from .maps import OLDER, RECENT, agreement_map, layer_maps, retention_map, visible
from .peers import TASK as PEERS
from .peers import peers_figure
from .recall import needle_maps, turns_recall
from .records import models
from .retention import layers_holding, recent_share
from .retention_figures import retention_curves, word_class_figure
from .ruler import TASKS as RULER_TASKS
from .ruler import ruler_maps
from .serving import serving_figure
from .serving_gpu import LOADS, vllm_figure
from .speed import throughput_and_memory

if TYPE_CHECKING:
    from ..core.trace import Trace

__all__ = [
    "OLDER", "RECENT", "RECORD_FIGURES", "TRACE_FIGURES", "Figure", "agreement_map", "draw", "draw_trace", "has_data",
    "layer_maps", "layers_holding", "names", "recent_share", "retention_map", "visible",
]  # fmt: skip


class Figure(NamedTuple):
    """The function that draws it, a description, and which records it uses."""

    draw: Callable[[Sequence[Record], Path], Path]
    description: str
    uses: Callable[[Record], bool]


RECORD_FIGURES = {
    "perplexity": Figure(
        perplexity_by_capacity,
        "PG-19 perplexity by capacity, with full as the floor",
        lambda one: one.task == "pg19" and one.metric == "perplexity" and not one.cell,
    ),
    "score": Figure(
        score_by_capacity,
        "SQuALITY and QASPER by capacity",
        lambda one: (one.task, one.metric) in (("squality", "rouge"), ("qasper", "f1")) and not one.cell,
    ),
    "running": Figure(
        running_perplexity,
        "perplexity against position, far past the trained length",
        lambda one: one.task == "extrapolation" and "position" in one.cell,
    ),
    "retention": Figure(
        retention_curves,
        "recent share by layer, survival by age, agreement of layers",
        lambda one: one.task == "retention" and one.metric == "recent share" and "layer" in one.cell,
    ),
    "words": Figure(
        word_class_figure,
        "mean steps kept by word class",
        lambda one: one.task == "retention" and "class" in one.cell,
    ),
    "throughput": Figure(
        throughput_and_memory,
        "speed and memory by capacity",
        lambda one: one.metric.endswith("tokens/s") or (one.task == "pg19" and not one.cell and one.seconds > 0),
    ),
    "serving": Figure(
        serving_figure, "requests at once and throughput in vLLM by memory, over time", lambda one: one.metric == SERVED
    ),
    "vllm": Figure(vllm_figure, "loads of vLLM on a GPU against stock vLLM", lambda one: one.metric in LOADS),
    "needle": Figure(needle_maps, "recall of a hidden number by length and depth", lambda one: one.task == "needle"),
    "turns": Figure(turns_recall, "recall of facts by turns since", lambda one: one.task == "turns"),
    "ruler": Figure(
        ruler_maps,
        "RULER and BABILong by policy and kind of task",
        lambda one: one.task in RULER_TASKS and one.metric == RULER_TASKS[one.task][0],
    ),
    "peers": Figure(
        peers_figure,
        "msrnn, kvpress and transformers' caches at the same bytes",
        lambda one: one.task == PEERS and one.cell["work"] == "pg19" and one.capacity is not None,
    ),
    "league": Figure(
        league_figure,
        "perplexity and recall of all online policies, research rules too",
        lambda one: one.task == HALVES[1] and one.capacity is not None,
    ),
}
TRACE_FIGURES = {
    "map": (retention_map, "what six layers held, step by step, and all of them at the end"),
    "layers": (layer_maps, "every layer's map, tokens by steps"),
    "agreement": (agreement_map, "how much of what two layers hold is the same, for all pairs"),
}


def names() -> list[str]:
    return [*RECORD_FIGURES, *TRACE_FIGURES]


def check_name(name: str | None) -> None:
    if name is not None and name not in names():
        close = get_close_matches(name, names(), n=1, cutoff=0.5)
        allowed = f"did you mean {close[0]!r}? Allowed" if close else "allowed"
        raise ValueError(f"unknown figure {name!r}; {allowed}: {', '.join(names())}")


def has_data(name: str, records: Iterable[Record]) -> bool:
    """Whether the records have something for this figure."""
    return any(RECORD_FIGURES[name].uses(one) for one in records)


def draw(
    records: Sequence[Record], folder: Path, *, only: str | None = None, kind: str = "png"
) -> Iterator[tuple[str, str, Path]]:
    """Every figure that the records have something for: its name, the model, the file. One for each model."""
    several = len(models(records)) > 1
    for model in models(records):
        subset = [_literal(one) for one in records if one.model == model]
        for name, figure in RECORD_FIGURES.items():
            if only in (None, name) and has_data(name, subset):
                file = f"{name}-{_file_name(model)}.{kind}" if several else f"{name}.{kind}"
                yield name, model, figure.draw(subset, folder / file)


def draw_trace(
    trace: Trace, stem: str, folder: Path, *, only: str | None = None, kind: str = "png"
) -> Iterator[tuple[str, Path]]:
    trace = replace(trace, policy=_escape(trace.policy), model=_escape(trace.model))
    for name, (draw_figure, _) in TRACE_FIGURES.items():
        if only in (None, name):
            yield name, draw_figure(trace, folder / f"{stem}-{name}.{kind}")


def _file_name(text: str) -> str:
    """A model's name as part of a file's: whatever it says, the file is in the folder that was given."""
    return re.sub(r"[^\w.+-]", "_", text)[:100].lstrip(".") or "_"


def _literal(record: Record) -> Record:
    """The record with texts that matplotlib shows as they are."""
    texts: dict[str, Any] = {name: _escape(getattr(record, name)) for name in ("model", "policy", "machine", "dtype")}
    return replace(record, **texts)


def _escape(text: str) -> str:
    """Dollar signs would begin a formula, and control characters have no glyph."""
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("$", r"\$")[:300]
