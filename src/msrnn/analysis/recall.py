"""What can still be recalled: needles and passkeys by length and depth, facts by the number of turns since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..eval.record import Record
from .records import chosen, family
from .style import SIZE_LOOKS, head, name_lines, new_figure, plain, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def needle_maps(records: Sequence[Record], path: str | Path) -> Path:
    """Recall by length and depth, a panel for each kind and policy; every cell says its number."""
    mine = chosen(records, "needle", "recall")
    kinds = sorted({str(one.cell["kind"]) for one in mine})
    policies = sorted({one.policy for one in mine}, key=lambda name: (name != "full", family(name), _size(mine, name)))
    figure = new_figure(2.5 * len(policies) + 1.2, 2.5 * len(kinds) + 0.8)
    panels = figure.subplots(len(kinds), len(policies), squeeze=False, sharex=True, sharey=True)
    for row, kind in zip(panels, kinds, strict=True):
        for axes, policy in zip(row, policies, strict=True):
            shown = _panel(axes, [one for one in mine if one.policy == policy and one.cell["kind"] == kind])
            axes.set_title(f"{policy}, {kind}", fontsize=9)
        row[0].set_ylabel("depth (0: the beginning)", fontsize=8.5)
    for axes in panels[-1]:
        axes.set_xlabel("length (tokens)", fontsize=8.5)
    figure.colorbar(shown, ax=list(panels.flat), label="recall", shrink=0.8)
    head(figure, mine, "Recall of one hidden number")
    return save_figure(figure, path)


def _size(mine: Sequence[Record], policy: str) -> float:
    return next(one.capacity or 0 for one in mine if one.policy == policy)


def _panel(axes: Axes, found: Sequence[Record]) -> Any:
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
    """Recall of a fact told early, by the turns of other talk between."""
    mine = [one for one in chosen(records, "turns", "recall") if "turns" in one.cell]
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    policies = list(dict.fromkeys(one.policy for one in mine))
    look = {name: SIZE_LOOKS[index % len(SIZE_LOOKS)] for index, name in enumerate(policies)}
    ends = {}
    for policy, style in look.items():
        points = sorted((float(one.cell["turns"]), one.value) for one in mine if one.policy == policy)
        axes.plot(*zip(*points, strict=True), color=style.colour, linestyle=style.dash, marker=style.marker)
        ends[policy] = points[-1]
    axes.set_ylim(-0.03, 1.03)
    far = max(x for x, _ in ends.values())
    axes.set_xlim(-0.3, max(far, 1) * 1.35)
    axes.set_xlabel("turns between telling and asking", fontsize=9)
    axes.set_ylabel("recall", fontsize=9)
    plain(axes)
    head(figure, mine, "Facts told early, asked late")
    name_lines(axes, ends, look, side="right")
    return save_figure(figure, path)
