"""Real vLLM on a GPU, with bounded states against stock: every load as a ratio of the two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ..eval.record import Record
from .benchmarks import VLLM_FIRST, VLLM_RATE, VLLM_START, VLLM_STEP
from .style import add_title, hide_spines, line_styles, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOADS = (VLLM_FIRST, VLLM_RATE, VLLM_STEP, VLLM_START)


class Pair(NamedTuple):
    """A load of both engines at one commit: medians of the newest run of each."""

    commit: str
    stock: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.stock


def vllm_figure(records: Sequence[Record], path: str | Path) -> Path:
    """Times and throughput relative to stock vLLM, one bar for each load that both engines ran."""
    subset = [one for one in records if one.metric in LOADS]
    figure = new_figure(12, 5.2)
    times, rates = figure.subplots(1, 2, width_ratios=(4, 3))
    _bars(times, subset, (VLLM_FIRST, VLLM_STEP, VLLM_START))
    _bars(rates, subset, (VLLM_RATE,))
    times.set_title("time relative to stock (less is better)", fontsize=10)
    rates.set_title("throughput relative to stock (more is better)", fontsize=10)
    policy = next(one.policy for one in subset if one.policy != "full")
    add_title(figure, subset, f"vLLM with {policy} against stock vLLM")
    return save_figure(figure, path)


def pairs(records: Sequence[Record], metrics: Sequence[str]) -> dict[str, Pair]:
    """By load, of the newest commit at which both engines ran it."""
    found: dict[str, Pair] = {}
    for metric in metrics:
        for load in dict.fromkeys(_label(one) for one in records if one.metric == metric):
            runs = [one for one in records if one.metric == metric and _label(one) == load]
            commits = dict.fromkeys(one.commit for one in sorted(runs, key=lambda one: one.date, reverse=True))
            paired = (_pair([one for one in runs if one.commit == commit]) for commit in commits)
            if newest := next(filter(None, paired), None):
                found[load] = newest
    return found


def _pair(runs: Sequence[Record]) -> Pair | None:
    ours, stock = ([one for one in runs if (one.policy == "full") == full] for full in (False, True))
    return Pair(runs[0].commit, _median(stock), _median(ours)) if ours and stock else None


def _median(runs: Sequence[Record]) -> float:
    newest = max(runs, key=lambda one: one.date).run
    return median(one.value for one in runs if one.run == newest)


def _label(record: Record) -> str:
    requests, prompt, new = (int(record.cell.get(name, 0)) for name in ("requests", "prompt", "new"))
    if record.metric == VLLM_START:
        return "start of the engine"
    attention = str(record.cell["attention"])
    kind = "" if attention == "steady" else f", {attention} attention"
    if record.metric == VLLM_RATE:
        return f"{requests} x ({prompt:,} + {new:,}){kind}"
    if record.metric == VLLM_STEP:
        return f"decode step, {requests} requests, context {prompt:,}{kind}"
    return f"first tokens, {requests} x {prompt:,}{kind}"


def _bars(axes: Axes, records: Sequence[Record], metrics: Sequence[str]) -> None:
    loads = pairs(records, metrics)
    colour = line_styles(["tova"])["tova"].colour
    names = list(loads)[::-1]
    values = [loads[name].ratio for name in names]
    lines = [name.replace(", trained", ",\ntrained").replace(", flat", ",\nflat") for name in names]
    bars = axes.barh(lines, values, color=colour, height=0.6)
    axes.axvline(1, color="#000000", linestyle="--", linewidth=1)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the line at 1 would run through some
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4, fontsize=8, bbox=behind)
    axes.set_xlim(0, max([1.0, *values]) * 1.12)
    hide_spines(axes)
