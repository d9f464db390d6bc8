"""RULER and BABILong as maps: a row for each policy, a column for each kind of task, a panel for each length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..eval.record import Record
from .policy_names import short_name
from .records import families, select
from .style import add_title, hide_spines, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# task -> its metric, in per cent, and the title
TASKS = {"ruler": ("match", "RULER"), "babilong": ("accuracy", "BABILong")}


def ruler_maps(records: Sequence[Record], path: str | Path) -> Path:
    """Right answers in per cent by policy and kind, the mean over all kinds first."""
    subset = [one for task, (metric, _) in TASKS.items() for one in select(records, task, metric)]
    panels = sorted({(list(TASKS).index(one.task), float(one.cell["length"])) for one in subset})
    policies = _policies(subset)
    widths = [len(_kinds(_panel_records(subset, *panel))) for panel in panels]
    figure = new_figure(2.2 + 0.42 * sum(widths) + 0.3 * len(widths), 0.27 * len(policies) + 2.2)
    places = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axes, (task, length) in zip(places, panels, strict=True):
        _map(axes, _panel_records(subset, task, length), policies)
        axes.set_title(f"{list(TASKS.values())[task][1]}, {length:,.0f} tokens", fontsize=9)
    places[0].set_yticks(range(len(policies)), [short_name(policy) for policy in policies])
    add_title(figure, subset, "Right answers in per cent")
    return save_figure(figure, path)


def _policies(subset: Iterable[Record]) -> list[str]:
    """`full` first, then by capacity and in the paper's order."""
    lines = [one for line in families(subset).values() for one in line]
    return sorted(dict.fromkeys(one.policy for one in lines), key=lambda policy: policy != "full")


def _panel_records(subset: Iterable[Record], task: int, length: float) -> list[Record]:
    return [one for one in subset if one.task == list(TASKS)[task] and float(one.cell["length"]) == length]


def _kinds(subset: Iterable[Record]) -> list[str]:
    return sorted({str(one.cell["kind"]) for one in subset}, key=lambda kind: (kind != "all", kind))


def _map(axes: Axes, subset: Sequence[Record], policies: Sequence[str]) -> None:
    kinds = _kinds(subset)
    square = np.full((len(policies), len(kinds)), np.nan)
    for one in subset:
        place = policies.index(one.policy), kinds.index(str(one.cell["kind"]))
        square[place] = one.value
    axes.imshow(square, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    _write(axes, square)
    axes.set_xticks(range(len(kinds)), kinds, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks([])
    axes.axvline(0.5, color="white", linewidth=3)
    hide_spines(axes)


def _write(axes: Axes, square: Any) -> None:
    for (row, column), value in np.ndenumerate(square):
        if value == value:
            colour = "white" if value > 55 else "black"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=colour)
