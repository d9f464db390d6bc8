"""Figures by capacity: perplexity and scores. Each takes records and a file to write, and measures nothing.

Bars are 95 % intervals. What falls off a scale is named, not hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..eval.record import Record
from .compare import perplexity_gap
from .records import chosen, families
from .style import Look, head, looks, name_lines, new_figure, plain, plain_log, save_figure, size_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM = 4  # a perplexity above so many times full's is off the scale
_SCORES = {"squality": ("rouge", "SQuALITY: ROUGE"), "qasper": ("f1", "QASPER: F1")}


def perplexity_by_capacity(records: Sequence[Record], path: str | Path) -> Path:
    """PG-19 perplexity by capacity with full as the floor, and by how much each policy exceeds full."""
    mine = [one for one in chosen(records, "pg19", "perplexity") if not one.cell]
    full = next((one for one in mine if one.policy == "full"), None)
    figure = new_figure(11.5, 5.6)
    left, right = figure.subplots(1, 2)
    lines = {name: found for name, found in families(mine).items() if name != "full"}
    look = looks(list(lines))
    _floor(left, full)
    hidden = _capacity_lines(left, lines, look, _ROOM * full.value if full else np.inf)
    left.set_ylabel("perplexity", fontsize=9)
    left.set_title("perplexity", fontsize=10)
    if full is not None:
        _excess_lines(right, lines, look, full)
    for axes in (left, right):
        _sizes_of(axes, mine, room="left")
    head(figure, mine, "PG-19 perplexity by capacity")
    _name_starts(left, {name: found for name, found in lines.items() if name not in hidden}, look)
    _name_excess(right, {name: found for name, found in lines.items() if name not in hidden}, look, full)
    _off_scale(left, hidden, lines)
    return save_figure(figure, path)


def _floor(axes: Axes, full: Record | None) -> None:
    if full is None:
        return
    axes.axhline(full.value, color="black", linestyle="--", linewidth=1.2)
    said = f"full: {full.value:.4g}"
    axes.annotate(said, (0, full.value), (4, -2), xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=8.5, ha="left", va="top")  # fmt: skip  # below, as names of lines stand above


def _capacity_lines(axes: Axes, lines: dict[str, list[Record]], look: dict[str, Look], most: float) -> list[str]:
    """Draw each family; the names of those that never come onto the scale, which ends at `most`."""
    hidden = []
    for name, found in lines.items():
        seen = [one for one in found if one.value <= most]
        if len(seen) < max(1, len(found) // 3):
            hidden.append(name)
        _line(axes, [one for one in found if one.capacity], look[name])
    values = [one.value for found in lines.values() for one in found if one.value <= most]
    if values:
        axes.set_yscale("log")
        axes.set_ylim(min(values) * 0.96, max(values) * 1.04)
        plain_log(axes)
    return hidden


Point = tuple[float, float | None, float | None]  # value, low, high


def _line(
    axes: Axes, found: Sequence[Record], look: Look, point: Callable[[Record], Point | None] | None = None
) -> None:
    """One family by capacity, with its intervals."""
    points = [(float(one.capacity or 0), point(one) if point else (one.value, one.low, one.high)) for one in found]
    kept = [(at, one) for at, one in points if one is not None]
    x, y = [at for at, _ in kept], [one[0] for _, one in kept]
    axes.plot(x, y, color=look.colour, linestyle=look.dash, linewidth=look.width, marker=look.marker, markersize=5)
    for at, (_, low, high) in kept:
        if low is not None and high is not None:
            axes.vlines(at, low, high, color=look.colour, linewidth=0.8, alpha=0.55)


def _excess_lines(axes: Axes, lines: dict[str, list[Record]], look: dict[str, Look], full: Record) -> None:
    """In per cent, linear up to 1 and logarithmic above."""
    for name, found in lines.items():
        _line(axes, [one for one in found if one.capacity], look[name], lambda one: _per_cent(one, full))
    axes.set_yscale("symlog", linthresh=1, linscale=0.6)
    most = 130 * (_ROOM - 1)
    axes.set_ylim(-0.05, most)
    ticks = [tick for tick in (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if tick < most]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("% above full", fontsize=9)
    axes.set_title("above full, compared text by text", fontsize=10)


def _per_cent(record: Record, full: Record) -> Point | None:
    found = perplexity_gap(record, full)
    if found is None:
        return None
    if found.low is None or found.high is None:
        return 100 * found.value, None, None
    return 100 * found.value, 100 * found.low, 100 * found.high


def _name_starts(axes: Axes, lines: dict[str, list[Record]], look: dict[str, Look]) -> None:
    most = axes.get_ylim()[1]
    ends = {}
    for name, found in lines.items():
        first = next((one for one in found if one.capacity and one.value <= most), None)
        if first is not None:
            ends[name] = (float(first.capacity or 0), first.value)
    name_lines(axes, ends, look, side="left")


def _name_excess(axes: Axes, lines: dict[str, list[Record]], look: dict[str, Look], full: Record | None) -> None:
    ends = {}
    for name, found in lines.items():
        points = [(one.capacity, _per_cent(one, full)) for one in found if one.capacity and full]
        inside = [(size, point[0]) for size, point in points if point and 0 < point[0] < axes.get_ylim()[1]]
        if inside:
            ends[name] = (float(inside[0][0]), inside[0][1])
    if ends:
        name_lines(axes, ends, look, side="left")


def _off_scale(axes: Axes, hidden: Sequence[str], lines: dict[str, list[Record]]) -> None:
    said = []
    for name in hidden:
        worst = max(lines[name], key=lambda one: one.value)
        said.append(f"{name}: off the scale ({worst.value:,.0f} at {worst.capacity:,.0f})")
    if said:
        axes.text(0.98, 0.98, "\n".join(said), transform=axes.transAxes, fontsize=8, ha="right", va="top")


def score_by_capacity(records: Sequence[Record], path: str | Path) -> Path:
    """SQuALITY and QASPER by capacity, with what full reaches."""
    shown = {task: chosen(records, task, metric) for task, (metric, _) in _SCORES.items()}
    shown = {task: [one for one in found if not one.cell] for task, found in shown.items() if found}
    figure = new_figure(1.2 + 5 * len(shown), 4.4)
    names = list(families([one for found in shown.values() for one in found]))
    look = looks(names)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (task, found) in zip(panels, shown.items(), strict=True):
        lines = {name: line for name, line in families(found).items() if name != "full"}
        _floor(axes, next((one for one in found if one.policy == "full"), None))
        for name, line in lines.items():
            _line(axes, [one for one in line if one.capacity], look[name])
        axes.set_title(_SCORES[task][1], fontsize=10)
        axes.set_ylabel("score (0 to 100)", fontsize=9)
        _sizes_of(axes, found, room="left")
    head(figure, [one for found in shown.values() for one in found], "Long-range understanding by capacity")
    for axes, found in zip(panels, shown.values(), strict=True):
        lines = {name: line for name, line in families(found).items() if name != "full"}
        _name_starts(axes, lines, look)
    return save_figure(figure, path)


def _sizes_of(axes: Axes, found: Sequence[Record], *, room: str) -> None:
    sizes = sorted({one.capacity for one in found if one.capacity and one.policy != "full"})
    if sizes:
        size_axis(axes, sizes)
        axes.set_xlim(sizes[0] / (3.6 if room == "left" else 1.2), sizes[-1] * 1.25)
    plain(axes)
