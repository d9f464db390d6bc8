"""Which capacity is safe: the smallest one within a bound of the full model's perplexity, on a text of one's own.

Perplexity is taken to fall as capacity grows, so a bisection over a grid finds the smallest. A capacity is judged chunk
by chunk against the full model on the same chunks, and reading stops when the interval has left the bound behind. What
a capacity is worth in memory and speed follows from bytes alone, and nothing is timed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..eval.perplexity import piece_for
from ..eval.scoring import token_nll
from ..hf.cache import geometry
from ..hf.cost import Cost, cost
from ..policy import Plan, full, plan
from .tolerance import Bound

LEAST = 16  # slots: where the grid begins
_PER_OCTAVE = 4
_FEW = 3  # chunks that a decision needs at least
# Student's t, two-sided 99 %, for 2, 3, ... degrees of freedom; the normal's 2.58 beyond
_T99 = (9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.25, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898)
OnRead = Callable[[str, int], object]  # told which policy reads, and how many tokens it has read


@dataclass(frozen=True)
class Verdict:
    """One capacity's mean loss over the full model (nats per token), its 99 % interval, and whether that is inside."""

    capacity: int
    mean: float
    low: float
    high: float
    chunks: int
    inside: bool


def grid(length: int) -> list[int]:
    """Capacities to choose from: four per doubling, from 16 up to a whole sequence, which is full."""
    steps = range(int(_PER_OCTAVE * math.log2(max(length / LEAST, 1))) + 1)
    sizes = {4 * round(LEAST * 2 ** (step / _PER_OCTAVE) / 4) for step in steps}
    return [*sorted(size for size in sizes if size < length), length]


class Reader:
    """One text under the full model and under any policy, in chunks; what was read is not read again."""

    def __init__(self, model: PreTrainedModel, chunks: Tensor, batch: int, told: OnRead | None = None) -> None:
        self.model, self.batch = model, batch
        self.chunks, self.told = chunks, told or (lambda who, tokens: None)
        self.full = [loss for part in torch.split(chunks, batch) for loss in self._losses(part, None, "full")]

    @property
    def perplexity(self) -> float:
        return math.exp(fmean(self.full))

    def judge(self, kind: str, capacity: int, limit: float) -> Verdict:
        """Read until the interval lies on one side of the limit, or to the end, where the mean decides."""
        over: list[float] = []
        made = sized(kind, capacity, len(geometry(self.model)))
        for part in torch.split(self.chunks, self.batch):
            losses = self._losses(part, made, f"{kind} at {capacity}")
            over += [loss - full for loss, full in zip(losses, self.full[len(over) :], strict=False)]
            low, high = interval(over)
            if high < limit or low > limit:
                break
        return Verdict(capacity, fmean(over), low, high, len(over), fmean(over) <= limit)

    def _losses(self, part: Tensor, policy: Plan | None, who: str) -> list[float]:
        losses = token_nll(self.model, part, policy, piece=piece_for(self.model, len(part)))
        self.told(who, part.numel())
        return [float(mean) for mean in losses.double().mean(1)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean, 99 %, by Student's t over chunks; everything while they are few."""
    if len(values) < _FEW:
        return -math.inf, math.inf
    degrees = len(values) - 1
    wide = (_T99[degrees - 2] if degrees - 2 < len(_T99) else 2.6) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - wide, fmean(values) + wide


def sized(kind: str, capacity: int, layers: int) -> Plan:
    """A kind such as `tova`, `h2o-layer`, `tova,last=1/8` or `tova,profile=FILE` at a capacity."""
    name, comma, rest = kind.partition(",")
    return plan(f"{name}:{capacity}{comma}{rest}", layers)


def smallest(reader: Reader, kind: str, bound: Bound) -> Verdict:
    """The smallest capacity of the grid that is inside the bound, by bisection. A whole sequence always is."""
    length = reader.chunks.shape[1]
    sizes, limit = _possible(reader, kind, length), bound.nats(reader.perplexity)
    found = Verdict(length, 0.0, 0.0, 0.0, 0, True)
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        verdict = reader.judge(kind, sizes[middle], limit)
        if verdict.inside:
            found, high = verdict, middle
        else:
            low = middle + 1
    return found


def _possible(reader: Reader, kind: str, length: int) -> list[int]:
    """The grid without capacities that the kind cannot have (fewer slots than it protects, outside a profile)."""
    sizes, layers = grid(length), len(geometry(reader.model))
    if length < LEAST:
        raise ValueError(f"sequences of {length} tokens are too short to bound; use at least {LEAST}")

    def possible(size: int) -> bool:
        try:
            return len(sized(kind, size, layers)) == layers
        except ValueError:
            return False

    found = [size for size in sizes[:-1] if possible(size)]
    if not found:
        sized(kind, sizes[len(sizes) // 2], layers)  # what no size can mend is said in its own words
    return [*found, length]


@dataclass(frozen=True)
class Worth:
    """What a plan is worth: bytes per sequence, largest batches, and the bytes' bound on how much faster it decodes.

    A decoding step reads the weights once and every sequence's state: time is at least their bytes over the memory's
    bandwidth, which cancels out of the ratio.
    """

    price: Cost
    weights: int
    memory: int

    @property
    def batches(self) -> tuple[int, int]:
        return self.price.largest_batch(max(0, self.memory - self.weights))

    @property
    def single_gain(self) -> float:
        """Speed at batch 1, bounded over full."""
        return (self.weights + self.price.full) / (self.weights + self.price.state)

    @property
    def batch_gain(self) -> float | None:
        """Tokens a second over all sequences, each at its largest batch; None where not even one full cache fits."""
        bounded, full = self.batches
        if not full:
            return None
        ours, theirs = self.weights + bounded * self.price.state, self.weights + full * self.price.full
        return bounded / ours / (full / theirs)


def worth(reader: Reader, kind: str, capacity: int, memory: int) -> Worth:
    """Of a kind at a capacity, for sequences as long as the reader's chunks."""
    model, length = reader.model, reader.chunks.shape[1]
    layers = geometry(model)
    made = plan(full(), len(layers)) if capacity >= length else sized(kind, capacity, len(layers))
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return Worth(cost(layers, made, model.dtype, length), weights, memory)
