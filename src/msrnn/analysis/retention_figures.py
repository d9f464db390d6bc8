"""Figures of retention records: which tokens stay by layer, by age and by word class; how far layers agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..eval.record import Record
from . import paper
from .policy_names import family, short_name
from .records import select
from .style import SIZE_STYLES, LineStyle, add_title, hide_spines, label_lines, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEWEST = 20  # tokens of a class, below which its mean says little
_CLASSES = 26
_POLICIES = 6  # in one picture
MEANING = {
    "''": "closing quote", "``": "opening quote", "POS": "possessive 's", "NNP": "name", "NNPS": "names",
    "NN": "noun", "NNS": "nouns", "DT": "the, a", "TO": "to", "IN": "preposition", "CC": "and, or", "PRP": "pronoun",
    "PRP$": "his, her", "RB": "adverb", "JJ": "adjective", "VB": "verb", "VBD": "verb, past", "VBG": "verb, -ing",
    "VBN": "participle", "VBP": "verb, now", "VBZ": "verb, -s", "MD": "can, will", "CD": "number", ".": "full stop",
    ",": "comma", ":": "colon, dash", "(": "bracket", ")": "bracket", "$": "dollar", "WRB": "when, how",
    "WP": "who, what", "WDT": "which", "RP": "particle", "EX": "there", "UH": "oh", "JJR": "comparative",
    "JJS": "superlative", "RBR": "adverb, -er", "RBS": "adverb, -est", "PDT": "all, both", "FW": "foreign word",
    "#": "hash", "WP$": "whose", "LS": "list mark", "SYM": "symbol", "newline": "line break",
}  # fmt: skip


def retention_curves(records: Sequence[Record], path: str | Path) -> Path:
    """Recent share by layer, survival by age, and how agreement falls with the distance between layers."""
    subset, note = _first_policies(select(_with_short_names(records), "retention"))
    styles = _policy_looks(list(dict.fromkeys(one.policy for one in subset)))
    figure = new_figure(13, 4.6)
    panels = figure.subplots(1, 3)
    ends = [
        _by(panels[0], subset, styles, "recent share", "layer"),
        _by(panels[1], subset, styles, "held by age", "age"),
        _by(panels[2], subset, styles, "agreement of layers on older tokens", "distance"),
    ]
    panels[0].set(xlabel="layer", ylabel="share of the state")
    panels[0].set_title("recent: what a window of the same size would hold", fontsize=9.5)
    panels[1].set(xlabel="steps since the token came", ylabel="share of tokens still held", xscale="log")
    panels[1].set_title("survival by age", fontsize=9.5)
    panels[2].set(xlabel="distance between two layers", ylabel="older tokens held by both, of either's")
    panels[2].set_title("agreement of layers on older tokens", fontsize=9.5)
    for axes in panels:
        axes.set_ylim(0, 1.02)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
        hide_spines(axes)
    add_title(figure, subset, f"Which tokens stay{note}")
    _widen(panels[0], 1.6)
    _widen(panels[2], 1.6)
    panels[1].set_xlim(right=panels[1].get_xlim()[1] ** 1.5)
    for axes, rows in zip(panels, ends, strict=True):
        if rows:
            label_lines(axes, rows, styles, side="right")
    return save_figure(figure, path)


def _with_short_names(records: Sequence[Record]) -> list[Record]:
    """Records with the policy names that tables use."""
    return [replace(one, policy=short_name(one.policy)) for one in records]


def _first_policies(rows: Sequence[Record]) -> tuple[list[Record], str]:
    """Records of as many policies as a figure can show, TOVA's first, then profiles; and a note on the others."""
    sizes = {one.policy: one.capacity or 0 for one in rows}
    ranked = sorted(sizes, key=lambda name: (family(name) != "tova", " by " not in name, family(name), sizes[name]))
    names = ranked[:_POLICIES]
    note = f" ({len(names)} of {len(ranked)} policies; all are in the table)" if len(ranked) > _POLICIES else ""
    subset = [one for one in rows if one.policy in names]
    return sorted(subset, key=lambda one: names.index(one.policy)), note


def _widen(axes: Axes, factor: float) -> None:
    """Make room for labels to the right of the lines, without ticks."""
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    axes.set_xlim(low, low + (high - low) * factor)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _policy_looks(policies: Sequence[str]) -> dict[str, LineStyle]:
    """One style per policy and size: the family's colour would not distinguish sizes."""
    return {name: SIZE_STYLES[index % len(SIZE_STYLES)] for index, name in enumerate(policies)}


def _by(
    axes: Axes, subset: Sequence[Record], styles: dict[str, LineStyle], metric: str, place: str
) -> dict[str, tuple[float, float]]:
    """One line per policy; returns the end of each."""
    ends = {}
    for policy, style in styles.items():
        rows = [one for one in subset if one.policy == policy and one.metric == metric and place in one.cell]
        points = sorted((float(one.cell[place]), one.value) for one in rows)
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=style.colour, linestyle=style.dash, linewidth=style.width, marker=style.marker,
                      markersize=4, markevery=max(1, len(x) // 10))  # fmt: skip
            ends[policy] = points[-1]
    return ends


def word_class_figure(records: Sequence[Record], path: str | Path) -> Path:
    """Mean steps kept by word class, longest first, one mark per policy; the paper's where it has them."""
    records = _with_short_names(records)
    rows = [one for one in select(records, "retention", "steps kept") if "class" in one.cell]
    subset, note = _first_policies(rows)
    policies = list(dict.fromkeys(one.policy for one in subset))
    styles = _policy_looks(policies)
    classes = ranked_classes(subset)[:_CLASSES]
    figure = new_figure(9.5, 1.5 + 0.27 * len(classes))
    axes = figure.subplots()
    for index, name in enumerate(reversed(classes)):
        axes.axhline(index, color="#e4e4e4", linewidth=0.7, zorder=0)
        for policy, style in styles.items():
            _mark(axes, [one for one in subset if one.policy == policy and one.cell["class"] == name], index, style)
    _mean_lines(axes, records, styles)
    _paper_marks(axes, subset, list(reversed(classes)), styles)
    axes.set_yticks(range(len(classes)), [_label(name) for name in reversed(classes)])
    axes.set_ylim(-0.6, len(classes) + 0.2)
    axes.set_xscale("log")
    axes.set_xlabel("mean steps kept", fontsize=9)
    _plain_ticks(axes)
    hide_spines(axes)
    _legend(figure, styles, subset)
    add_title(figure, select(records, "retention", "steps kept"), f"How long each word class is kept{note}")
    return save_figure(figure, path)


def ranked_classes(subset: Sequence[Record]) -> list[str]:
    """Classes with enough tokens, longest kept first, by their mean over all policies."""
    policies = {one.policy for one in subset}
    ranks: dict[str, list[float]] = {}
    for policy in policies:
        own = [one for one in subset if one.policy == policy and one.samples >= _FEWEST]
        whole = sum(one.value * one.samples for one in own) / max(1, sum(one.samples for one in own))
        for one in own:
            ranks.setdefault(str(one.cell["class"]), []).append(one.value / whole)
    return sorted(ranks, key=lambda name: -sum(ranks[name]) / len(ranks[name]))


def _label(name: str) -> str:
    meaning = MEANING.get(name)
    return f"{meaning}  {name}" if meaning and name != "newline" else meaning or name


def _mark(axes: Axes, rows: Sequence[Record], height: float, styles: LineStyle) -> None:
    for one in rows:
        if one.low is not None and one.high is not None:
            axes.hlines(height, one.low, one.high, color=styles.colour, linewidth=1, alpha=0.6)
        axes.plot(one.value, height, marker=styles.marker, color=styles.colour, markersize=6, linestyle="")


def _mean_lines(axes: Axes, records: Sequence[Record], styles: dict[str, LineStyle]) -> None:
    """The mean over all tokens of every policy; of means close together only the largest is labelled."""
    rows = [one for one in select(records, "retention", "steps kept") if one.policy in styles and not one.cell]
    means = {one.policy: one.value for one in rows}
    for policy, value in means.items():
        style = styles[policy]
        axes.axvline(value, color=style.colour, linewidth=0.9, linestyle=style.dash, zorder=0)
        if not any(value < other < 1.15 * value for other in means.values()):
            axes.annotate("mean", (value, 1), (2, 0), xycoords=("data", "axes fraction"), fontsize=7, va="top",
                          textcoords="offset points", color=style.colour)  # fmt: skip


def _paper_marks(axes: Axes, subset: Sequence[Record], classes: Sequence[str], styles: dict[str, LineStyle]) -> None:
    """Hollow marks, where the paper has the class at one of our capacities."""
    samples = {one.policy: one for one in subset}
    for height, name in enumerate(classes):
        for policy, one in samples.items():
            value = paper.steps_kept(name, one)
            if value is not None:
                axes.plot(value, height, marker=styles[policy].marker, markersize=8, markerfacecolor="none",
                          color=styles[policy].colour, linestyle="")  # fmt: skip


def _plain_ticks(axes: Axes) -> None:
    low, high = axes.get_xlim()
    ticks = [base * 10**power for power in range(5) for base in (1, 2, 5) if low <= base * 10**power <= high]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()


def _legend(figure: object, styles: dict[str, LineStyle], subset: Sequence[Record]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], marker=style.marker, color=style.colour, linestyle="", label=name)
               for name, style in styles.items()]  # fmt: skip
    if any(paper.steps_kept("all", one) for one in subset):
        handles.append(Line2D([], [], marker="o", markerfacecolor="none", color="#555555", linestyle="",
                              label=f"hollow: the paper's ({paper.MODEL})"))  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)  # type: ignore[attr-defined]
