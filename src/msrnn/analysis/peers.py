"""msrnn beside kvpress and transformers' own caches: quality at the same bytes kept, and the peak of memory.

Records come from `benchmarks/peers.py`: one task, `peers`, whose cells name the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..eval.record import Record
from ..eval.statistics import Interval, bootstrap
from .compare import perplexity_gap
from .records import select
from .style import SIZE_STYLES, add_title, hide_spines, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TASK = "peers"
FULL = "transformers full"
RECALL = {"RULER": "ruler", "numbers and passkeys": "needle"}
_COLOURS = {"msrnn": "#12427f", "kvpress": "#d98200", "transformers": "#2f8f6b", "llama.cpp": "#9b1b1b"}


def gaps(records: Sequence[Record], capacity: int) -> dict[str, Interval]:
    """Each run's perplexity of what follows a prompt, as a share above that of full attention; the best first."""
    ours = {one.policy: one for one in _work(records, "pg19", capacity)}
    full = ours.pop(FULL, None)
    pairs = {run: perplexity_gap(one, full) for run, one in ours.items()} if full else {}
    present = {run: gap for run, gap in pairs.items() if gap is not None}
    return dict(sorted(present.items(), key=lambda item: item[1].value))


def recall(records: Sequence[Record], capacity: int, work: str) -> dict[str, Interval]:
    """The share of right answers of each run over all kinds; intervals resample groups of texts."""
    sums: dict[str, dict[str, list[float]]] = {}
    subset = _work(records, work, capacity)
    pooled = [one for one in subset if one.cell["kind"] == "all"] or subset
    for one in pooled:
        scale = 100.0 if one.metric == "match" else 1.0
        for group, part in one.parts.items():
            total = sums.setdefault(one.policy, {}).setdefault(group, [0.0, 0.0])
            total[0] += part[one.metric] / scale
            total[1] += part["count"]
    return {run: _share(list(groups.values())) for run, groups in sums.items()}


def _share(totals: Sequence[Sequence[float]]) -> Interval:
    columns = [np.array(column) for column in zip(*totals, strict=True)]
    return bootstrap(columns, lambda sums: sums[0] / sums[1], 0)


def _work(records: Sequence[Record], work: str, capacity: int) -> list[Record]:
    """The records of one kind of work, all of the same lengths: those that most runs have."""
    subset = [one for one in select(records, TASK) if one.cell["work"] == work and one.capacity in (None, capacity)]
    lengths = [_lengths(one) for one in subset if one.capacity]
    return [one for one in subset if _lengths(one) == max(lengths, key=lengths.count)] if lengths else []


def _lengths(record: Record) -> tuple[object, ...]:
    return (record.dtype, *(value for name, value in record.cell.items() if name not in ("work", "kind")))


def peers_figure(records: Sequence[Record], path: str | Path) -> Path:
    """The gap in perplexity; recall, and peak memory by the length of the prompt, where they were measured."""
    subset = select(records, TASK)
    sizes = [int(one.capacity) for one in subset if one.capacity and one.cell["work"] != "memory"]
    capacity = max(set(sizes), key=lambda size: (sizes.count(size), size))
    answers = {run for work in RECALL.values() for run in recall(subset, capacity, work) if run != FULL}
    rows = list(gaps(subset, capacity))[::-1]
    rows += sorted(answers - set(rows))
    memory = [one for one in subset if one.metric == "peak bytes"]
    widths = [3.0, *([2.0] if answers else []), *([2.6] if memory else [])]
    figure = new_figure(3 + 1.7 * sum(widths), 0.3 * len(rows) + 2.2)
    panels = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    _gap_panel(panels[0], subset, rows, capacity)
    if answers:
        panels[1].sharey(panels[0])
        _recall_panel(panels[1], subset, rows, capacity)
    if memory:
        _memory_panel(panels[-1], memory)
    for axes in panels:
        hide_spines(axes)
    add_title(figure, subset, f"The same bytes kept: {capacity:,} plain tokens of every layer")
    return save_figure(figure, path)


def _colour(run: str) -> str:
    return next((colour for name, colour in _COLOURS.items() if run.startswith(name)), "#444444")


def _gap_panel(axes: Axes, records: Sequence[Record], rows: Sequence[str], capacity: int) -> None:
    by_run = gaps(records, capacity)
    for place, (run, gap) in enumerate((run, by_run[run]) for run in rows if run in by_run):
        low, high = (gap.value if edge is None else edge for edge in gap[1:])
        axes.plot([100 * low, 100 * high], [place, place], color=_colour(run), linewidth=1.2)
        axes.plot(100 * gap.value, place, "o", color=_colour(run), markersize=5)
    axes.axvline(0, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(left=-1)
    ticks = (0, 2, 5, 10, 20, 50, 100, 200)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("perplexity after the prompt, % above full attention", fontsize=9)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(axis="y", color="#eeeeee", zorder=0)


def _recall_panel(axes: Axes, records: Sequence[Record], rows: Sequence[str], capacity: int) -> None:
    for (name, work), marker, shift in zip(RECALL.items(), "os", (0.12, -0.12), strict=True):
        shares = recall(records, capacity, work)
        points = [(shares[run].value, place + shift, _colour(run)) for place, run in enumerate(rows) if run in shares]
        for value, place, colour in points:
            fill = colour if marker == "o" else "white"
            axes.plot(value, place, marker, color=colour, markerfacecolor=fill, markersize=5)
        if FULL in shares:
            axes.axvline(shares[FULL].value, color="black", linestyle="--" if marker == "o" else ":", linewidth=1)
        axes.plot([], [], marker, color="black", markerfacecolor="black" if marker == "o" else "white", label=name)
    axes.set_xlim(-0.03, 1.03)
    axes.tick_params(labelleft=False)
    axes.set_xlabel("right answers (lines: full attention)", fontsize=9)
    axes.legend(fontsize=8, loc="lower right", frameon=False)
    axes.grid(axis="y", color="#eeeeee", zorder=0)


def _memory_panel(axes: Axes, memory: Sequence[Record]) -> None:
    runs = list(dict.fromkeys(one.policy for one in memory))
    for run, style in zip(runs, [*SIZE_STYLES, *SIZE_STYLES], strict=False):
        line = sorted((float(one.cell["length"]), one.value / 2**20) for one in memory if one.policy == run)
        axes.plot(*zip(*line, strict=True), color=_colour(run), marker=style.marker, linestyle=style.dash, label=run)
    lengths = sorted({float(one.cell["length"]) for one in memory})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens of the prompt", fontsize=9)
    axes.set_ylabel("peak above the model's own memory (MiB)", fontsize=9)
    axes.legend(fontsize=7.5, loc="upper left", frameon=False, handlelength=3)
