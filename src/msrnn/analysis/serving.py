"""Serving with a fixed KV cache: concurrent requests and throughput, over time and by memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..eval.record import Record
from .benchmarks import SERVED
from .style import add_title, hide_spines, line_styles, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))


def serving_figure(records: Sequence[Record], path: str | Path) -> Path:
    """Concurrent requests and generated tokens over time, one line per engine and memory; throughput by memory."""
    subset = sorted((one for one in records if one.metric == SERVED), key=_memory)
    memories = sorted({_memory(one) for one in subset})
    dash = {memory: _DASHES[i % len(_DASHES)] for i, memory in enumerate(memories)}
    colour = {name: styles.colour for name, styles in line_styles(sorted({one.policy for one in subset})).items()}
    figure = new_figure(15, 4.4)
    running, written, throughput = figure.subplots(1, 3)
    for one in subset:
        style = {"color": colour[one.policy], "linestyle": dash[_memory(one)], "label": f"{one.policy}, {_mb(one)}"}
        for axes, what in ((running, "running"), (written, "written")):
            axes.step(list(map(float, one.parts[what])), list(one.parts[what].values()), where="post", **style)
    _by_memory(throughput, subset, colour)
    titles = {running: "concurrent requests", written: "tokens generated", throughput: "new tokens per second"}
    for axes, title in titles.items():
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("KV cache (MB)" if axes is throughput else "seconds", fontsize=9)
        axes.set_ylim(0)
        hide_spines(axes)
    running.legend(fontsize=7, frameon=False)
    settings = subset[0].settings
    title = (
        f"{settings['requests']} requests of {settings['prompt']:,} tokens, {settings['new']} new ones each, in vLLM"
    )
    add_title(figure, subset, title)
    return save_figure(figure, path)


def _by_memory(axes: Axes, subset: Sequence[Record], colour: dict[str, str]) -> None:
    for policy in dict.fromkeys(one.policy for one in subset):
        line = [one for one in subset if one.policy == policy]
        axes.plot([_memory(one) / 1e6 for one in line], [one.value for one in line], marker="o",
                  color=colour[policy], label=policy)  # fmt: skip
    axes.legend(fontsize=8, frameon=False)


def _memory(record: Record) -> float:
    return float(record.cell["memory"])


def _mb(record: Record) -> str:
    return f"{_memory(record) / 1e6:.0f} MB"
