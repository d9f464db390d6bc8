"""Budgets by KV head: curves by gradients (`estimate.py`), an allocation over all heads, and what it is worth.

Only for policies whose KV heads decide alone. A chunk's curves are one line in the file of measurements; the losses of
the allocation itself are measured as they are by layer (`calibrate.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import log
from typing import Any, cast

import numpy as np
from transformers import PreTrainedModel

from ..hf.geometry import geometry
from .allocate import expected_loss, non_increasing
from .calibrate import Meter, profile
from .estimate import combine, head_losses
from .profile import allocate_average, check_by_head

HeadCurves = list[list[dict[int, float]]]  # by layer and KV head: capacity -> loss over full
_ESTIMATES = ("alone", "together")
_DIGITS = 4  # of an estimated loss: far more than it is good for, and small files


def check_heads(kind: str, model: PreTrainedModel) -> None:
    """Refuse a policy whose heads do not decide alone, and a model whose layers differ in their heads."""
    check_by_head(kind)
    counts = sorted({layer.kv_heads for layer in geometry(model)})
    if len(counts) > 1:
        numbers = " and ".join(map(str, counts))
        raise ValueError(f"layers of this model have {numbers} KV heads, so an average is not one size; use --by layer")


def head_curves(meter: Meter) -> HeadCurves:
    """One curve per KV head, from the mean of each estimate over chunks. A layer's own sliding window costs nothing."""
    estimates = [_chunk_losses(meter, number) for number in range(len(meter.chunks))]
    alone, together = (np.mean([chunk[name] for chunk in estimates], axis=0).tolist() for name in _ESTIMATES)
    sizes, curves = meter.settings.grid, list[list[dict[int, float]]]()
    for layer, singles, shares in zip(geometry(meter.model), alone, together, strict=True):
        losses = [combine(one, other, sizes) for one, other in zip(singles, shares, strict=True)]
        end = min((size for size in (layer.window, meter.whole) if size is not None), default=None)
        curves.append([continued(dict(zip(sizes, head, strict=True)), end) for head in losses])
    return curves


def _chunk_losses(meter: Meter, number: int) -> dict[str, Any]:
    """Both estimates of one chunk, by layer, KV head and size; from the file where they are there."""
    sizes = meter.settings.grid
    key = ["chunk", number, list(sizes)]
    if key not in meter.measurements:
        start = time.perf_counter()
        results = head_losses(meter.model, meter.chunks[number], meter.settings.policy, sizes, meter.counted[number])
        rounded = [[[list(map(_rounded, head)) for head in layer.tolist()] for layer in result] for result in results]
        seconds = round(time.perf_counter() - start, 3)
        meter.measurements.add(key, dict(zip(_ESTIMATES, rounded, strict=True)) | {"seconds": seconds})
    losses: dict[str, Any] = meter.measurements[key]
    meter.on_measured(f"chunk {number + 1}", float(np.sum(losses["alone"], axis=(0, 1)).mean()))
    return losses


def continued(curve: dict[int, float], end: int | None) -> dict[int, float]:
    """A curve to `end`, with which nothing is lost; if there is no end, to twice its largest size, falling as before.

    A head that needs more than the largest size measured is worth it: most others need far fewer.
    """
    points = non_increasing(curve)
    if end is not None:
        points = [point for point in points if point[0] < end] + [(end, 0.0)]
    elif len(points) > 1:
        (low, before), (high, last) = points[-2:]
        fall = (last / before) ** (log(2) / log(high / low)) if before > 0 else 0.0
        points.append((2 * high, last * fall))
    return {size: _rounded(loss) for size, loss in points}


def _rounded(loss: float) -> float:
    return float(f"{loss:.{_DIGITS}g}")


def estimate_count(meter: Meter, averages: Sequence[int]) -> int:
    """How many chunks and losses `calibrate_by_head` needs: the total of a progress bar."""
    return len(meter.chunks) + 1 + 2 * len(averages)


def calibrate_by_head(meter: Meter, averages: Sequence[int], text: dict[str, Any], version: str) -> dict[str, Any]:
    """The profile: for every layer a list of one capacity per KV head, for each average."""
    check_heads(meter.settings.policy, meter.model)
    meter.settings.check(len(meter.limits), meter.chunks.shape[1], averages)
    curves = head_curves(meter)
    full_loss = meter.loss((None,) * len(curves), "full")
    results = [_allocation(meter, curves, average, full_loss) for average in averages]
    content = profile(meter, text, version, full_loss=full_loss, results=results, curves=_pairs(curves))
    return content | {"by": "head"}


def _allocation(meter: Meter, curves: HeadCurves, average: int, full_loss: float) -> dict[str, Any]:
    """One average's capacities, and how far the estimate held: its sum over all heads, and the loss as measured."""
    by_head = cast("list[list[int]]", allocate_average(_pairs(curves), average))
    equal = [[min(average, limit)] * len(layer) for layer, limit in zip(curves, meter.limits, strict=True)]
    uniform = meter.loss(tuple(min(average, limit) for limit in meter.limits), "every head alike")
    additive = meter.loss(tuple(map(tuple, by_head)), "all heads")
    flat = [curve for layer in curves for curve in layer]
    return {
        "capacities": by_head if additive < uniform else equal,
        "average": average,
        "uniform": round(uniform - full_loss, 6),
        "expected": round(expected_loss(flat, [size for layer in by_head for size in layer]), 6),
        "additive": round(additive - full_loss, 6),
        "refined": round(min(additive, uniform) - full_loss, 6),
    }


def _pairs(curves: HeadCurves) -> list[list[list[list[float]]]]:
    """The curves as profiles have them."""
    return [[[[size, loss] for size, loss in sorted(curve.items())] for curve in layer] for layer in curves]
