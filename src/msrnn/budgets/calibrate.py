"""Budgets by layer: how the loss grows as each layer alone shrinks, and where a number of slots buys most.

A measurement is the loss of the text under one capacity per layer (None: full), so one ledger of such rows serves the
curves of single layers and the joint moves alike, and a run that was killed goes on where it stopped. The loss is
counted over the second half of every chunk: no capacity is larger than that half's beginning, so every state is full
there and the curves do not depend on where a chunk ends.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..eval.measurements import Ledger
from ..eval.perplexity import piece_for
from ..eval.scoring import token_nll
from ..hf.cache import geometry
from ..policy import Plan, full, spread
from .allocate import Curve, allocate, expected
from .profile import KIND, identity

Capacities = tuple[int | None, ...]
OnMeasured = Callable[[str, float], object]  # told what was measured and the loss, also where it was known before
_LEAST = 16  # tokens of a chunk


@dataclass(frozen=True)
class Settings:
    """`policy` names the kind, without a size; `grid` the capacities every layer is tried at.

    `rounds` of joint moves follow; `batch` chunks are read at a time.
    """

    policy: str = "tova"
    grid: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    rounds: int = 2
    batch: int = 8

    def check(self, layers: int, length: int, averages: Sequence[int]) -> None:
        """Refuse what cannot be measured, before anything is."""
        if not self.grid or list(self.grid) != sorted(set(self.grid)) or self.grid[0] < 1:
            raise ValueError(f"the grid {list(self.grid)} must be whole numbers of at least 1, each above the last")
        if self.grid[-1] > length // 2:
            raise ValueError(
                f"the grid goes up to {self.grid[-1]}, but the loss is counted from token {length // 2} of each chunk "
                "on, where all states must be full; use a smaller grid or longer chunks"
            )
        for capacity in self.grid:
            spread(self.policy, [capacity] * layers)  # a kind with protected tokens has a least capacity
        for average in averages:
            if not self.grid[0] <= average <= self.grid[-1]:
                raise ValueError(f"an average of {average} lies outside the grid, {self.grid[0]} to {self.grid[-1]}")


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
    found = len(token_ids) // length
    if found < 1:
        raise ValueError(f"the text has {len(token_ids):,} tokens, fewer than one chunk of {length:,}; give more text")
    chosen = [i * found // min(count, found) for i in range(min(count, found))]
    return torch.tensor([list(token_ids[i * length : (i + 1) * length]) for i in chosen])


def digest(token_ids: Tensor) -> str:
    return hashlib.sha256(token_ids.to(torch.int64).numpy().tobytes()).hexdigest()


class Meter:
    """The loss (nats per token) under any capacities by layer, measured once each and remembered in a ledger."""

    def __init__(self, model: PreTrainedModel, chunks: Tensor, settings: Settings, ledger: str | Path) -> None:
        self.model, self.chunks, self.settings = model, chunks, settings
        self.limits = [min(settings.grid[-1], layer.window or settings.grid[-1]) for layer in geometry(model)]
        self.ledger = Ledger(ledger, self.conditions())
        self.told: OnMeasured = lambda what, loss: None

    def conditions(self) -> dict[str, Any]:
        """All that a measurement depends on, but for the capacities."""
        about = identity(self.model)
        return {
            "model": {name: about[name] for name in ("name", "type", "layers", "parameters")},
            "weights": about["weights"],
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "policy": self.settings.policy,
            "text": digest(self.chunks),
            "shape": list(self.chunks.shape),
        }

    def loss(self, capacities: Capacities, what: str = "") -> float:
        """Mean over the second half of every chunk."""
        if capacities not in self.ledger:
            self.ledger.add(capacities, self._measure(capacities))
        each: list[float] = self.ledger[capacities]["nll"]
        found = sum(each) / len(each)
        self.told(what, found)
        return found

    def _measure(self, capacities: Capacities) -> dict[str, Any]:
        began, half, made = time.perf_counter(), self.chunks.shape[1] // 2, self.plan(capacities)
        piece = piece_for(self.model, min(self.settings.batch, len(self.chunks)))
        parts = [
            token_nll(self.model, part, made, piece=piece) for part in torch.split(self.chunks, self.settings.batch)
        ]
        each = torch.cat(parts)[:, half - 1 :].double().mean(1)  # column i predicts token i + 1
        return {"nll": [round(value, 7) for value in each.tolist()], "seconds": round(time.perf_counter() - began, 3)}

    def plan(self, capacities: Capacities) -> Plan:
        """One policy per layer. Also where all are full: through the same code, so that only evictions differ."""
        kinds = {size: spread(self.settings.policy, [size])[0] for size in set(capacities) if size is not None}
        return Plan(tuple(full() if size is None else kinds[size] for size in capacities))


def curves(meter: Meter) -> list[dict[int, float]]:
    """capacity -> loss over full, one curve per layer, the others full. A layer's own window costs nothing."""
    layers = len(meter.limits)
    floor = meter.loss((None,) * layers, "full")
    found = []
    for layer, limit in enumerate(meter.limits):
        single = [(size, tuple(size if i == layer else None for i in range(layers))) for size in _below(meter, limit)]
        curve = {size: meter.loss(capacities, f"layer {layer} at {size}") - floor for size, capacities in single}
        found.append(curve if limit in curve else curve | {limit: 0.0})
    return found


def _below(meter: Meter, limit: int) -> list[int]:
    """The grid's capacities for a layer; at its window and above, the window is the tighter bound."""
    return [size for size in meter.settings.grid if size < limit or size == limit == meter.settings.grid[-1]]


def refine(meter: Meter, capacities: Sequence[int]) -> tuple[list[int], int]:
    """Better capacities of the same sum, by moves under the real joint loss; and how many rounds were an improvement.

    A round measures what each layer gains from a factor more and loses from a factor less while all the others stay,
    and spends the total anew along these short curves. A step that turns out worse is tried again at a smaller factor.
    """
    best, factor, better = list(capacities), 2.0, 0
    for _ in range(meter.settings.rounds):
        here = meter.loss(tuple(best), "all layers")
        local = [_around(meter, best, layer, factor, here) for layer in range(len(best))]
        moved = allocate(local, sum(best))
        if meter.loss(tuple(moved), "all layers moved") < here:
            best, better = moved, better + 1
        else:
            factor = factor**0.5
    return best, better


def _around(meter: Meter, capacities: list[int], layer: int, factor: float, here: float) -> Curve:
    """The joint loss with one layer smaller, as it is, and larger; counted from the largest, as curves are."""
    low, high = meter.settings.grid[0], meter.limits[layer]
    sizes = sorted({max(low, round(capacities[layer] / factor)), min(high, round(capacities[layer] * factor))})
    found = {capacities[layer]: here}
    for size in sizes:
        if size != capacities[layer]:
            moved = (*capacities[:layer], size, *capacities[layer + 1 :])
            found[size] = meter.loss(moved, f"layer {layer} at {size}, all others bounded")
    least = min(found.values())
    return {size: loss - least for size, loss in found.items()}


def measurements(meter: Meter, averages: Sequence[int]) -> int:
    """How many losses `calibrate` will ask for: what a progress bar counts to."""
    single = 1 + sum(len(_below(meter, limit)) for limit in meter.limits)
    return single + 1 + len(averages) * (3 + meter.settings.rounds * (2 + 2 * len(meter.limits)))


def calibrate(meter: Meter, averages: Sequence[int], text: dict[str, Any], version: str) -> dict[str, Any]:
    """The profile: capacities for every average (the first one's under `capacities`), and what they were made from."""
    meter.settings.check(len(meter.limits), meter.chunks.shape[1], averages)
    found = curves(meter)
    floor = meter.loss((None,) * len(found), "full")
    results = [_spend(meter, found, average, floor) for average in averages]
    conditions = meter.conditions()
    return {
        "kind": KIND,
        "msrnn": version,
        "average": averages[0],
        "capacities": results[0].pop("capacities"),
        "allocations": {str(a): r.pop("capacities") for a, r in zip(averages[1:], results[1:], strict=True)},
        "policy": meter.settings.policy,
        "model": conditions["model"] | {"weights": conditions["weights"]},
        "text": text | {"tokens_sha256": conditions["text"], "chunks": conditions["shape"]},
        "dtype": conditions["dtype"],
        "full_loss": round(floor, 6),
        "losses": results,
        "grid": list(meter.settings.grid),
        "curves": [[[size, round(loss, 6)] for size, loss in sorted(curve.items())] for curve in found],
    }


def _spend(meter: Meter, found: Sequence[Curve], average: int, floor: float) -> dict[str, Any]:
    """One average's capacities, and what became of the assumption that the layers' losses add up."""
    first, alike = allocate(found, average * len(found)), [min(average, limit) for limit in meter.limits]
    uniform, start = meter.loss(tuple(alike), "every layer alike"), meter.loss(tuple(first), "all layers")
    best, rounds = refine(meter, first if start < uniform else alike)
    return {
        "capacities": best,
        "average": average,
        "uniform": round(uniform - floor, 6),
        "expected": round(expected(found, first), 6),
        "additive": round(start - floor, 6),
        "refined": round(meter.loss(tuple(best), "all layers") - floor, 6),
        "rounds": rounds,
    }


def default_text() -> str:
    """A long text that every Python has: all chapters of its own documentation."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no pydoc_data to read; give a text with --text FILE") from error
    return "\n\n\n".join(topics[name].strip() for name in sorted(topics))
