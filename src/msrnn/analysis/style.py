"""The style of our figures: one colour, marker and dash per policy everywhere, labels beside the lines.

Colours differ in greyscale too, and markers and dashes differ as well. Matplotlib (the extra `plot`) is imported when a
figure is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..eval.record import Record
from ..system.extras import install
from ..system.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class LineStyle(NamedTuple):
    colour: str
    marker: str
    dash: Any
    width: float = 1.5


_STYLES = {
    "full": LineStyle("#000000", "", "--", 1.2),
    "baseline": LineStyle("#8a8a8a", "x", ":"),
    "window": LineStyle("#c9a227", "v", (0, (1, 1))),
    "window+1": LineStyle("#e0a030", "<", (0, (3, 1, 1, 1))),
    "window+4": LineStyle("#d98200", "^", (0, (4, 1.5))),
    "h2o": LineStyle("#2f8f6b", "s", (0, (6, 1.5))),
    "h2o-layer": LineStyle("#7cc4a4", "D", (0, (3, 1, 1, 1))),
    "tova-head": LineStyle("#d77fb4", "P", (0, (4, 1.5, 1, 1.5))),
    "tova": LineStyle("#12427f", "o", "-", 2.2),
    "tova+1": LineStyle("#4d8fcc", "h", (0, (2, 1))),
    "tova+4": LineStyle("#86b9e6", "p", (0, (5, 1, 1, 1, 1, 1))),
    "tova by layer": LineStyle("#b15928", "d", (0, (5, 1)), 1.6),
    "fade": LineStyle("#9b1b1b", "*", "-", 2.0),
    "fade by layer": LineStyle("#6a3d9a", "X", "-", 1.6),
}
_SPARE_STYLES = (
    LineStyle("#444444", "H", (0, (2, 1)), 1.6),
    LineStyle("#1b7f8c", ">", "-", 1.6),
    LineStyle("#a6761d", "8", "-.", 1.6),
    LineStyle("#c2185b", "1", (0, (6, 1, 1, 1)), 1.6),
    LineStyle("#556b2f", "2", (0, (3, 1)), 1.6),
    LineStyle("#5d4037", "3", ":"),
)


# for figures with several policies of one family, which the family's own style would not distinguish
SIZE_STYLES = (
    LineStyle("#12427f", "o", "-"),
    LineStyle("#d98200", "^", (0, (4, 1.5))),
    LineStyle("#2f8f6b", "s", (0, (6, 1.5))),
    LineStyle("#9b1b1b", "D", (0, (3, 1, 1, 1))),
    LineStyle("#86b9e6", "v", (0, (1, 1))),
    LineStyle("#444444", "P", "-."),
    LineStyle("#d77fb4", "X", (0, (5, 1))),
    LineStyle("#7cc4a4", "*", (0, (2, 1))),
)


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """A style for each name: the policy's own, or the next spare one."""
    others = [name for name in names if name not in _STYLES]
    spares = {name: _SPARE_STYLES[index % len(_SPARE_STYLES)] for index, name in enumerate(others)}
    return {name: _STYLES.get(name) or spares[name] for name in names}


def new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib; {install('plot')}") from error
    return Figure((width, height), layout="constrained")  # drawn by Agg, whatever backend the user has


def save_figure(figure: Figure, path: str | Path) -> Path:
    target = Path(path)
    kind = target.suffix[1:] or "png"
    import matplotlib

    # no date and fixed ids: the same records give the same file
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with atomic_write(target) as part, matplotlib.rc_context({"svg.hashsalt": "msrnn"}):
        figure.savefig(part, format=kind, dpi=110, metadata=metadata)
    return target


def hide_spines(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def capacity_axis(axes: Axes, sizes: Sequence[float], label: str = "capacity (tokens per layer)") -> None:
    """A logarithmic axis with a tick at every capacity."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set_xlabel(label, fontsize=9)


def label_lines(axes: Axes, ends: dict[str, tuple[float, float]], styles: dict[str, LineStyle], *, side: str) -> None:
    """Write each line's name beside its end, moved apart where they would overlap, with a thin leader to the line."""
    dpi = axes.figure.dpi
    pixels = {name: axes.transData.transform(end) for name, end in ends.items()}
    low, high = axes.transAxes.transform([(0, 0.02), (0, 1)])[:, 1]
    order = sorted(pixels, key=lambda name: float(pixels[name][1]))
    heights = separate([float(pixels[name][1]) for name in order], 0.13 * dpi, float(low), float(high))
    sign = -1 if side == "left" else 1
    column = sign * max((sign * float(place[0]) for place in pixels.values()), default=0.0)  # labels share a column
    for name, y in zip(order, heights, strict=True):
        across, height = (float(value) for value in pixels[name])
        axes.annotate(
            name, ends[name], (sign * 22 + (column - across) * 72 / dpi, (y - height) * 72 / dpi),
            textcoords="offset points", va="center",
            ha="right" if side == "left" else "left", fontsize=8.5, color=_ink(styles[name].colour),
            fontweight="bold" if styles[name].width > 2 else "normal", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": styles[name].colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3,
                        "relpos": (1 if side == "left" else 0, 0.5)},
        )  # fmt: skip


def separate(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places, moved until neighbours are `gap` apart within low and high, as little as a few rounds allow."""
    adjusted = [min(max(place, low), high) for place in places]
    if len(adjusted) * gap > high - low:
        gap = (high - low) / len(adjusted)
    for _ in range(200):
        for index in range(1, len(adjusted)):
            missing = gap - (adjusted[index] - adjusted[index - 1])
            if missing > 1e-6:
                adjusted[index - 1] -= missing / 2
                adjusted[index] += missing / 2
        adjusted = [min(max(place, low + index * gap * 0.999), high - (len(adjusted) - 1 - index) * gap * 0.999)
                 for index, place in enumerate(adjusted)]  # fmt: skip
    return adjusted


def _ink(colour: str) -> tuple[float, ...]:
    """The colour dark enough to read as text."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    bright = 0.3 * red + 0.59 * green + 0.11 * blue
    scale = min(1.0, 0.42 / max(bright, 1e-6))
    return (red * scale, green * scale, blue * scale)


def plain_log_ticks(axes: Axes) -> None:
    """A logarithmic axis with plain numbers, about six of them."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    ticks = [base * 10.0**power for power in range(-3, 7) for base in steps]
    if high / low < 2:
        ticks = list(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high))
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def add_title(figure: Figure, records: Sequence[Record], title: str) -> None:
    """The title, and the conditions below it; the layout is then fixed, so that labels can be placed."""
    figure.suptitle(f"{title}\n", fontsize=12)
    below = 1 - 0.3 / figure.get_figheight()
    figure.text(0.5, below, conditions(records), ha="center", va="top", fontsize=8.5, color="#444444")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def conditions(records: Sequence[Record]) -> str:
    """Model, dtype, texts and machine, in one line."""
    if not records:
        return ""
    parts = [", ".join(sorted({f"{one.model} ({one.dtype})" for one in records}))]
    groups = sorted({one.groups for one in records if one.groups})
    counts = sorted({one.samples for one in records})
    if groups and groups[-1] > 1:
        texts = f"{_span(counts)} samples of {_span(groups)}" if records[0].task != "retention" else groups[-1]
        parts.append(f"{texts} texts")
    parts.append(", ".join(_machines(records)))
    gates = [str(one.settings["gate"]) for one in records if "gate" in one.settings]
    if len(set(gates)) == 1:
        parts.append(f"check of the kernels: {gates[0]}")
    elif gates:
        passed = sum(gate.endswith("checks passed") for gate in gates)
        parts.append(f"the kernels were checked just before {passed} of {len(gates)} figures, see the table")
    return " · ".join(parts)


def _machines(records: Sequence[Record]) -> list[str]:
    """Without those that another name only says more of: older records of a GPU do not name the CPU."""
    names = sorted({one.machine for one in records})
    return [name for name in names if not any(other.startswith(f"{name}, ") for other in names)]


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
