"""Which capacity is safe: the smallest one within a tolerance of the full model's perplexity, on the user's own text.

Perplexity is assumed to fall as capacity grows, so a bisection over a grid finds the smallest. A capacity is compared
with the full model chunk by chunk on the same chunks, and reading stops once the confidence interval lies on one side
of the limit. What a capacity saves in memory and time follows from bytes; nothing is timed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..eval.perplexity import largest_piece, token_nll
from ..eval.statistics import mean_interval
from ..hf.best import resolve
from ..hf.cost import Cost, cost
from ..hf.geometry import geometry
from ..plan import Plan
from ..policy import full, split_policy
from .profile import plan_for
from .tolerance import Tolerance

LEAST = 16  # slots: where the grid begins
_PER_OCTAVE = 4
OnChunks = Callable[[str, int], object]  # called with the policy and the number of tokens that it has read


@dataclass(frozen=True)
class Comparison:
    """A capacity's mean loss above the full model's (nats per token), its 99 % interval, and whether it is allowed."""

    capacity: int
    mean: float
    low: float
    high: float
    chunks: int
    within: bool


def grid(length: int) -> list[int]:
    """Capacities to choose from: four per doubling, from 16 up to a whole sequence, which is full."""
    steps = range(int(_PER_OCTAVE * math.log2(max(length / LEAST, 1))) + 1)
    sizes = {4 * round(LEAST * 2 ** (step / _PER_OCTAVE) / 4) for step in steps}
    return [*sorted(size for size in sizes if size < length), length]


class Comparator:
    """A text in chunks under the full model, which is read once, and under any policy, for comparison."""

    def __init__(self, model: PreTrainedModel, chunks: Tensor, batch: int, on_chunks: OnChunks | None = None) -> None:
        self.model, self.batch, self.chunks = model, batch, chunks
        self.on_chunks = on_chunks or (lambda policy, tokens: None)
        self.full = [loss for part in torch.split(chunks, batch) for loss in self._losses(part, None, "full")]

    @property
    def perplexity(self) -> float:
        """The full model's."""
        return math.exp(fmean(self.full))

    def compare(self, kind: str, capacity: int, limit: float) -> Comparison:
        """Read until the interval lies on one side of the limit, or to the end, where the mean decides."""
        differences: list[float] = []
        policies = sized(kind, capacity, self.model)
        for part in torch.split(self.chunks, self.batch):
            losses = self._losses(part, policies, f"{kind} at {capacity}")
            differences += [loss - full for loss, full in zip(losses, self.full[len(differences) :], strict=False)]
            low, high = mean_interval(differences)
            if high < limit or low > limit:
                break
        mean = fmean(differences)
        return Comparison(capacity, mean, low, high, len(differences), mean <= limit)

    def _losses(self, part: Tensor, policy: Plan | None, name: str) -> list[float]:
        losses = token_nll(self.model, part, policy, piece=largest_piece(self.model, len(part)))
        self.on_chunks(name, part.numel())
        return [float(mean) for mean in losses.double().mean(1)]


def sized(kind: str, capacity: int, model: PreTrainedModel) -> Plan:
    """A kind such as `best`, `tova`, `h2o-layer`, `tova,last=1/8` or `tova,profile=FILE` at a capacity."""
    return plan_for(resolve(split_policy(kind).with_size(capacity), model), len(geometry(model)))


def smallest(comparator: Comparator, kind: str, tolerance: Tolerance) -> Comparison:
    """The smallest capacity of the grid within the tolerance, by bisection. A whole sequence always is."""
    length = comparator.chunks.shape[1]
    sizes, limit = _possible_sizes(comparator, kind, length), tolerance.nats(comparator.perplexity)
    best = Comparison(length, 0.0, 0.0, 0.0, 0, True)
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        comparison = comparator.compare(kind, sizes[middle], limit)
        if comparison.within:
            best, high = comparison, middle
        else:
            low = middle + 1
    return best


def _possible_sizes(comparator: Comparator, kind: str, length: int) -> list[int]:
    """The grid without capacities that the kind cannot have (fewer slots than it protects, outside a profile)."""
    sizes, model = grid(length), comparator.model
    if length < LEAST:
        raise ValueError(f"sequences of {length} tokens are too short to bound; use at least {LEAST}")

    def possible(size: int) -> bool:
        try:
            return len(sized(kind, size, model)) > 0
        except ValueError:
            return False

    smaller = [size for size in sizes[:-1] if possible(size)]
    if not smaller:
        sized(kind, sizes[len(sizes) // 2], model)  # re-raise the original error
    return [*smaller, length]


@dataclass(frozen=True)
class Savings:
    """What a plan saves: bytes per sequence, largest batches, and an upper bound on how much faster it decodes.

    A decoding step reads the weights once and every sequence's state: time is at least their bytes over the memory's
    bandwidth, which cancels out of the ratio.
    """

    cost: Cost
    weights: int
    memory: int

    @property
    def batches(self) -> tuple[int, int]:
        """The largest batch with the plan, and with full caches."""
        return self.cost.largest_batch(max(0, self.memory - self.weights))

    @property
    def single_speedup(self) -> float:
        """Over full, at batch 1."""
        return (self.weights + self.cost.full) / (self.weights + self.cost.state)

    @property
    def batch_speedup(self) -> float | None:
        """In tokens a second over all sequences, each at its largest batch; None where not one full cache fits."""
        bounded, full = self.batches
        if not full:
            return None
        bounded_bytes, full_bytes = (
            self.weights + batch * state for batch, state in ((bounded, self.cost.state), (full, self.cost.full))
        )
        return bounded / bounded_bytes / (full / full_bytes)


def savings(comparator: Comparator, kind: str, capacity: int, memory: int) -> Savings:
    """Of a kind at a capacity, for sequences as long as the comparator's chunks."""
    model, length = comparator.model, comparator.chunks.shape[1]
    layers = geometry(model)
    policies = plan_for(full(), len(layers)) if capacity >= length else sized(kind, capacity, model)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return Savings(cost(layers, policies, model.dtype, length), weights, memory)
