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


TITLES = {"running perplexity": "of all tokens so far", "perplexity": "of the tokens since the point before"}
KINDS = {
    "plain": "positions as they are", "gaps": "positions with gaps compressed", "relative": "places within the state"
}  # fmt: skip


def running_perplexity(records: Sequence[Record], path: str | Path) -> Path:
    """Perplexity against position: of all tokens so far, and of the last stretch; a row for each kind of positions."""
    mine = chosen(records, "extrapolation")
    kinds = sorted({_kind(one) for one in mine}, key=list(KINDS).index) or ["plain"]
    figure = new_figure(11.5, 3.2 * len(kinds) + 1.4)
    panels = figure.subplots(len(kinds), len(TITLES), squeeze=False)
    look = looks(list(dict.fromkeys(family(one.policy) for one in mine)))
    shown = {}
    for row, kind in zip(panels, kinds, strict=True):
        for axes, (metric, title) in zip(row, TITLES.items(), strict=True):
            shown[axes] = _by_policy([one for one in mine if one.metric == metric and _kind(one) == kind])
            _position_lines(axes, shown[axes], look)
            axes.set_title(f"{KINDS[kind]}: {title}", fontsize=10)
            axes.set_ylabel("perplexity", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("position in the book (tokens)", fontsize=9)
    head(figure, mine, f"Perplexity against position{_capacities(mine)}")
    for axes, lines in shown.items():
        name_lines(axes, _ends(axes, lines), look, side="right")
    return save_figure(figure, path)


def _kind(record: Record) -> str:
    return str(record.cell.get("positions", "plain"))


def _by_policy(found: Sequence[Record]) -> dict[str, list[Record]]:
    lines: dict[str, list[Record]] = {}
    for one in sorted(found, key=_position):
        lines.setdefault(family(one.policy), []).append(one)
    return lines


def _position(record: Record) -> float:
    return float(record.cell.get("position", 0))


def _ends(axes: Axes, lines: dict[str, list[Record]]) -> dict[str, tuple[float, float]]:
    """Where each line was last inside the picture."""
    most = axes.get_ylim()[1]
    inside = {name: [one for one in found if one.value <= most] for name, found in lines.items()}
    return {name: (_position(found[-1]), found[-1].value) for name, found in inside.items() if found}


def _position_lines(axes: Axes, lines: dict[str, list[Record]], look: dict[str, Look]) -> None:
    for name, found in lines.items():
        style, x, y = look[name], [_position(one) for one in found], [one.value for one in found]
        axes.plot(x, y, color=style.colour, linestyle=style.dash, linewidth=style.width, marker=style.marker,
                  markersize=4, markevery=max(1, len(x) // 8))  # fmt: skip
        if all(one.low is not None for one in found) and style.width > 2:
            axes.fill_between(x, [one.low or 0 for one in found], [one.high or 0 for one in found],
                              color=style.colour, alpha=0.12, linewidth=0)  # fmt: skip
    values = [one.value for found in lines.values() for one in found]
    inside = [value for value in values if value < 6 * min(values)]  # what breaks down leaves the picture
    if inside:
        axes.set_yscale("log")
        axes.set_ylim(min(inside) * 0.95, max(inside) * 1.05)
        plain_log(axes)
    far = max((_position(one) for found in lines.values() for one in found), default=1)
    axes.set_xlim(0, far * 1.5)  # names stand to the right of the lines
    step = next(size for size in (100, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 10**9) if far / size <= 8)
    ticks = np.arange(0, far + 1, step)
    axes.set_xticks(ticks, [f"{tick / 1000:g}K" if far > 3000 else f"{tick:g}" for tick in ticks])
    plain(axes)


def _capacities(found: Sequence[Record]) -> str:
    sizes = sorted({one.capacity for one in found if one.capacity})
    return f", capacity {', '.join(f'{size:g}' for size in sizes)}" if sizes else ""
