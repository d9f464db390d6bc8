"""How our figures look: one colour, marker and dash per policy everywhere, names beside the lines, no legend to search.

Colours are apart in grey as well, and no line is told from another by its colour alone. Matplotlib is imported when
something is drawn (the extra `plot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..eval.record import Record
from ..system.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Look(NamedTuple):
    colour: str
    marker: str
    dash: Any
    width: float = 1.5


_LOOKS = {
    "full": Look("#000000", "", "--", 1.2),
    "baseline": Look("#8a8a8a", "x", ":"),
    "window": Look("#c9a227", "v", (0, (1, 1))),
    "window+1": Look("#e0a030", "<", (0, (3, 1, 1, 1))),
    "window+4": Look("#d98200", "^", (0, (4, 1.5))),
    "h2o": Look("#2f8f6b", "s", (0, (6, 1.5))),
    "h2o-layer": Look("#7cc4a4", "D", (0, (3, 1, 1, 1))),
    "tova-head": Look("#d77fb4", "P", (0, (4, 1.5, 1, 1.5))),
    "tova": Look("#12427f", "o", "-", 2.2),
    "tova+1": Look("#4d8fcc", "h", (0, (2, 1))),
    "tova+4": Look("#86b9e6", "p", (0, (5, 1, 1, 1, 1, 1))),
    "tova by layer": Look("#b15928", "d", (0, (5, 1)), 1.6),
    "fade": Look("#9b1b1b", "*", "-", 2.0),
    "fade by layer": Look("#6a3d9a", "X", "-", 1.6),
}
_SPARE = (
    Look("#444444", "H", (0, (2, 1)), 1.6), Look("#1b7f8c", ">", "-", 1.6), Look("#a6761d", "8", "-.", 1.6),
    Look("#c2185b", "1", (0, (6, 1, 1, 1)), 1.6), Look("#556b2f", "2", (0, (3, 1)), 1.6), Look("#5d4037", "3", ":"),
)  # fmt: skip


# where policies of one family stand in one picture, so that the family's own look would not tell them apart
SIZE_LOOKS = (
    Look("#12427f", "o", "-"), Look("#d98200", "^", (0, (4, 1.5))), Look("#2f8f6b", "s", (0, (6, 1.5))),
    Look("#9b1b1b", "D", (0, (3, 1, 1, 1))), Look("#86b9e6", "v", (0, (1, 1))), Look("#444444", "P", "-."),
    Look("#d77fb4", "X", (0, (5, 1))), Look("#7cc4a4", "*", (0, (2, 1))),
)  # fmt: skip


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name: the policy's own, or the next that nobody has."""
    strangers = [name for name in names if name not in _LOOKS]
    spare = {name: _SPARE[index % len(_SPARE)] for index, name in enumerate(strangers)}
    return {name: _LOOKS.get(name) or spare[name] for name in names}


def new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'msrnn[plot]'") from error
    return Figure((width, height), layout="constrained")  # drawn by Agg, whatever backend the user has


def save_figure(figure: Figure, path: str | Path) -> Path:
    target = Path(path)
    kind = target.suffix[1:] or "png"
    import matplotlib

    # without a date and with names of its own: the same records give the same file
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with replacing(target) as part, matplotlib.rc_context({"svg.hashsalt": "msrnn"}):
        figure.savefig(part, format=kind, dpi=110, metadata=dated)
    return target


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def size_axis(axes: Axes, sizes: Sequence[float], label: str = "capacity (tokens kept per layer)") -> None:
    """A logarithmic axis with a tick at every capacity."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set_xlabel(label, fontsize=9)


def name_lines(axes: Axes, ends: dict[str, tuple[float, float]], look: dict[str, Look], *, side: str) -> None:
    """Write each line's name beside its end, pushed apart where they would touch, with a thin leader to the line."""
    dpi = axes.figure.dpi
    shown = {name: axes.transData.transform(end) for name, end in ends.items()}
    low, high = axes.transAxes.transform([(0, 0.02), (0, 1)])[:, 1]
    order = sorted(shown, key=lambda name: float(shown[name][1]))
    wanted = apart([float(shown[name][1]) for name in order], 0.13 * dpi, float(low), float(high))
    way = -1 if side == "left" else 1
    column = way * max((way * float(place[0]) for place in shown.values()), default=0.0)  # names stand in one column
    for name, y in zip(order, wanted, strict=True):
        across, own = (float(value) for value in shown[name])
        axes.annotate(
            name, ends[name], (way * 22 + (column - across) * 72 / dpi, (y - own) * 72 / dpi),
            textcoords="offset points", va="center",
            ha="right" if side == "left" else "left", fontsize=8.5, color=_ink(look[name].colour),
            fontweight="bold" if look[name].width > 2 else "normal", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": look[name].colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3,
                        "relpos": (1 if side == "left" else 0, 0.5)},
        )  # fmt: skip


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising places moved as little as a few rounds allow, so that neighbours are `gap` apart within low and high."""
    moved = [min(max(place, low), high) for place in places]
    if len(moved) * gap > high - low:
        gap = (high - low) / len(moved)
    for _ in range(200):
        for index in range(1, len(moved)):
            lacking = gap - (moved[index] - moved[index - 1])
            if lacking > 1e-6:
                moved[index - 1] -= lacking / 2
                moved[index] += lacking / 2
        moved = [min(max(place, low + index * gap * 0.999), high - (len(moved) - 1 - index) * gap * 0.999)
                 for index, place in enumerate(moved)]  # fmt: skip
    return moved


def _ink(colour: str) -> tuple[float, ...]:
    """The colour dark enough to read as text."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    bright = 0.3 * red + 0.59 * green + 0.11 * blue
    scale = min(1.0, 0.42 / max(bright, 1e-6))
    return (red * scale, green * scale, blue * scale)


def plain_log(axes: Axes) -> None:
    """A logarithmic axis with plain numbers, about six of them."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    ticks = [base * 10.0**power for power in range(-3, 7) for base in steps]
    if high / low < 2:
        ticks = list(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high))
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(shown))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])


def head(figure: Figure, found: Sequence[Record], title: str) -> None:
    """The title, and under it what was measured on what; then the layout is settled, and names find their places."""
    figure.suptitle(f"{title}\n", fontsize=12)
    below = 1 - 0.3 / figure.get_figheight()
    figure.text(0.5, below, conditions(found), ha="center", va="top", fontsize=8.5, color="#444444")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def conditions(found: Sequence[Record]) -> str:
    """Model, number type, texts and machine, in one line."""
    if not found:
        return ""
    parts = [", ".join(sorted({f"{one.model} ({one.dtype})" for one in found}))]
    groups = sorted({one.groups for one in found if one.groups})
    counts = sorted({one.samples for one in found})
    if groups and groups[-1] > 1:
        many = f"{_span(counts)} samples of {_span(groups)}" if found[0].task != "retention" else groups[-1]
        parts.append(f"{many} texts")
    parts.append(", ".join(sorted({one.machine for one in found})))
    gates = [str(one.settings["gate"]) for one in found if "gate" in one.settings]
    if len(set(gates)) == 1:
        parts.append(f"check of the kernels: {gates[0]}")
    elif gates:
        passed = sum(gate.endswith("checks passed") for gate in gates)
        parts.append(f"the kernels were checked just before {passed} of {len(gates)} figures, see the table")
    return " · ".join(parts)


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
