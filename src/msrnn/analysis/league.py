"""The league of online policies: perplexity and recall of every score at one capacity, as rows and as a figure.

Records come from `experiments/league.py`. A rule was measured in several frames (what is protected, who decides
together); the one with the lowest perplexity on the choosing half stands for it, and the reporting half is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..eval.record import Record
from ..eval.statistics import Interval, bootstrap
from ..policy import parse_policy, split_policy
from .policy_names import family
from .records import select
from .style import add_title, hide_spines, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedConfig

HALVES = ("league-choosing", "league-reporting")
BYTES = "league-bytes"  # every policy in the bytes of TOVA's state, on the second half
_TURNS = ("league-turns", "turns")  # the same conversations; built-in policies have them with the other tasks
RECALL: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "passkeys": (("league-needle",), {"kind": "passkey"}),
    "numbers in books": (("league-needle",), {"kind": "needle"}),
    "facts after 2 to 8 turns": (_TURNS, {"turns": (2, 4, 8)}),
}
_COLOURS = ("#12427f", "#d98200", "#2f8f6b")
_BUILT_IN = ("window", "h2o", "tova", "fade", "blend", "full")


@dataclass(frozen=True)
class Player:
    """One score: the gap of its perplexity to full, that over TOVA's gap, and its recall by task."""

    policy: str
    gap: Interval
    ratio: Interval
    recall: dict[str, Interval]

    @property
    def name(self) -> str:
        return family(self.policy)


def players(records: Sequence[Record], capacity: int) -> list[Player]:
    """The smallest gap first. Of a rule's frames the one that is best on the choosing half."""
    choosing, reporting = ({one.policy: one for one in select(records, half, "perplexity")} for half in HALVES)
    full, tova = reporting["full"], reporting[f"tova:{capacity}"]
    best: dict[str, Record] = {}
    for policy, record in choosing.items():
        if record.capacity == capacity and policy in reporting:
            score = _score_of(policy)
            if score not in best or record.value < best[score].value:
                best[score] = record
    found = [_player(records, reporting[one.policy], full, tova) for one in best.values()]
    return sorted(found, key=lambda player: player.gap.value)


def in_tovas_bytes(records: Sequence[Record], capacity: int) -> dict[str, Player]:
    """The policies with as many slots as fit into the bytes of TOVA's, by kind, the smallest gap first."""
    measured = select(records, BYTES, "perplexity")
    fitted = {split_policy(one.policy).kind: one for one in measured if one.settings["plain_slots"] == capacity}
    full, tova = fitted.pop("full", None), fitted.get("tova")
    if full is None or tova is None:
        return {}
    found = {kind: _player((), one, full, tova) for kind, one in fitted.items()}
    return dict(sorted(found.items(), key=lambda item: item[1].gap.value))


def _score_of(policy: str) -> str:
    """What a policy's frames share: the rule, and whether it fades; a built-in policy is its own frame."""
    kind = split_policy(policy).kind
    name = kind.split(",")[0].split("+")[0].split("-")[0]
    return kind if name in _BUILT_IN else f"{name}{' fading' if 'momentum' in kind else ''}"


def _player(records: Iterable[Record], ours: Record, full: Record, tova: Record) -> Player:
    recall = {name: mean_recall(records, ours.policy, *where) for name, where in RECALL.items()}
    return Player(
        ours.policy,
        paired(lambda f, p: p - f, full, ours),
        paired(lambda f, p, t: (p - f) / (t - f), full, ours, tova),
        {name: interval for name, interval in recall.items() if interval is not None},
    )


def paired(statistic: Callable[..., NDArray[np.float64]], *records: Record) -> Interval:
    """A statistic of perplexities on the same books, resampled together."""
    groups = sorted(records[0].parts)
    columns = [np.array([one.parts[g][name] for g in groups]) for one in records for name in ("nll", "tokens")]

    def value(sums: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        return statistic(*(np.exp(nll / tokens) for nll, tokens in zip(sums[::2], sums[1::2], strict=True)))

    return bootstrap(columns, value, records[0].seed)


def mean_recall(
    records: Iterable[Record], policy: str, tasks: Sequence[str], where: dict[str, object]
) -> Interval | None:
    """Over all cells of the tasks that are asked for; intervals resample hidden numbers or conversations."""
    sums: dict[str, tuple[float, float]] = {}
    for one in records:
        if (
            one.task in tasks
            and one.policy == policy
            and all(_matches(one.cell[key], want) for key, want in where.items())
        ):
            for group, part in one.parts.items():
                recalled, count = sums.get(group, (0.0, 0.0))
                sums[group] = (recalled + part["recall"], count + part["count"])
    if not sums:
        return None
    columns = [np.array(column) for column in zip(*sums.values(), strict=True)]
    return bootstrap(columns, lambda totals: totals[0] / totals[1], 0)


def _matches(value: object, want: object) -> bool:
    return value in want if isinstance(want, tuple) else value == want


def league_figure(records: Sequence[Record], path: str | Path) -> Path:
    """The gap to full of every score, and its recall, at the capacity that has most policies."""
    subset = [one for one in records if one.task.startswith("league-") or one.task in _TURNS]
    sizes = [int(one.capacity) for one in subset if one.task == HALVES[1] and one.capacity]
    capacity = max(sorted(set(sizes)), key=sizes.count)
    rows = players(subset, capacity)[::-1]
    panels = [_gaps, _recalls] if any(row.recall for row in rows) else [_gaps]
    figure = new_figure(11, 0.32 * len(rows) + 2)
    places = figure.subplots(1, len(panels), sharey=True, width_ratios=(3, 2)[: len(panels)], squeeze=False)[0]
    for panel, axes in zip(panels, places, strict=True):
        panel(axes, rows)
    _gaps_in_bytes(places[0], rows, in_tovas_bytes(subset, capacity))
    places[0].set_yticks(range(len(rows)), [row.name for row in rows])
    for axes in places:
        hide_spines(axes)
        axes.grid(axis="y", color="#eeeeee", zorder=0)
    add_title(figure, subset, f"Online policies with {capacity:,} slots")
    return save_figure(figure, path)


def _gaps(axes: Axes, rows: Sequence[Player]) -> None:
    for place, row in enumerate(rows):
        low, high = (row.gap.value if edge is None else edge for edge in row.gap[1:])
        built_in = row.name.split("+")[0].split("-")[0].split(",")[0] in _BUILT_IN
        colour = _COLOURS[0] if built_in else _COLOURS[1]
        axes.plot([max(low, 1e-3), high], [place, place], color=colour, linewidth=1.2)
        axes.plot(row.gap.value, place, "o", color=colour, markersize=5)
    axes.set_xlim(left=0)
    axes.set_xlabel("perplexity above full attention (PG-19, held-out books; blue: built in, orange: rule)", fontsize=9)


def _gaps_in_bytes(axes: Axes, rows: Sequence[Player], fitted: dict[str, Player]) -> None:
    """Hollow: the gap with as many slots as fit into TOVA's bytes."""
    points = [(place, fitted.get(split_policy(row.policy).kind)) for place, row in enumerate(rows)]
    shown = [(player.gap.value, place) for place, player in points if player is not None]
    if shown:
        axes.plot(*zip(*shown, strict=True), "D", color="#444444", markerfacecolor="none", markersize=5, zorder=4)
        axes.plot([], [], "D", color="#444444", markerfacecolor="none", markersize=5, label="in the bytes of tova")
        axes.legend(fontsize=8, loc="lower left", frameon=False)


def _recalls(axes: Axes, rows: Sequence[Player]) -> None:
    for number, (name, colour, marker) in enumerate(zip(RECALL, _COLOURS, "os^", strict=True)):
        points = [
            (row.recall[name].value, place + 0.18 * (number - 1))
            for place, row in enumerate(rows)
            if name in row.recall
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=4, label=name)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("recall", fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="upper right", frameon=False)


@dataclass(frozen=True)
class Size:
    """The bytes of a policy's state relative to those of TOVA with as many slots, and its slots in TOVA's bytes."""

    relative: float
    slots: int


def size_of(policy: str, config: PreTrainedConfig, dtype: torch.dtype) -> Size:
    """All that the state stores counts: keys, values, positions, scores, what a rule remembers of every token."""
    from ..hf.byte_budget import ByteBudget
    from ..hf.cost import cost
    from ..hf.geometry import geometry
    from ..plan import Plan

    layers, text = geometry(config), split_policy(policy)
    tova, ours = (
        cost(layers, Plan.of(parse_policy(name), len(layers)), dtype, 1).state for name in (f"tova:{text.size}", policy)
    )
    return Size(ours / tova, ByteBudget(policy, tova, layers, dtype).slots(text))


def league_table(records: Sequence[Record], capacity: int, config: PreTrainedConfig | None = None) -> str:
    """The rows as Markdown; with the model's configuration, sizes of the states too."""
    sizes = () if config is None else ("bytes relative to tova's", "slots in tova's bytes")
    names = ("policy", "gap to full", "relative to tova's gap", *sizes, *RECALL)
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in players(records, capacity):
        cells = [f"`{row.policy}`", _cell(row.gap), _cell(row.ratio)]
        if config is not None:
            size = size_of(row.policy, config, getattr(torch, records[0].dtype))
            cells += [f"{size.relative:.2f}", str(size.slots)]
        cells += [_cell(row.recall.get(name)) for name in RECALL]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(interval: Interval | None) -> str:
    if interval is None:
        return ""
    edges = "" if interval.low is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.value:.2f}{edges}"
