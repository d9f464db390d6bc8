"""Perplexity against position, far past the trained length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..eval.record import Record
from .records import chosen, family
from .style import Look, head, looks, name_lines, new_figure, plain, plain_log, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def running_perplexity(records: Sequence[Record], path: str | Path) -> Path:
    """Perplexity against position, far past the trained length: of all tokens so far, and of the last stretch."""
    mine = chosen(records, "extrapolation")
    figure = new_figure(11.5, 4.6)
    panels = figure.subplots(1, 2)
    titles = {"running perplexity": "of all tokens so far", "perplexity": "of the tokens since the point before"}
    lines = {metric: _by_position([one for one in mine if one.metric == metric]) for metric in titles}
    look = _position_looks([name for found in lines.values() for name in found])
    for axes, (metric, title) in zip(panels, titles.items(), strict=True):
        _position_lines(axes, lines[metric], look)
        axes.set_title(f"perplexity {title}", fontsize=10)
        axes.set_ylabel("perplexity", fontsize=9)
    head(figure, mine, f"Perplexity against position{_capacities(mine)}")
    for axes, metric in zip(panels, titles, strict=True):
        most = axes.get_ylim()[1]
        inside = {name: [one for one in found if one.value <= most] for name, found in lines[metric].items()}
        ends = {name: (_position(found[-1]), found[-1].value) for name, found in inside.items() if found}
        name_lines(axes, ends, look, side="right")
    return save_figure(figure, path)


def _by_position(found: Sequence[Record]) -> dict[str, list[Record]]:
    lines: dict[str, list[Record]] = {}
    for one in sorted(found, key=_position):
        positions = one.cell.get("positions", "plain")
        name = family(one.policy) if positions == "plain" else f"{family(one.policy)}, {positions}"
        lines.setdefault(name, []).append(one)
    return lines


def _position(record: Record) -> float:
    return float(record.cell.get("position", 0))


def _position_looks(names: Sequence[str]) -> dict[str, Look]:
    """A policy keeps its colour; other positions than plain change marker and dash, and the line is thin."""
    known = looks(list(dict.fromkeys(name.split(",")[0] for name in names)))
    changes = {"gaps": ("D", (0, (1, 1))), "relative": ("s", (0, (4, 1, 1, 1)))}
    made = {}
    for name in names:
        own, _, positions = name.partition(", ")
        made[name] = known[own]
        if positions in changes:
            marker, dash = changes[positions]
            made[name] = known[own]._replace(marker=marker, dash=dash, width=1.4)
    return made


def _position_lines(axes: Axes, lines: dict[str, list[Record]], look: dict[str, Look]) -> None:
    best = min((one.value for found in lines.values() for one in found), default=1.0)
    for name, found in lines.items():
        style, x, y = look[name], [_position(one) for one in found], [one.value for one in found]
        axes.plot(x, y, color=style.colour, linestyle=style.dash, linewidth=style.width, marker=style.marker,
                  markersize=4, markevery=max(1, len(x) // 8))  # fmt: skip
        if all(one.low is not None for one in found) and style.width > 2:
            axes.fill_between(x, [one.low or 0 for one in found], [one.high or 0 for one in found],
                              color=style.colour, alpha=0.12, linewidth=0)  # fmt: skip
    values = [one.value for found in lines.values() for one in found if one.value < 6 * best]
    if values:
        axes.set_yscale("log")
        axes.set_ylim(min(values) * 0.95, max(values) * 1.05)
        plain_log(axes)
    far = max((_position(one) for found in lines.values() for one in found), default=1)
    axes.set_xlim(0, far * 1.5)  # names stand to the right of the lines
    step = next(size for size in (100, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 10**9) if far / size <= 8)
    ticks = np.arange(0, far + 1, step)
    axes.set_xticks(ticks, [f"{tick / 1000:g}K" if far > 3000 else f"{tick:g}" for tick in ticks])
    axes.set_xlabel("position in the book (tokens)", fontsize=9)
    plain(axes)


def _capacities(found: Sequence[Record]) -> str:
    sizes = sorted({one.capacity for one in found if one.capacity})
    return f", capacity {', '.join(f'{size:g}' for size in sizes)}" if sizes else ""
