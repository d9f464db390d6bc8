"""Figures of traces: which tokens the layers hold, step by step, and how far layers agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.trace import Trace
from .retention import layer_agreement, layers_holding, mean_recent_share, off_diagonal, older
from .style import hide_spines, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RECENT, OLDER = (0.66, 0.78, 0.90), (0.60, 0.10, 0.05)  # light blue and dark red differ in greyscale too
_CELLS = 360  # width and height of a panel's image, whatever the length
_LABELS = 7


def retention_map(
    trace: Trace,
    path: str | Path,
    *,
    layers: int | Sequence[int] | None = None,
    row: int = 0,
    tokens: Sequence[str] | None = None,
) -> Path:
    """Draw which tokens the layers (by default six over the depth) hold after each step, and at the end.

    `row` is the sequence of a batch; `tokens` the text of each token, to label those that most layers hold.
    """
    indices = _layer_indices(trace, layers)
    if tokens is not None and len(tokens) != trace.length:
        raise ValueError(f"{len(tokens)} token texts were given for a trace of {trace.length} tokens")
    rows = -(-len(indices) // 3)
    figure = new_figure(11, 2.75 * rows + 3.1)
    grid = figure.add_gridspec(2, 1, height_ratios=[2.75 * rows, 2.7])
    maps, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    panels = maps.subplots(rows, 3, sharex=True, sharey=True, squeeze=False)
    for axes, layer in zip(panels.flat, indices, strict=False):
        _draw_map(axes, trace, layer, row)
    for axes in panels.flat[len(indices) :]:
        axes.set_visible(False)
    maps.supxlabel("step", fontsize=10)
    maps.supylabel("token position", fontsize=10)
    left, right = below.subplots(1, 2, width_ratios=[2, 1])
    _draw_holders(left, trace, row, tokens)
    _draw_shares(right, trace, row)
    _add_title(figure, trace)
    return save_figure(figure, path)


def layer_maps(trace: Trace, path: str | Path, *, row: int = 0) -> Path:
    """Every layer's map, tokens by steps, side by side, with the recent share of each."""
    layers = _layer_indices(trace, range(len(trace.deaths)))
    columns = min(6, len(layers))
    rows = -(-len(layers) // columns)
    figure = new_figure(max(1.75 * columns, 5.5) + 0.5, 1.72 * rows + 1.1)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    shares = mean_recent_share(trace, row).tolist()
    for axes, layer in zip(panels.flat, layers, strict=False):
        _draw_map(axes, trace, layer, row, _CELLS // 2)
        axes.set_title(f"layer {layer}: {shares[layer]:.0%} recent", fontsize=8.5, pad=3)
        axes.tick_params(labelsize=7)
    for axes in panels.flat[len(layers) :]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("step", fontsize=8)
    figure.supylabel("token position", fontsize=9)
    _add_title(figure, trace)
    return save_figure(figure, path)


def agreement_map(trace: Trace, path: str | Path, *, row: int = 0) -> Path:
    """How much of what two layers hold is the same, for all pairs: of everything, and of the older tokens alone."""
    _layer_indices(trace, None)
    figure = new_figure(9.6, 4.6)
    for axes, only_older in zip(figure.subplots(1, 2), (False, True), strict=True):
        square = layer_agreement(trace, row, only_older=only_older).fill_diagonal_(float("nan"))
        image = axes.imshow(square.numpy(), cmap="viridis", vmin=0, vmax=1, origin="lower")
        mean = off_diagonal(square)
        axes.set_title(f"{'older tokens only' if only_older else 'all held tokens'}: mean {mean:.2f}", fontsize=10)
        axes.set(xlabel="layer", ylabel="layer")
        hide_spines(axes)
    figure.colorbar(image, ax=figure.axes, label="held by both, of what either holds", shrink=0.85)
    figure.suptitle(f"Do layers keep the same tokens? {_about(trace)}", fontsize=12)
    return save_figure(figure, path)


def _layer_indices(trace: Trace, layers: int | Sequence[int] | None) -> list[int]:
    count = len(trace.deaths)
    if not trace.length:
        raise ValueError("the trace is empty; read some tokens first")
    if layers is None:
        panels = min(6, count)
        return [round(i * (count - 1) / max(panels - 1, 1)) for i in range(panels)]
    indices = [layers] if isinstance(layers, int) else list(layers)
    for layer in indices:
        if not 0 <= layer < count:
            raise ValueError(f"there is no layer {layer}; the trace has layers 0 to {count - 1}")
    if not indices:
        raise ValueError("no layer was chosen; give at least one")
    return indices


def _draw_map(axes: Axes, trace: Trace, layer: int, row: int, cells: int = _CELLS) -> None:
    """A token is a horizontal line from the step it is read to its eviction."""
    length, cells = trace.length, min(cells, trace.length)
    picture = np.ones((cells, cells, 3))
    edges = np.arange(cells) * length // cells
    for column in range(cells):
        step = (column + 1) * length // cells - 1
        held = trace.held(layer, step)[row]
        old = older(held, step)
        for colour, mask in ((RECENT, held & ~old), (OLDER, old)):
            share = np.maximum.reduceat(mask.float().mean(0).numpy(), edges)
            _tint(picture[:, column], colour, share)
    axes.imshow(picture, origin="lower", extent=(0, length, 0, length), aspect="auto", interpolation="nearest")
    axes.set_title(f"layer {layer}", fontsize=10)
    hide_spines(axes)


def _tint(cells: NDArray[np.float64], colour: tuple[float, float, float], share: NDArray[np.float32]) -> None:
    """Colour the cells that some unit holds, paler where few units do."""
    opacity = np.where(share > 0, 0.3 + 0.7 * share, 0)[:, None]
    cells[:] = cells * (1 - opacity) + np.array(colour) * opacity


def _draw_holders(axes: Axes, trace: Trace, row: int, tokens: Sequence[str] | None) -> None:
    last, count = trace.length - 1, len(trace.deaths)
    old, every = (layers_holding(trace, last, row, only_older=only_older) for only_older in (True, False))
    for colour, low, high in ((OLDER, torch.zeros_like(old), old), (RECENT, old, every)):
        where = (high > low).nonzero().flatten()
        axes.vlines(where.numpy(), low[where].numpy(), high[where].numpy(), color=colour, linewidth=0.8)
    axes.set(xlim=(-0.01 * trace.length, trace.length), ylim=(0, 1.38 * count), xlabel="token position")
    axes.set_ylabel("layers holding it")
    axes.set_title("what is held at the end", fontsize=10)
    axes.set_yticks([0, count // 2, count])
    if tokens is not None:
        smallest = min(int(trace.held(layer, last)[row].sum(1).min()) for layer in range(count))
        _label_tokens(axes, old[: trace.length - smallest], every, tokens)
    hide_spines(axes)


def _label_tokens(axes: Axes, old: Tensor, heights: Tensor, tokens: Sequence[str]) -> None:
    """Label the old tokens that most layers hold with their text, where there is room."""
    labelled: list[int] = []
    for place in old.argsort(descending=True, stable=True).tolist():
        if len(labelled) == _LABELS or old[place] == 0:
            return
        if all(abs(place - other) > 0.08 * len(tokens) for other in (*labelled, len(old))):
            labelled.append(place)
            axes.annotate(
                visible(tokens[place]), (place, float(heights[place])), (2, 3), textcoords="offset points",
                fontsize=8, rotation=35, parse_math=False,
            )  # fmt: skip


def visible(token: str) -> str:
    """A token's text in quotes, with invisible characters escaped and long texts cut."""
    text = token if len(token) <= 12 else f"{token[:11]}…"
    return repr(text)


def _draw_shares(axes: Axes, trace: Trace, row: int) -> None:
    shares = mean_recent_share(trace, row).numpy()
    layers = np.arange(len(shares))
    axes.bar(layers, shares, color=RECENT, width=0.85)
    axes.bar(layers, 1 - shares, bottom=shares, color=OLDER, width=0.85)
    axes.set(ylim=(0, 1), xlabel="layer", xlim=(-0.7, len(shares) - 0.3))
    axes.set_ylabel("share of the state")
    axes.set_title("recent and older, mean over steps", fontsize=10)
    hide_spines(axes)


def _about(trace: Trace) -> str:
    model = f"{Path(trace.model).name}, " if trace.model else ""
    return f"{model}{trace.policy}, {trace.length:,} tokens"


def _add_title(figure: Figure, trace: Trace) -> None:
    from matplotlib.patches import Patch

    model = f" of {Path(trace.model).name}" if trace.model else ""
    figure.suptitle(f"What the layers{model} held of {trace.length:,} tokens under {trace.policy}", fontsize=13)
    pale = " (pale: by few units)" if max(deaths.shape[1] for deaths in trace.deaths) > 1 else ""
    names = ["held, recent: a window of the same size would hold it too", f"held, older{pale}"]
    handles = [Patch(color=colour, label=name) for colour, name in zip((RECENT, OLDER), names, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
