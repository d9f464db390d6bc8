"""Figures by capacity: perplexity and scores. Each takes records and a file to write.

Bars are 95 % intervals. Lines off the scale are listed in the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..eval.record import Record
from .compare import perplexity_gap
from .records import families, select
from .style import (
    LineStyle,
    add_title,
    capacity_axis,
    hide_spines,
    label_lines,
    line_styles,
    new_figure,
    plain_log_ticks,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM = 4  # a perplexity above so many times full's is off the scale
_SCORES = {"squality": ("rouge", "SQuALITY: ROUGE"), "qasper": ("f1", "QASPER: F1")}


def perplexity_by_capacity(records: Sequence[Record], path: str | Path) -> Path:
    """PG-19 perplexity by capacity with full as the floor, and the gap of each policy to full."""
    subset = [one for one in select(records, "pg19", "perplexity") if not one.cell]
    full = next((one for one in subset if one.policy == "full"), None)
    figure = new_figure(11.5, 5.6)
    left, right = figure.subplots(1, 2)
    lines = {name: line for name, line in families(subset).items() if name != "full"}
    styles = line_styles(list(lines))
    _floor(left, full)
    hidden = _capacity_lines(left, lines, styles, _ROOM * full.value if full else np.inf)
    left.set_ylabel("perplexity", fontsize=9)
    left.set_title("perplexity", fontsize=10)
    if full is not None:
        _gap_lines(right, lines, styles, full)
    for axes in (left, right):
        _capacity_ticks(axes, subset, room="left")
    add_title(figure, subset, "PG-19 perplexity by capacity")
    _label_starts(left, {name: line for name, line in lines.items() if name not in hidden}, styles)
    _label_gaps(right, {name: line for name, line in lines.items() if name not in hidden}, styles, full)
    _off_scale(left, hidden, lines)
    return save_figure(figure, path)


def _floor(axes: Axes, full: Record | None) -> None:
    if full is None:
        return
    axes.axhline(full.value, color="black", linestyle="--", linewidth=1.2)
    text = f"full: {full.value:.4g}"
    axes.annotate(text, (0, full.value), (4, -2), xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=8.5, ha="left", va="top")  # fmt: skip  # below, as names of lines stand above


def _capacity_lines(axes: Axes, lines: dict[str, list[Record]], styles: dict[str, LineStyle], most: float) -> list[str]:
    """Draw each family; return the names of those above `most`, where the scale ends."""
    hidden = []
    for name, line in lines.items():
        on_scale = [one for one in line if one.value <= most]
        if len(on_scale) < max(1, len(line) // 3):
            hidden.append(name)
        _line(axes, [one for one in line if one.capacity], styles[name])
    values = [one.value for line in lines.values() for one in line if one.value <= most]
    if values:
        axes.set_yscale("log")
        axes.set_ylim(min(values) * 0.96, max(values) * 1.04)
        plain_log_ticks(axes)
    return hidden


Point = tuple[float, float | None, float | None]  # value, low, high


def _line(
    axes: Axes, line: Sequence[Record], styles: LineStyle, point: Callable[[Record], Point | None] | None = None
) -> None:
    """One family by capacity, with its intervals."""
    points = [(float(one.capacity or 0), point(one) if point else (one.value, one.low, one.high)) for one in line]
    visible = [(at, one) for at, one in points if one is not None]
    x, y = [at for at, _ in visible], [one[0] for _, one in visible]
    axes.plot(
        x, y, color=styles.colour, linestyle=styles.dash, linewidth=styles.width, marker=styles.marker, markersize=5
    )
    for at, (_, low, high) in visible:
        if low is not None and high is not None:
            axes.vlines(at, low, high, color=styles.colour, linewidth=0.8, alpha=0.55)


def _gap_lines(axes: Axes, lines: dict[str, list[Record]], styles: dict[str, LineStyle], full: Record) -> None:
    """In per cent, linear up to 1 and logarithmic above."""
    for name, line in lines.items():
        _line(axes, [one for one in line if one.capacity], styles[name], lambda one: _gap_percent(one, full))
    axes.set_yscale("symlog", linthresh=1, linscale=0.6)
    most = 130 * (_ROOM - 1)
    axes.set_ylim(-0.05, most)
    ticks = [tick for tick in (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if tick < most]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("% above full", fontsize=9)
    axes.set_title("above full, compared text by text", fontsize=10)


def _gap_percent(record: Record, full: Record) -> Point | None:
    gap = perplexity_gap(record, full)
    if gap is None:
        return None
    if gap.low is None or gap.high is None:
        return 100 * gap.value, None, None
    return 100 * gap.value, 100 * gap.low, 100 * gap.high


def _label_starts(axes: Axes, lines: dict[str, list[Record]], styles: dict[str, LineStyle]) -> None:
    most = axes.get_ylim()[1]
    ends = {}
    for name, line in lines.items():
        first = next((one for one in line if one.capacity and one.value <= most), None)
        if first is not None:
            ends[name] = (float(first.capacity or 0), first.value)
    label_lines(axes, ends, styles, side="left")


def _label_gaps(axes: Axes, lines: dict[str, list[Record]], styles: dict[str, LineStyle], full: Record | None) -> None:
    ends = {}
    for name, line in lines.items():
        points = [(one.capacity, _gap_percent(one, full)) for one in line if one.capacity and full]
        inside = [(size, point[0]) for size, point in points if point and 0 < point[0] < axes.get_ylim()[1]]
        if inside:
            ends[name] = (float(inside[0][0]), inside[0][1])
    if ends:
        label_lines(axes, ends, styles, side="left")


def _off_scale(axes: Axes, hidden: Sequence[str], lines: dict[str, list[Record]]) -> None:
    labels = []
    for name in hidden:
        worst = max(lines[name], key=lambda one: one.value)
        labels.append(f"{name}: off the scale ({worst.value:,.0f} at {worst.capacity:,.0f})")
    if labels:
        axes.text(0.98, 0.98, "\n".join(labels), transform=axes.transAxes, fontsize=8, ha="right", va="top")


def score_by_capacity(records: Sequence[Record], path: str | Path) -> Path:
    """SQuALITY and QASPER by capacity, with the score of full."""
    by_task = {task: select(records, task, metric) for task, (metric, _) in _SCORES.items()}
    by_task = {task: [one for one in line if not one.cell] for task, line in by_task.items() if line}
    figure = new_figure(1.2 + 5 * len(by_task), 4.4)
    names = list(families([one for line in by_task.values() for one in line]))
    styles = line_styles(names)
    panels = figure.subplots(1, len(by_task), squeeze=False)[0]
    for axes, (task, line) in zip(panels, by_task.items(), strict=True):
        lines = {name: line for name, line in families(line).items() if name != "full"}
        _floor(axes, next((one for one in line if one.policy == "full"), None))
        for name, line in lines.items():
            _line(axes, [one for one in line if one.capacity], styles[name])
        axes.set_title(_SCORES[task][1], fontsize=10)
        axes.set_ylabel("score (0 to 100)", fontsize=9)
        _capacity_ticks(axes, line, room="left")
    add_title(figure, [one for line in by_task.values() for one in line], "Long-range understanding by capacity")
    for axes, line in zip(panels, by_task.values(), strict=True):
        lines = {name: line for name, line in families(line).items() if name != "full"}
        _label_starts(axes, lines, styles)
    return save_figure(figure, path)


def _capacity_ticks(axes: Axes, line: Sequence[Record], *, room: str) -> None:
    sizes = sorted({one.capacity for one in line if one.capacity and one.policy != "full"})
    if sizes:
        capacity_axis(axes, sizes)
        axes.set_xlim(sizes[0] / (3.6 if room == "left" else 1.2), sizes[-1] * 1.25)
    hide_spines(axes)
