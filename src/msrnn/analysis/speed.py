"""Speed and memory by capacity; where only one capacity was measured, as bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..eval.record import Record
from .records import chosen, family
from .style import Look, head, looks, name_lines, new_figure, plain, save_figure, size_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

MIB = 2**20
_WORK = {"table": "writing, largest batch", "largest": "writing, largest batch", "same": "writing", "step": "writing",
         "decode": "writing", "prefill": "reading"}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """One number to draw. `kind` is the work that was timed; marks of one kind and family make a line."""

    record: Record
    value: float
    kind: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def line(self) -> str:
        name = family(self.record.policy)
        return f"{name} ({self.kind})" if self.kind else name


Panel = tuple[Sequence[Mark], str, str]  # marks, what they count, a title


def throughput_and_memory(records: Sequence[Record], path: str | Path) -> Path:
    """Tokens per second and memory, from whatever was timed: by capacity what has several, as bars what has not."""
    timed, held = _comparable(speeds(records)), _comparable(memory(records))
    kinds = {mark.kind for line in _by_line(timed).values() if len(_sizes(line)) > 2 for mark in line}
    curves = [mark for mark in timed if mark.kind in kinds]
    bars = [mark for mark in timed if mark.kind not in kinds]
    by_capacity = bool(curves) or len(_sizes(held)) > 2
    curves, shared = _shorter(curves)
    beside = [(curves if by_capacity else bars, "tokens per second", f"speed{shared}")]
    panels = [panel for panel in (*beside, (held, "MiB", memory_title(records))) if panel[0]]
    figure = _by_capacity(panels, bars) if by_capacity else _as_bars(panels)
    head(figure, [mark.record for marks, _, _ in panels for mark in marks], "Speed and memory")
    for axes, (marks, _, _) in zip(figure.axes, panels if by_capacity else (), strict=False):
        _name(axes, _multiples(marks)[0])  # once the heading has its room
    return save_figure(figure, path)


def _shorter(marks: Sequence[Mark]) -> tuple[list[Mark], str]:
    """The marks without the words that all kinds of work share, and those words."""
    kinds = list(dict.fromkeys(mark.kind for mark in marks))
    shared = [
        word for word in (kinds[0] if kinds else "").split(", ") if all(word in kind.split(", ") for kind in kinds)
    ]
    if len(kinds) < 2 or not shared:
        return list(marks), ""
    short = {kind: ", ".join(word for word in kind.split(", ") if word not in shared) for kind in kinds}
    return [replace(mark, kind=short[mark.kind]) for mark in marks], f" ({', '.join(shared)})"


def _as_bars(panels: Sequence[Panel]) -> MatplotlibFigure:
    tall = max(len(marks) for marks, _, _ in panels)
    figure = new_figure(1 + 8 * len(panels), 1.3 + 0.28 * tall)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _bars(axes, *panel, tall)
    return figure


def _by_capacity(panels: Sequence[Panel], bars: Sequence[Mark]) -> MatplotlibFigure:
    """Curves beside each other; below them, as wide as all, what was measured at few capacities."""
    below = 0.7 + 0.28 * len(bars) if bars else 0
    figure = new_figure(1 + 5.4 * len(panels), 4.4 + below)
    grid = figure.add_gridspec(2 if bars else 1, len(panels), height_ratios=[4.4, below] if bars else None)
    for place, panel in enumerate(panels):
        _lines(figure.add_subplot(grid[0, place]), *panel)
    if bars:
        _bars(figure.add_subplot(grid[1, :]), bars, "tokens per second", "at one or two capacities", len(bars))
    return figure


def speeds(records: Iterable[Record]) -> list[Mark]:
    """As recorded, or, where nothing was timed for its own sake, of reading, from the seconds of a run."""
    found = [one for one in records if not str(one.settings.get("gate", "")).startswith("FAILED")]
    timed = [Mark(one, one.value, _kind(one), one.low, one.high) for one in found if one.metric.endswith("tokens/s")]
    if timed:
        return timed
    return [
        Mark(one, sum(part["tokens"] for part in one.parts.values()) / one.seconds)
        for one in _read(found)
        if one.seconds > 0
    ]


def _kind(record: Record) -> str:
    """The work in words, one for both of our benchmarks."""
    name = record.metric.removesuffix(" tokens/s")
    told = [_WORK.get(name, name)]
    for field, value in record.cell.items():
        told.append(f"{value:,} tokens" if field in ("context", "length") else f"{field} {value}")
    return ", ".join(told)


def memory(records: Iterable[Record]) -> list[Mark]:
    """The bytes of a state where they were recorded, else how far a run's memory rose."""
    found = list(records)
    states = [Mark(one, one.value / MIB) for one in found if one.metric == "state bytes"]
    return states or [Mark(one, one.peak_bytes / MIB) for one in _read(found) if one.peak_bytes]


def memory_title(records: Iterable[Record]) -> str:
    own = any(one.metric == "state bytes" for one in records)
    return "memory of one sequence's state" if own else "memory above the loaded model, at its peak"


def _read(records: Iterable[Record]) -> list[Record]:
    found = chosen(records, "pg19", "perplexity")
    return [one for one in found if not one.cell and family(one.policy) != "baseline"]


def _sizes(marks: Iterable[Mark]) -> list[float]:
    return sorted({mark.record.capacity for mark in marks if mark.record.capacity})


def _by_line(marks: Iterable[Mark]) -> dict[str, list[Mark]]:
    lines: dict[str, list[Mark]] = {}
    for mark in sorted(marks, key=lambda mark: mark.record.capacity or 0):
        lines.setdefault(mark.line, []).append(mark)
    return lines


def _look_of(names: Iterable[str]) -> dict[str, Look]:
    """A line has the look of its family; other kinds of work of one family have other dashes."""
    known = looks(list(dict.fromkeys(name.split(" (")[0] for name in names)))
    dashes = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 1, 1, 1)), (0, (1, 1)))
    made: dict[str, Look] = {}
    for name in names:
        own = name.split(" (")[0]
        before = sum(other.split(" (")[0] == own for other in made)
        made[name] = known[own] if " (" not in name else known[own]._replace(dash=dashes[before % len(dashes)])
    return made


def _multiples(marks: Sequence[Mark]) -> tuple[list[Mark], bool]:
    """The marks as multiples of full's, where every kind of work has one: then full is 1 and stands for itself."""
    full = {mark.kind: mark.value for mark in marks if mark.record.policy == "full" and mark.kind}
    if not full or any(mark.kind not in full for mark in marks):
        return list(marks), False
    others = (mark for mark in marks if mark.record.policy != "full")
    return [replace(mark, value=mark.value / full[mark.kind]) for mark in others], True


def _lines(axes: Axes, marks: Sequence[Mark], label: str, title: str) -> None:
    marks, relative = _multiples(marks)
    lines = _by_line(marks)
    levels = {"full": 1.0} if relative else {}
    for name, look in _look_of(lines).items():
        levels.update((name, mark.value) for mark in lines[name] if not mark.record.capacity)
        sized = [(mark.record.capacity, mark.value) for mark in lines[name] if mark.record.capacity]
        if sized:
            axes.plot(*zip(*sized, strict=True), color=look.colour, linestyle=look.dash, linewidth=look.width,
                      marker=look.marker, markersize=5)  # fmt: skip
    for name, value in levels.items():
        axes.axhline(value, color="black", linestyle="--", linewidth=1)
        axes.annotate(name, (1, value), (0, 3), xycoords=("axes fraction", "data"), fontsize=8,
                      textcoords="offset points", ha="right")  # fmt: skip
    size_axis(axes, _sizes(marks))
    axes.set_xlim(_sizes(marks)[0] / 10, _sizes(marks)[-1] * 1.3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{label}, times full" if relative else label, fontsize=9)
    axes.set_title(title, fontsize=10)
    plain(axes)


def _name(axes: Axes, marks: Sequence[Mark]) -> None:
    lines = _by_line(mark for mark in marks if mark.record.capacity)
    ends = {name: (float(found[0].record.capacity or 0), found[0].value) for name, found in lines.items()}
    name_lines(axes, ends, _look_of(lines), side="left")


def _comparable(marks: Sequence[Mark]) -> list[Mark]:
    """The kinds of work that full and others have done, if there are any, each bar once; all else is in the table."""
    full = {mark.kind for mark in marks if mark.record.policy == "full"}
    both = full & {mark.kind for mark in marks if mark.record.policy != "full"}
    kept = [mark for mark in marks if mark.kind in (both or full)] or list(marks)
    latest = {_bar_name(mark): mark for mark in sorted(kept, key=lambda mark: mark.record.date)}
    return list(latest.values())


def _bar_name(mark: Mark) -> str:
    lanes = ", wavefront" if "lanes" in mark.record.settings else ""
    return f"{mark.record.policy}: {mark.kind}{lanes}" if mark.kind else mark.record.policy


def _place(mark: Mark) -> tuple[object, ...]:
    """By the kind of work, lengths and batches as numbers; full first."""
    cell = mark.record.cell.values()
    numbers = [value for value in cell if isinstance(value, int | float)]
    words = [value for value in cell if isinstance(value, str)]
    return mark.record.metric, numbers, words, mark.record.policy != "full", mark.record.policy, _bar_name(mark)


def _bars(axes: Axes, marks: Sequence[Mark], label: str, title: str, tall: int) -> None:
    """One bar for each policy and kind of work, as a multiple of full's where there is one, with its number."""
    ordered = sorted(marks, key=_place)
    look = looks(list(dict.fromkeys(family(mark.record.policy) for mark in ordered)))
    full = {mark.kind: mark.value for mark in ordered if mark.record.policy == "full"}
    relative = all(mark.kind in full for mark in ordered)
    most = 0.0
    for place, mark in enumerate(reversed(ordered)):
        unit = full[mark.kind] if relative else 1.0
        ends = [edge / unit for edge in (mark.low, mark.high) if edge is not None]
        axes.barh(place, mark.value / unit, color=look[family(mark.record.policy)].colour, height=0.7, alpha=0.85)
        axes.hlines(place, *(ends if len(ends) == 2 else (0, 0)), color="#777777", linewidth=1.2)
        far = max([mark.value / unit, *ends])
        axes.annotate(
            f"{mark.value:,.0f}" if mark.value >= 100 else f"{mark.value:.3g}",
            (far, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        most = max(most, far)
    if relative:
        axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(ordered)), [_bar_name(mark) for mark in reversed(ordered)])
    axes.set_ylim(len(ordered) - tall - 0.6, len(ordered) - 0.4)  # bars as wide as in the panel beside
    axes.set_xlim(0, most * 1.12)
    thin = "; thin: slowest to fastest run" if ordered[0].low is not None else ""
    axes.set_xlabel(f"times full ({label} beside each bar{thin})" if relative else f"{label}{thin}", fontsize=9)
    axes.set_title(title, fontsize=10)
    plain(axes)
