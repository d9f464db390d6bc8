"""Figures of recall: needles and passkeys by length and depth, facts by the number of turns since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..eval.record import Record
from .policy_names import family
from .records import families, select
from .style import LineStyle, add_title, hide_spines, line_styles, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def needle_maps(records: Sequence[Record], path: str | Path) -> Path:
    """Recall by length and depth: a column for each policy, a row for each kind and capacity, numbers in the cells."""
    subset = select(records, "needle", "recall")
    names, sizes = list(families(subset)), _sizes(subset)
    rows = [(kind, size) for kind in sorted({str(one.cell["kind"]) for one in subset}) for size in sizes]
    figure = new_figure(2.1 * len(names) + 1.2, 1.9 * len(rows) + 0.8)
    panels = figure.subplots(len(rows), len(names), squeeze=False)
    image: Any = None
    for row, (kind, size) in zip(panels, rows, strict=True):
        for axes, name in zip(row, names, strict=True):
            cells = [one for one in _at(subset, size) if family(one.policy) == name and one.cell["kind"] == kind]
            image = _panel(axes, cells) or image
            title = name if size is None or name == "full" else f"{name} {size:,}"
            axes.set_title(f"{title}, {kind}" if cells else "", fontsize=8)
        row[0].set_ylabel("depth (0: the beginning)", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("length (tokens)", fontsize=8)
    figure.colorbar(image, ax=list(panels.flat), label="recall", shrink=min(1.0, 2 / len(rows)))
    add_title(figure, subset, "Recall of one hidden number")
    return save_figure(figure, path)


def _sizes(subset: Sequence[Record]) -> list[int | None]:
    """The capacities of the records; None, for `full` alone, where there are none."""
    return [*sorted({round(one.capacity) for one in subset if one.capacity})] or [None]


def _at(subset: Sequence[Record], size: int | None) -> list[Record]:
    """The records of one capacity, and of `full`."""
    return [one for one in subset if one.capacity is None or round(one.capacity) == size]


def _panel(axes: Axes, cells: Sequence[Record]) -> Any:
    if not cells:
        axes.set_axis_off()
        return None
    lengths = sorted({float(one.cell["length"]) for one in cells})
    depths = sorted({float(one.cell["depth"]) for one in cells})
    square = np.full((len(depths), len(lengths)), np.nan)
    for one in cells:
        square[depths.index(float(one.cell["depth"])), lengths.index(float(one.cell["length"]))] = one.value
    image = axes.imshow(square, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(square):
        if value == value:
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8,
                      color="white" if value > 0.55 else "black")  # fmt: skip
    axes.set_xticks(range(len(lengths)), [f"{length:,.0f}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    hide_spines(axes)
    return image


def turns_recall(records: Sequence[Record], path: str | Path) -> Path:
    """Recall of a fact by the turns between statement and question: a panel for each capacity."""
    subset = [one for one in select(records, "turns", "recall") if "turns" in one.cell]
    sizes, styles = _sizes(subset), line_styles(list(families(subset)))
    figure = new_figure(4.2 * len(sizes) + 0.6, 4.2)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        _turns_panel(axes, _at(subset, size), styles)
        axes.set_title("full" if size is None else f"capacity {size:,}", fontsize=10)
        axes.set_xlabel("turns between statement and question", fontsize=9)
        hide_spines(axes)
    panels[0].set_ylabel("recall", fontsize=9)
    add_title(figure, subset, "Recall of facts over turns")
    return save_figure(figure, path)


def _turns_panel(axes: Axes, cells: Sequence[Record], styles: dict[str, LineStyle]) -> None:
    """The lines of one capacity, with a legend: their ends may coincide at 0."""
    for name, line in families(cells).items():
        points, style = sorted((float(one.cell["turns"]), one.value) for one in line), styles[name]
        axes.plot(*zip(*points, strict=True), color=style.colour, linestyle=style.dash, marker=style.marker,
                  linewidth=style.width, label=name)  # fmt: skip
    axes.set_xticks(sorted({float(one.cell["turns"]) for one in cells}))
    axes.set_ylim(-0.03, 1.03)
    axes.legend(loc="upper right", fontsize=8.5, frameon=False, handlelength=3.5)
