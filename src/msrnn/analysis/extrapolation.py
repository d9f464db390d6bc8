"""Perplexity against position, far past the trained length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..eval.record import Record
from .policy_names import family
from .records import select
from .style import LineStyle, add_title, hide_spines, label_lines, line_styles, new_figure, plain_log_ticks, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


TITLES = {"running perplexity": "of all tokens so far", "perplexity": "of the tokens since the point before"}
KINDS = {
    "plain": "plain positions", "gaps": "positions with gaps compressed", "relative": "positions within the state"
}  # fmt: skip


def running_perplexity(records: Sequence[Record], path: str | Path) -> Path:
    """Perplexity against position: of all tokens so far, and of the last bin; a row for each kind of positions."""
    subset = select(records, "extrapolation")
    kinds = sorted({_kind(one) for one in subset}, key=list(KINDS).index) or ["plain"]
    figure = new_figure(11.5, 3.2 * len(kinds) + 1.4)
    panels = figure.subplots(len(kinds), len(TITLES), squeeze=False)
    styles = line_styles(list(dict.fromkeys(family(one.policy) for one in subset)))
    lines_by_axes = {}
    for row, kind in zip(panels, kinds, strict=True):
        for axes, (metric, title) in zip(row, TITLES.items(), strict=True):
            lines_by_axes[axes] = _by_policy([one for one in subset if one.metric == metric and _kind(one) == kind])
            _position_lines(axes, lines_by_axes[axes], styles)
            axes.set_title(f"{KINDS[kind]}: {title}", fontsize=10)
            axes.set_ylabel("perplexity", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("position in the book (tokens)", fontsize=9)
    add_title(figure, subset, f"Perplexity against position{_capacities(subset)}")
    for axes, lines in lines_by_axes.items():
        label_lines(axes, _ends(axes, lines), styles, side="right")
    return save_figure(figure, path)


def _kind(record: Record) -> str:
    return str(record.cell.get("positions", "plain"))


def _by_policy(line: Sequence[Record]) -> dict[str, list[Record]]:
    lines: dict[str, list[Record]] = {}
    for one in sorted(line, key=_position):
        lines.setdefault(family(one.policy), []).append(one)
    return lines


def _position(record: Record) -> float:
    return float(record.cell.get("position", 0))


def _ends(axes: Axes, lines: dict[str, list[Record]]) -> dict[str, tuple[float, float]]:
    """The last point of each line on the scale."""
    most = axes.get_ylim()[1]
    inside = {name: [one for one in line if one.value <= most] for name, line in lines.items()}
    return {name: (_position(line[-1]), line[-1].value) for name, line in inside.items() if line}


def _position_lines(axes: Axes, lines: dict[str, list[Record]], styles: dict[str, LineStyle]) -> None:
    for name, line in lines.items():
        style, x, y = styles[name], [_position(one) for one in line], [one.value for one in line]
        axes.plot(x, y, color=style.colour, linestyle=style.dash, linewidth=style.width, marker=style.marker,
                  markersize=4, markevery=max(1, len(x) // 8))  # fmt: skip
        if all(one.low is not None for one in line) and style.width > 2:
            axes.fill_between(x, [one.low or 0 for one in line], [one.high or 0 for one in line],
                              color=style.colour, alpha=0.12, linewidth=0)  # fmt: skip
    values = [one.value for line in lines.values() for one in line]
    inside = [value for value in values if value < 6 * min(values)]  # values that diverge leave the scale
    if inside:
        axes.set_yscale("log")
        axes.set_ylim(min(inside) * 0.95, max(inside) * 1.05)
        plain_log_ticks(axes)
    last = max((_position(one) for line in lines.values() for one in line), default=1)
    axes.set_xlim(0, last * 1.5)  # room for labels to the right of the lines
    step = next(size for size in (100, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 10**9) if last / size <= 8)
    ticks = np.arange(0, last + 1, step)
    axes.set_xticks(ticks, [f"{tick / 1000:g}K" if last > 3000 else f"{tick:g}" for tick in ticks])
    hide_spines(axes)


def _capacities(line: Sequence[Record]) -> str:
    sizes = sorted({one.capacity for one in line if one.capacity})
    return f", capacity {', '.join(f'{size:g}' for size in sizes)}" if sizes else ""
