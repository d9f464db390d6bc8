"""Which tokens stay, drawn from records: by layer, by age, by word class; and how far layers agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..eval.record import Record
from . import paper
from .records import brief, chosen, family
from .style import SIZE_LOOKS, Look, head, name_lines, new_figure, plain, save_figure

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
    mine, left_out = _few(chosen(_named(records), "retention"))
    look = _policy_looks(list(dict.fromkeys(one.policy for one in mine)))
    figure = new_figure(13, 4.6)
    panels = figure.subplots(1, 3)
    ends = [
        _by(panels[0], mine, look, "recent share", "layer"),
        _by(panels[1], mine, look, "held by age", "age"),
        _by(panels[2], mine, look, "agreement of layers on older tokens", "distance"),
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
        plain(axes)
    head(figure, mine, f"Which tokens stay{left_out}")
    _widen(panels[0], 1.6)
    _widen(panels[2], 1.6)
    panels[1].set_xlim(right=panels[1].get_xlim()[1] ** 1.5)
    for axes, found in zip(panels, ends, strict=True):
        if found:
            name_lines(axes, found, look, side="right")
    return save_figure(figure, path)


def _named(records: Sequence[Record]) -> list[Record]:
    """Policies by the names that tables give them."""
    return [replace(one, policy=brief(one.policy)) for one in records]


def _few(found: Sequence[Record]) -> tuple[list[Record], str]:
    """Records of as many policies as can be told apart, TOVA's first, then profiles; and what to say of the others."""
    sizes = {one.policy: one.capacity or 0 for one in found}
    ranked = sorted(sizes, key=lambda name: (family(name) != "tova", " by " not in name, family(name), sizes[name]))
    shown = ranked[:_POLICIES]
    said = f" ({len(shown)} of {len(ranked)} policies; all are in the table)" if len(ranked) > _POLICIES else ""
    mine = [one for one in found if one.policy in shown]
    return sorted(mine, key=lambda one: shown.index(one.policy)), said


def _widen(axes: Axes, factor: float) -> None:
    """Room for names to the right of the lines, without ticks."""
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    axes.set_xlim(low, low + (high - low) * factor)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _policy_looks(policies: Sequence[str]) -> dict[str, Look]:
    """By policy and size together: the family's colour would not tell sizes apart."""
    return {name: SIZE_LOOKS[index % len(SIZE_LOOKS)] for index, name in enumerate(policies)}


def _by(
    axes: Axes, mine: Sequence[Record], look: dict[str, Look], metric: str, place: str
) -> dict[str, tuple[float, float]]:
    """One line per policy; where each ends."""
    ends = {}
    for policy, style in look.items():
        found = [one for one in mine if one.policy == policy and one.metric == metric and place in one.cell]
        points = sorted((float(one.cell[place]), one.value) for one in found)
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=style.colour, linestyle=style.dash, linewidth=style.width, marker=style.marker,
                      markersize=4, markevery=max(1, len(x) // 10))  # fmt: skip
            ends[policy] = points[-1]
    return ends


def words_kept(records: Sequence[Record], path: str | Path) -> Path:
    """Mean steps kept by word class, most kept first, one mark per policy; the paper's where it gives them."""
    records = _named(records)
    found = [one for one in chosen(records, "retention", "steps kept") if "class" in one.cell]
    mine, left_out = _few(found)
    policies = list(dict.fromkeys(one.policy for one in mine))
    look = _policy_looks(policies)
    classes = ranked_classes(mine)[:_CLASSES]
    figure = new_figure(9.5, 1.5 + 0.27 * len(classes))
    axes = figure.subplots()
    for index, name in enumerate(reversed(classes)):
        axes.axhline(index, color="#e4e4e4", linewidth=0.7, zorder=0)
        for policy, style in look.items():
            _mark(axes, [one for one in mine if one.policy == policy and one.cell["class"] == name], index, style)
    _mean_lines(axes, records, look)
    _paper_marks(axes, mine, list(reversed(classes)), look)
    axes.set_yticks(range(len(classes)), [_label(name) for name in reversed(classes)])
    axes.set_ylim(-0.6, len(classes) + 0.2)
    axes.set_xscale("log")
    axes.set_xlabel("mean steps kept", fontsize=9)
    _plain_ticks(axes)
    plain(axes)
    _legend(figure, look, mine)
    head(figure, chosen(records, "retention", "steps kept"), f"How long each word class is kept{left_out}")
    return save_figure(figure, path)


def ranked_classes(mine: Sequence[Record]) -> list[str]:
    """Classes with tokens enough, the longest kept first, by their rank over all policies."""
    policies = {one.policy for one in mine}
    ranks: dict[str, list[float]] = {}
    for policy in policies:
        own = [one for one in mine if one.policy == policy and one.samples >= _FEWEST]
        whole = sum(one.value * one.samples for one in own) / max(1, sum(one.samples for one in own))
        for one in own:
            ranks.setdefault(str(one.cell["class"]), []).append(one.value / whole)
    return sorted(ranks, key=lambda name: -sum(ranks[name]) / len(ranks[name]))


def _label(name: str) -> str:
    said = MEANING.get(name)
    return f"{said}  {name}" if said and name != "newline" else said or name


def _mark(axes: Axes, found: Sequence[Record], height: float, look: Look) -> None:
    for one in found:
        if one.low is not None and one.high is not None:
            axes.hlines(height, one.low, one.high, color=look.colour, linewidth=1, alpha=0.6)
        axes.plot(one.value, height, marker=look.marker, color=look.colour, markersize=6, linestyle="")


def _mean_lines(axes: Axes, records: Sequence[Record], look: dict[str, Look]) -> None:
    """The mean over all tokens of every policy; of means that lie close together the largest is named."""
    found = [one for one in chosen(records, "retention", "steps kept") if one.policy in look and not one.cell]
    means = {one.policy: one.value for one in found}
    for policy, value in means.items():
        style = look[policy]
        axes.axvline(value, color=style.colour, linewidth=0.9, linestyle=style.dash, zorder=0)
        if not any(value < other < 1.15 * value for other in means.values()):
            axes.annotate("mean", (value, 1), (2, 0), xycoords=("data", "axes fraction"), fontsize=7, va="top",
                          textcoords="offset points", color=style.colour)  # fmt: skip


def _paper_marks(axes: Axes, mine: Sequence[Record], classes: Sequence[str], look: dict[str, Look]) -> None:
    """The same marks, hollow, where the paper has the class at one of our capacities."""
    samples = {one.policy: one for one in mine}
    for height, name in enumerate(classes):
        for policy, one in samples.items():
            value = paper.steps_kept(name, one)
            if value is not None:
                axes.plot(value, height, marker=look[policy].marker, markersize=8, markerfacecolor="none",
                          color=look[policy].colour, linestyle="")  # fmt: skip


def _plain_ticks(axes: Axes) -> None:
    low, high = axes.get_xlim()
    shown = [base * 10**power for power in range(5) for base in (1, 2, 5) if low <= base * 10**power <= high]
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
    axes.minorticks_off()


def _legend(figure: object, look: dict[str, Look], mine: Sequence[Record]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], marker=style.marker, color=style.colour, linestyle="", label=name)
               for name, style in look.items()]  # fmt: skip
    if any(paper.steps_kept("all", one) for one in mine):
        handles.append(Line2D([], [], marker="o", markerfacecolor="none", color="#555555", linestyle="",
                              label=f"hollow: the paper's ({paper.MODEL})"))  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)  # type: ignore[attr-defined]
