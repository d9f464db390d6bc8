"""Budgets by layer: how the loss grows as each layer alone shrinks, and where a number of slots buys most.

A measurement is the loss of the text under one capacity per layer (None: full), so one file of them serves the curves
of single layers and the joint moves alike, and a run that was killed resumes where it stopped. The loss is counted over
the second half of every chunk: no capacity is larger than the first half, so every state is full there and the curves
do not depend on where a chunk ends. Or it is counted over answers at the end of a chunk (`recall.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..eval.measurements import Measurements
from ..eval.perplexity import largest_piece, token_nll
from ..hf.geometry import geometry
from ..hf.identity import profile_identity
from ..plan import LayerPolicy, Plan, per_layer
from ..policy import full
from .allocate import Curve, allocate, expected_loss
from .profile import KIND
from .recall import Goal, second_half

Capacities = tuple[int | None, ...] | tuple[tuple[int, ...], ...]  # by layer (None: full), or by layer and KV head
OnMeasured = Callable[[str, float], object]  # called with a description and the loss, also for a loss from the file
_LEAST = 16  # tokens of a chunk


@dataclass(frozen=True)
class Settings:
    """`policy` is a kind without a size; `grid` has the capacities that every layer is measured at.

    `rounds` of joint moves follow; `batch` chunks share a forward pass.
    """

    policy: str = "tova"
    grid: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    rounds: int = 2
    batch: int = 8

    def check(self, layers: int, length: int, averages: Sequence[int]) -> None:
        """Refuse settings that cannot be measured, before the first measurement."""
        if not self.grid or list(self.grid) != sorted(set(self.grid)) or self.grid[0] < 1:
            raise ValueError(f"the grid {list(self.grid)} must be whole numbers of at least 1, each above the last")
        if self.grid[-1] > length // 2:
            raise ValueError(
                f"the grid goes up to {self.grid[-1]}, but the loss is counted from token {length // 2} of each chunk "
                "on, where all states must be full; use a smaller grid or longer chunks"
            )
        for capacity in self.grid:
            per_layer(self.policy, [capacity] * layers)  # a kind with protected tokens has a least capacity
        self.check_averages(averages)

    def check_averages(self, averages: Sequence[int]) -> None:
        """Refuse averages that no capacities of the grid have."""
        low, high = min(self.grid), max(self.grid)
        for average in averages:
            if not low <= average <= high:
                raise ValueError(
                    f"an average of {average} lies outside the grid, {low} to {high}; use an average within it, "
                    f"or a grid that reaches {average}"
                )


def default_grid(length: int, factor: int = 2) -> tuple[int, ...]:
    """From 16 (or less, for short chunks) up to half a chunk, each `factor` times the last."""
    top, grid = length // 2, list[int]()
    while top >= min(16, length // 2):
        grid.insert(0, top)
        top //= factor
    return tuple(grid)


def chunks_of(token_ids: Sequence[int], length: int, count: int) -> Tensor:
    """[N, T]: at most `count` chunks, spread evenly over the text."""
    if length < _LEAST:
        raise ValueError(f"chunks of {length} tokens are too short; use at least {_LEAST}")
    total = len(token_ids) // length
    if total < 1:
        raise ValueError(f"the text has {len(token_ids):,} tokens, fewer than one chunk of {length:,}; give more text")
    indices = [i * total // min(count, total) for i in range(min(count, total))]
    return torch.tensor([list(token_ids[i * length : (i + 1) * length]) for i in indices])


def digest(token_ids: Tensor) -> str:
    return hashlib.sha256(token_ids.to(torch.int64).numpy().tobytes()).hexdigest()


class Meter:
    """The loss (nats per token) under any capacities by layer; each is measured once and kept in a file.

    chunks [N, T]; counted [N, T - 1]: the losses that count, those of the second half by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunks: Tensor,
        settings: Settings,
        path: str | Path,
        goal: Goal = "perplexity",
        counted: Tensor | None = None,
    ) -> None:
        self.model, self.chunks, self.settings, self.goal = model, chunks, settings, goal
        self.counted = second_half(chunks) if counted is None else counted
        most = settings.grid[-1] if self.whole is None else self.whole
        self.limits = [min(most, layer.window or most) for layer in geometry(model)]
        self.measurements = Measurements(path, self.conditions())
        self.on_measured: OnMeasured = lambda description, loss: None

    @property
    def whole(self) -> int | None:
        """For recall, the tokens of a chunk, with which nothing is lost: there curves end.

        A layer that retrieves may lose as much with half of them as with few.
        """
        return None if self.goal == "perplexity" else self.chunks.shape[1]

    def conditions(self) -> dict[str, Any]:
        """Everything that a measurement depends on, except the capacities."""
        about = profile_identity(self.model)
        return {
            "model": {name: about[name] for name in ("name", "type", "layers", "parameters")},
            "weights": about["weights"],
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "policy": self.settings.policy,
            "text": digest(self.chunks),
            "shape": list(self.chunks.shape),
            **({} if self.goal == "perplexity" else {"for": self.goal, "counted": digest(self.counted)}),
        }

    def loss(self, capacities: Capacities, description: str = "") -> float:
        """Mean over what counts in every chunk."""
        if capacities not in self.measurements:
            self.measurements.add(capacities, self._measure(capacities))
        losses: list[float] = self.measurements[capacities]["nll"]
        mean = sum(losses) / len(losses)
        self.on_measured(description, mean)
        return mean

    def _measure(self, capacities: Capacities) -> dict[str, Any]:
        start, plan = time.perf_counter(), self.plan(capacities)
        piece = largest_piece(self.model, min(self.settings.batch, len(self.chunks)))
        parts = [
            token_nll(self.model, part, plan, piece=piece) for part in torch.split(self.chunks, self.settings.batch)
        ]
        losses = (torch.cat(parts).double() * self.counted).sum(1) / self.counted.sum(1)
        return {"nll": [round(loss, 7) for loss in losses.tolist()], "seconds": round(time.perf_counter() - start, 3)}

    def plan(self, capacities: Capacities) -> Plan:
        """One policy per layer; where all are full too, so that the same code runs and only evictions differ."""
        return Plan(tuple(full() if size is None else self._layer(size) for size in capacities))

    def _layer(self, size: int | tuple[int, ...]) -> LayerPolicy:
        return per_layer(self.settings.policy, [size])[0]


def layer_curves(meter: Meter) -> list[dict[int, float]]:
    """capacity -> loss over full, one curve per layer, the others full. A layer's own sliding window costs nothing.

    Nor does a whole chunk, where the profile is for recall.
    """
    layers = len(meter.limits)
    full_loss = meter.loss((None,) * layers, "full")
    curves = []
    for layer, limit in enumerate(meter.limits):
        single = [(size, tuple(size if i == layer else None for i in range(layers))) for size in _sizes(meter, limit)]
        curve = {size: meter.loss(capacities, f"layer {layer} at {size}") - full_loss for size, capacities in single}
        curves.append(curve if limit in curve else curve | {limit: 0.0})
    return curves


def _sizes(meter: Meter, limit: int) -> list[int]:
    """The grid's capacities for a layer; at its sliding window and above, the window is the tighter bound."""
    return [size for size in meter.settings.grid if size < limit or size == limit == meter.settings.grid[-1]]


def refine(meter: Meter, capacities: Sequence[int]) -> tuple[list[int], int]:
    """Better capacities of the same sum, by moves under the true joint loss; and how many rounds improved it.

    A round measures the loss with each layer larger and smaller by a factor while the others stay, and allocates the
    total again along these short curves. After a round that made it worse, the factor shrinks.
    """
    best, factor, improved = list(capacities), 2.0, 0
    for _ in range(meter.settings.rounds):
        loss = meter.loss(tuple(best), "all layers")
        local = [_local_curve(meter, best, layer, factor, loss) for layer in range(len(best))]
        candidate = allocate(local, sum(best))
        if meter.loss(tuple(candidate), "all layers moved") < loss:
            best, improved = candidate, improved + 1
        else:
            factor = factor**0.5
    return best, improved


def _local_curve(meter: Meter, capacities: list[int], layer: int, factor: float, current: float) -> Curve:
    """The joint loss with one layer smaller, unchanged, and larger; above the least of them, as curves are."""
    low, high = meter.settings.grid[0], meter.limits[layer]
    sizes = sorted({max(low, round(capacities[layer] / factor)), min(high, round(capacities[layer] * factor))})
    losses = {capacities[layer]: current}
    for size in sizes:
        if size != capacities[layer]:
            moved = (*capacities[:layer], size, *capacities[layer + 1 :])
            losses[size] = meter.loss(moved, f"layer {layer} at {size}, all others bounded")
    least = min(losses.values())
    return {size: loss - least for size, loss in losses.items()}


def measurement_count(meter: Meter, averages: Sequence[int]) -> int:
    """How many losses `calibrate` needs at most: the total of a progress bar."""
    single = 1 + sum(len(_sizes(meter, limit)) for limit in meter.limits)
    return single + 1 + len(averages) * (3 + meter.settings.rounds * (2 + 2 * len(meter.limits)))


def calibrate(meter: Meter, averages: Sequence[int], text: dict[str, Any], version: str) -> dict[str, Any]:
    """The profile: capacities for every average (the first one's under `capacities`), and their measurements."""
    meter.settings.check(len(meter.limits), meter.chunks.shape[1], averages)
    curves = layer_curves(meter)
    full_loss = meter.loss((None,) * len(curves), "full")
    results = [_allocation(meter, curves, average, full_loss) for average in averages]
    pairs = [curve_pairs(curve) for curve in curves]
    return profile(meter, text, version, full_loss=full_loss, results=results, curves=pairs)


def profile(
    meter: Meter, text: dict[str, Any], version: str, *, full_loss: float, results: list[dict[str, Any]], curves: Any
) -> dict[str, Any]:
    """What a profile file holds; `results` has the capacities and the losses of each average."""
    conditions, capacities = meter.conditions(), {row["average"]: row.pop("capacities") for row in results}
    (average, first), *others = capacities.items()
    return {
        "kind": KIND,
        "msrnn": version,
        "average": average,
        "capacities": first,
        "allocations": {str(average): sizes for average, sizes in others},
        "policy": meter.settings.policy,
        "for": meter.goal,
        "model": conditions["model"] | {"weights": conditions["weights"]},
        "text": text | {"tokens_sha256": conditions["text"], "chunks": conditions["shape"]},
        "dtype": conditions["dtype"],
        "full_loss": round(full_loss, 6),
        "losses": results,
        "grid": list(meter.settings.grid),
        "curves": curves,
    }


def with_earlier(profile: dict[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """A profile with the other averages of an earlier one that was made in the same way: they stay as they are."""
    measured = {str(row["average"]) for row in profile["losses"]}
    sizes = {str(earlier["average"]): earlier["capacities"]} if "average" in earlier else {}
    kept = {name: each for name, each in (sizes | earlier.get("allocations", {})).items() if name not in measured}
    rows = [row for row in earlier.get("losses", ()) if str(row["average"]) not in measured]
    return profile | {"allocations": profile["allocations"] | kept, "losses": [*profile["losses"], *rows]}


def curve_pairs(curve: Curve) -> list[list[float]]:
    """A curve as profiles have it."""
    return [[size, round(loss, 6)] for size, loss in sorted(curve.items())]


def _allocation(meter: Meter, curves: Sequence[Curve], average: int, full_loss: float) -> dict[str, Any]:
    """One average's capacities, and how far the assumption held that the layers' losses add up."""
    additive, uniform = allocate(curves, average * len(curves)), [min(average, limit) for limit in meter.limits]
    uniform_loss, additive_loss = (
        meter.loss(tuple(uniform), "every layer alike"),
        meter.loss(tuple(additive), "all layers"),
    )
    best, rounds = refine(meter, additive if additive_loss < uniform_loss else uniform)
    return {
        "capacities": best,
        "average": average,
        "uniform": round(uniform_loss - full_loss, 6),
        "expected": round(expected_loss(curves, additive), 6),
        "additive": round(additive_loss - full_loss, 6),
        "refined": round(meter.loss(tuple(best), "all layers") - full_loss, 6),
        "rounds": rounds,
    }


def default_text() -> str:
    """A long text that comes with Python: all topics of its own documentation."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no pydoc_data to read; give a text with --text FILE") from error
    return "\n\n\n".join(topics[name].strip() for name in sorted(topics))
