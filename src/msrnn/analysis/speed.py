"""Figures of speed and memory: curves by capacity, bars where only one or two capacities were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..eval.record import Record
from .policy_names import family
from .records import select
from .style import LineStyle, add_title, capacity_axis, hide_spines, label_lines, line_styles, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

MIB = 2**20
_WORK = {"table": "decode, largest batch", "largest": "decode, largest batch", "same": "decode", "step": "decode",
         "decode": "decode", "prefill": "prefill"}  # fmt: skip


@dataclass(frozen=True)
class DataPoint:
    """One value to draw. `kind` is the work that was timed; points of one kind and family make a line."""

    record: Record
    value: float
    kind: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def line(self) -> str:
        name = family(self.record.policy)
        return f"{name} ({self.kind})" if self.kind else name


Panel = tuple[Sequence[DataPoint], str, str]  # points, unit, title


def throughput_and_memory(records: Sequence[Record], path: str | Path) -> Path:
    """Tokens per second and memory: as curves where there are several capacities, else as bars."""
    timed, state_memory = _comparable(speeds(records)), _comparable(memory(records))
    kinds = {point.kind for line in _by_line(timed).values() if len(_sizes(line)) > 2 for point in line}
    curves = [point for point in timed if point.kind in kinds]
    bars = [point for point in timed if point.kind not in kinds]
    by_capacity = bool(curves) or len(_sizes(state_memory)) > 2
    curves, shared = _shorter(curves)
    speed_panel = [(curves if by_capacity else bars, "tokens per second", f"speed{shared}")]
    panels = [panel for panel in (*speed_panel, (state_memory, "MiB", memory_title(records))) if panel[0]]
    figure = _by_capacity(panels, bars) if by_capacity else _as_bars(panels)
    add_title(figure, [point.record for points, _, _ in panels for point in points], "Speed and memory")
    for axes, (points, _, _) in zip(figure.axes, panels if by_capacity else (), strict=False):
        _label(axes, _multiples(points)[0])  # after the layout of the title
    return save_figure(figure, path)


def _shorter(points: Sequence[DataPoint]) -> tuple[list[DataPoint], str]:
    """The points without the words that all kinds of work share, and those words."""
    kinds = list(dict.fromkeys(point.kind for point in points))
    shared = [
        word for word in (kinds[0] if kinds else "").split(", ") if all(word in kind.split(", ") for kind in kinds)
    ]
    if len(kinds) < 2 or not shared:
        return list(points), ""
    short = {kind: ", ".join(word for word in kind.split(", ") if word not in shared) for kind in kinds}
    return [replace(point, kind=short[point.kind]) for point in points], f" ({', '.join(shared)})"


def _as_bars(panels: Sequence[Panel]) -> MatplotlibFigure:
    tall = max(len(points) for points, _, _ in panels)
    figure = new_figure(1 + 8 * len(panels), 1.3 + 0.28 * tall)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _bars(axes, *panel, tall)
    return figure


def _by_capacity(panels: Sequence[Panel], bars: Sequence[DataPoint]) -> MatplotlibFigure:
    """Curves side by side; below them, over the full width, bars of what has few capacities."""
    below = 0.7 + 0.28 * len(bars) if bars else 0
    figure = new_figure(1 + 5.4 * len(panels), 4.4 + below)
    grid = figure.add_gridspec(2 if bars else 1, len(panels), height_ratios=[4.4, below] if bars else None)
    for place, panel in enumerate(panels):
        _lines(figure.add_subplot(grid[0, place]), *panel)
    if bars:
        _bars(figure.add_subplot(grid[1, :]), bars, "tokens per second", "at one or two capacities", len(bars))
    return figure


def speeds(records: Iterable[Record]) -> list[DataPoint]:
    """Recorded throughput; without any, the prefill throughput from the seconds of a run."""
    candidates = [one for one in records if not str(one.settings.get("gate", "")).startswith("FAILED")]
    timed = [
        DataPoint(one, one.value, _kind(one), one.low, one.high)
        for one in candidates
        if one.metric.endswith("tokens/s")
    ]
    if timed:
        return timed
    return [
        DataPoint(one, sum(part["tokens"] for part in one.parts.values()) / one.seconds)
        for one in _read(candidates)
        if one.seconds > 0
    ]


def _kind(record: Record) -> str:
    """The kind of work in words."""
    name = record.metric.removesuffix(" tokens/s")
    words = [_WORK.get(name, name)]
    for field, value in record.cell.items():
        words.append(f"{value:,} tokens" if field in ("context", "length") else f"{field} {value}")
    return ", ".join(words)


def memory(records: Iterable[Record]) -> list[DataPoint]:
    """The bytes of a state where they were recorded, else the rise of a run's memory."""
    candidates = list(records)
    states = [DataPoint(one, one.value / MIB) for one in candidates if one.metric == "state bytes"]
    return states or [DataPoint(one, one.peak_bytes / MIB) for one in _read(candidates) if one.peak_bytes]


def memory_title(records: Iterable[Record]) -> str:
    family_name = any(one.metric == "state bytes" for one in records)
    return "memory of one sequence's state" if family_name else "memory above the loaded model, at its peak"


def _read(records: Iterable[Record]) -> list[Record]:
    candidates = select(records, "pg19", "perplexity")
    return [one for one in candidates if not one.cell and family(one.policy) != "baseline"]


def _sizes(points: Iterable[DataPoint]) -> list[float]:
    return sorted({point.record.capacity for point in points if point.record.capacity})


def _by_line(points: Iterable[DataPoint]) -> dict[str, list[DataPoint]]:
    lines: dict[str, list[DataPoint]] = {}
    for point in sorted(points, key=lambda point: point.record.capacity or 0):
        lines.setdefault(point.line, []).append(point)
    return lines


def _look_of(names: Iterable[str]) -> dict[str, LineStyle]:
    """The style of each line: that of its family, with other dashes for other kinds of work."""
    by_family = line_styles(list(dict.fromkeys(name.split(" (")[0] for name in names)))
    dashes = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 1, 1, 1)), (0, (1, 1)))
    by_line: dict[str, LineStyle] = {}
    for name in names:
        family_name = name.split(" (")[0]
        before = sum(other.split(" (")[0] == family_name for other in by_line)
        by_line[name] = (
            by_family[family_name]
            if " (" not in name
            else by_family[family_name]._replace(dash=dashes[before % len(dashes)])
        )
    return by_line


def _multiples(points: Sequence[DataPoint]) -> tuple[list[DataPoint], bool]:
    """The points relative to full, where every kind of work has a value for full; and whether they are."""
    full = {point.kind: point.value for point in points if point.record.policy == "full" and point.kind}
    if not full or any(point.kind not in full for point in points):
        return list(points), False
    others = (point for point in points if point.record.policy != "full")
    return [replace(point, value=point.value / full[point.kind]) for point in others], True


def _lines(axes: Axes, points: Sequence[DataPoint], label: str, title: str) -> None:
    points, relative = _multiples(points)
    lines = _by_line(points)
    levels = {"full": 1.0} if relative else {}
    for name, styles in _look_of(lines).items():
        levels.update((name, point.value) for point in lines[name] if not point.record.capacity)
        curve = [(point.record.capacity, point.value) for point in lines[name] if point.record.capacity]
        if curve:
            axes.plot(*zip(*curve, strict=True), color=styles.colour, linestyle=styles.dash, linewidth=styles.width,
                      marker=styles.marker, markersize=5)  # fmt: skip
    for name, value in levels.items():
        axes.axhline(value, color="black", linestyle="--", linewidth=1)
        axes.annotate(name, (1, value), (0, 3), xycoords=("axes fraction", "data"), fontsize=8,
                      textcoords="offset points", ha="right")  # fmt: skip
    capacity_axis(axes, _sizes(points))
    axes.set_xlim(_sizes(points)[0] / 10, _sizes(points)[-1] * 1.3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{label}, times full" if relative else label, fontsize=9)
    axes.set_title(title, fontsize=10)
    hide_spines(axes)


def _label(axes: Axes, points: Sequence[DataPoint]) -> None:
    lines = _by_line(point for point in points if point.record.capacity)
    ends = {
        name: (float(candidates[0].record.capacity or 0), candidates[0].value) for name, candidates in lines.items()
    }
    label_lines(axes, ends, _look_of(lines), side="left")


def _comparable(points: Sequence[DataPoint]) -> list[DataPoint]:
    """The kinds of work that full and others share, if any, each bar once; the table has the rest."""
    full = {point.kind for point in points if point.record.policy == "full"}
    both = full & {point.kind for point in points if point.record.policy != "full"}
    relevant = [point for point in points if point.kind in (both or full)] or list(points)
    latest = {_bar_name(point): point for point in sorted(relevant, key=lambda point: point.record.date)}
    return list(latest.values())


def _bar_name(point: DataPoint) -> str:
    lanes = ", pipelined" if "lanes" in point.record.settings else ""
    return f"{point.record.policy}: {point.kind}{lanes}" if point.kind else point.record.policy


def _place(point: DataPoint) -> tuple[object, ...]:
    """Sort key: kind of work, lengths and batches as numbers, full first."""
    cell = point.record.cell.values()
    numbers = [value for value in cell if isinstance(value, int | float)]
    words = [value for value in cell if isinstance(value, str)]
    return point.record.metric, numbers, words, point.record.policy != "full", point.record.policy, _bar_name(point)


def _bars(axes: Axes, points: Sequence[DataPoint], label: str, title: str, tall: int) -> None:
    """One bar per policy and kind of work, relative to full where there is one, labelled with its value."""
    ordered = sorted(points, key=_place)
    styles = line_styles(list(dict.fromkeys(family(point.record.policy) for point in ordered)))
    full = {point.kind: point.value for point in ordered if point.record.policy == "full"}
    relative = all(point.kind in full for point in ordered)
    widest = 0.0
    for place, point in enumerate(reversed(ordered)):
        unit = full[point.kind] if relative else 1.0
        ends = [edge / unit for edge in (point.low, point.high) if edge is not None]
        axes.barh(place, point.value / unit, color=styles[family(point.record.policy)].colour, height=0.7, alpha=0.85)
        axes.hlines(place, *(ends if len(ends) == 2 else (0, 0)), color="#777777", linewidth=1.2)
        right = max([point.value / unit, *ends])
        axes.annotate(
            f"{point.value:,.0f}" if point.value >= 100 else f"{point.value:.3g}",
            (right, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        widest = max(widest, right)
    if relative:
        axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(ordered)), [_bar_name(point) for point in reversed(ordered)])
    axes.set_ylim(len(ordered) - tall - 0.6, len(ordered) - 0.4)  # bars as wide as in the other panel
    axes.set_xlim(0, widest * 1.12)
    thin = "; thin: slowest to fastest run" if ordered[0].low is not None else ""
    axes.set_xlabel(f"times full ({label} beside each bar{thin})" if relative else f"{label}{thin}", fontsize=9)
    axes.set_title(title, fontsize=10)
    hide_spines(axes)
