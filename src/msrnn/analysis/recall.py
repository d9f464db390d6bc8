"""What can still be recalled: needles and passkeys by length and depth, facts by the number of turns since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..eval.record import Record
from .records import chosen, families, family
from .style import Look, head, looks, new_figure, plain, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def needle_maps(records: Sequence[Record], path: str | Path) -> Path:
    """Recall by length and depth: a column for each policy, a row for each kind and capacity, numbers in the cells."""
    mine = chosen(records, "needle", "recall")
    names, sizes = list(families(mine)), _sizes(mine)
    rows = [(kind, size) for kind in sorted({str(one.cell["kind"]) for one in mine}) for size in sizes]
    figure = new_figure(2.1 * len(names) + 1.2, 1.9 * len(rows) + 0.8)
    panels = figure.subplots(len(rows), len(names), squeeze=False)
    shown: Any = None
    for row, (kind, size) in zip(panels, rows, strict=True):
        for axes, name in zip(row, names, strict=True):
            found = [one for one in _at(mine, size) if family(one.policy) == name and one.cell["kind"] == kind]
            shown = _panel(axes, found) or shown
            sized = name if size is None or name == "full" else f"{name} {size:,}"
            axes.set_title(f"{sized}, {kind}" if found else "", fontsize=8)
        row[0].set_ylabel("depth (0: the beginning)", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("length (tokens)", fontsize=8)
    figure.colorbar(shown, ax=list(panels.flat), label="recall", shrink=min(1.0, 2 / len(rows)))
    head(figure, mine, "Recall of one hidden number")
    return save_figure(figure, path)


def _sizes(mine: Sequence[Record]) -> list[int | None]:
    """The capacities there are; None, for `full` alone, where there are none."""
    return [*sorted({round(one.capacity) for one in mine if one.capacity})] or [None]


def _at(mine: Sequence[Record], size: int | None) -> list[Record]:
    """What was measured at one capacity, and `full` beside it."""
    return [one for one in mine if one.capacity is None or round(one.capacity) == size]


def _panel(axes: Axes, found: Sequence[Record]) -> Any:
    if not found:
        axes.set_axis_off()
        return None
    lengths = sorted({float(one.cell["length"]) for one in found})
    depths = sorted({float(one.cell["depth"]) for one in found})
    square = np.full((len(depths), len(lengths)), np.nan)
    for one in found:
        square[depths.index(float(one.cell["depth"])), lengths.index(float(one.cell["length"]))] = one.value
    shown = axes.imshow(square, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(square):
        if value == value:
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8,
                      color="white" if value > 0.55 else "black")  # fmt: skip
    axes.set_xticks(range(len(lengths)), [f"{length:,.0f}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    plain(axes)
    return shown


def turns_recall(records: Sequence[Record], path: str | Path) -> Path:
    """Recall of a fact told early, by the turns of other talk between: a panel for each capacity."""
    mine = [one for one in chosen(records, "turns", "recall") if "turns" in one.cell]
    sizes, look = _sizes(mine), looks(list(families(mine)))
    figure = new_figure(4.2 * len(sizes) + 0.6, 4.2)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        _turns_panel(axes, _at(mine, size), look)
        axes.set_title("everything kept" if size is None else f"capacity {size:,}", fontsize=10)
        axes.set_xlabel("turns between telling and asking", fontsize=9)
        plain(axes)
    panels[0].set_ylabel("recall", fontsize=9)
    head(figure, mine, "Facts told early, asked late")
    return save_figure(figure, path)


def _turns_panel(axes: Axes, found: Sequence[Record], look: dict[str, Look]) -> None:
    """The lines of one capacity; a legend, as all of them may end at nothing."""
    for name, some in families(found).items():
        points, style = sorted((float(one.cell["turns"]), one.value) for one in some), look[name]
        axes.plot(*zip(*points, strict=True), color=style.colour, linestyle=style.dash, marker=style.marker,
                  linewidth=style.width, label=name)  # fmt: skip
    axes.set_xticks(sorted({float(one.cell["turns"]) for one in found}))
    axes.set_ylim(-0.03, 1.03)
    axes.legend(loc="upper right", fontsize=8.5, frameon=False, handlelength=3.5)
