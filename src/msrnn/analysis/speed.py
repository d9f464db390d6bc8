"""Speed and memory by capacity; where only one capacity was measured, as bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..eval.record import Record
from .records import chosen, family
from .style import Look, head, looks, name_lines, new_figure, plain, save_figure, size_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20


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


def throughput_and_memory(records: Sequence[Record], path: str | Path) -> Path:
    """Tokens per second and memory, from whatever was timed."""
    panels = [(speeds(records), "tokens per second", "speed"), (memory(records), "MiB", memory_title(records))]
    shown = [panel for panel in panels if panel[0]]
    flat = all(len(_sizes(line)) < 3 for marks, _, _ in shown for line in _by_line(marks).values())
    tall = max(len(_comparable(marks)) for marks, _, _ in shown) if flat else 0
    figure = new_figure(1 + (8 if flat else 5.4) * len(shown), 1.3 + 0.28 * tall if flat else 4.4)
    axes_of = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (marks, label, title) in zip(axes_of, shown, strict=True):
        if flat:
            _bars(axes, marks, label, tall)
        else:
            _lines(axes, marks, label)
        axes.set_title(title, fontsize=10)
        plain(axes)
    head(figure, [mark.record for marks, _, _ in shown for mark in marks], "Speed and memory")
    if not flat:
        for axes, (marks, _, _) in zip(axes_of, shown, strict=True):
            _name(axes, marks)
    return save_figure(figure, path)


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
    where = "".join(f", {name} {value}" for name, value in record.cell.items())
    return record.metric.removesuffix(" tokens/s") + where


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


def _lines(axes: Axes, marks: Sequence[Mark], label: str) -> None:
    lines = _by_line(marks)
    for name, look in _look_of(lines).items():
        for mark in lines[name]:
            if not mark.record.capacity:
                axes.axhline(mark.value, color="black", linestyle=look.dash, linewidth=1)
                axes.annotate(name, (1, mark.value), (0, 3), xycoords=("axes fraction", "data"), fontsize=8,
                              textcoords="offset points", ha="right")  # fmt: skip
        sized = [(mark.record.capacity, mark.value) for mark in lines[name] if mark.record.capacity]
        if sized:
            axes.plot(*zip(*sized, strict=True), color=look.colour, linestyle=look.dash, linewidth=look.width,
                      marker=look.marker, markersize=5)  # fmt: skip
    size_axis(axes, _sizes(marks))
    axes.set_xlim(_sizes(marks)[0] / 4.5, _sizes(marks)[-1] * 1.3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label, fontsize=9)


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
    numbers = [value for value in mark.record.cell.values() if isinstance(value, int | float)]
    return mark.record.metric, numbers, mark.record.policy != "full", mark.record.policy, _bar_name(mark)


def _bars(axes: Axes, marks: Sequence[Mark], label: str, tall: int) -> None:
    """One bar for each policy and kind of work, as a multiple of full's where there is one, with its number."""
    marks = _comparable(marks)
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
