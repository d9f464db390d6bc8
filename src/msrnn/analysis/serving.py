"""Serving at a fixed memory: how many requests run at once, how fast they are answered, over time and by memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..eval.record import Record
from .benchmarks import SERVED
from .style import head, looks, new_figure, plain, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))


def served(records: Sequence[Record], path: str | Path) -> Path:
    """Running requests and tokens written over time, one line per engine and memory; throughput against memory."""
    mine = sorted((one for one in records if one.metric == SERVED), key=_memory)
    memories = sorted({_memory(one) for one in mine})
    dash = {memory: _DASHES[i % len(_DASHES)] for i, memory in enumerate(memories)}
    colour = {name: look.colour for name, look in looks(sorted({one.policy for one in mine})).items()}
    figure = new_figure(15, 4.4)
    running, written, fast = figure.subplots(1, 3)
    for one in mine:
        style = {"color": colour[one.policy], "linestyle": dash[_memory(one)], "label": f"{one.policy}, {_mb(one)}"}
        for axes, what in ((running, "running"), (written, "written")):
            axes.step(list(map(float, one.parts[what])), list(one.parts[what].values()), where="post", **style)
    _by_memory(fast, mine, colour)
    titles = {running: "requests that run at once", written: "tokens written", fast: "new tokens per second"}
    for axes, title in titles.items():
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("memory for keys and values (MB)" if axes is fast else "seconds", fontsize=9)
        axes.set_ylim(0)
        plain(axes)
    running.legend(fontsize=7, frameon=False)
    about = mine[0].settings
    title = f"{about['requests']} requests of {about['prompt']:,} tokens, {about['new']} new ones each, in vLLM"
    head(figure, mine, title)
    return save_figure(figure, path)


def _by_memory(axes: Axes, mine: Sequence[Record], colour: dict[str, str]) -> None:
    for policy in dict.fromkeys(one.policy for one in mine):
        found = [one for one in mine if one.policy == policy]
        axes.plot([_memory(one) / 1e6 for one in found], [one.value for one in found], marker="o",
                  color=colour[policy], label=policy)  # fmt: skip
    axes.legend(fontsize=8, frameon=False)


def _memory(record: Record) -> float:
    return float(record.cell["memory"])


def _mb(record: Record) -> str:
    return f"{_memory(record) / 1e6:.0f} MB"
