"""Which tokens stay: statistics of a trace alone, without a model or a text.

A token is kept for the steps at which it is visible, its own included, and to the end of the trace where it is never
evicted: the paper's count, whose mean is the same under every policy that fills its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..core.trace import Trace

EARLY = range(1, 25)  # the paper's tokens 2 to 25
STEPS = 16  # steps at which the states are compared


def layers_holding(trace: Trace, step: int, row: int = 0, *, only_older: bool = False) -> Tensor:
    """[T]: how many layers hold each token after `step`; a layer whose units disagree counts as a share."""
    return _shares(trace, step, row, only_older).sum(0)


def recent_share(trace: Trace, step: int, row: int = 0) -> Tensor:
    """[L]: the share of each layer's state after `step` that a window of the same size would hold too."""
    shares = []
    for layer in range(len(trace.deaths)):
        held = trace.held(layer, step)[row]
        shares.append((held & ~older(held, step)).sum() / held.sum().clamp(min=1))
    return torch.stack(shares)


def older(held: Tensor, step: int) -> Tensor:
    """[U, T]: held, although a window of the same size would have evicted it."""
    oldest = step + 1 - held.sum(1, keepdim=True)
    return held & (torch.arange(held.shape[1]) < oldest)


def sampled_steps(trace: Trace, row: int = 0, count: int = STEPS) -> list[int]:
    """Evenly spaced steps to the end, from where every unit that evicts has begun to: before, states fill."""
    last = trace.length - 1
    firsts = [first for deaths in trace.deaths for first in deaths[row].amin(1).tolist()]
    begin = max((first for first in firsts if first <= last), default=last)
    return sorted(set(torch.linspace(begin, last, count).long().tolist()))


def mean_recent_share(trace: Trace, row: int = 0) -> Tensor:
    """[L]: the recent share, averaged over steps."""
    return torch.stack([recent_share(trace, step, row) for step in sampled_steps(trace, row)]).mean(0)


def steps_kept(trace: Trace, row: int = 0) -> Tensor:
    """[L, T]: the number of steps at which each token was visible, averaged over a layer's units."""
    return torch.stack([trace.ages(layer)[row].float().mean(0) + 1 for layer in range(len(trace.deaths))])


def held_at_end(trace: Trace, indices: Iterable[int], row: int = 0) -> Tensor:
    """[L]: the share of these tokens that each layer still holds after the last step."""
    positions = [place for place in indices if place < trace.length]
    if not positions:
        raise ValueError(f"the trace has {trace.length} tokens, none of those asked for")
    return _shares(trace, trace.length - 1, row)[:, positions].mean(1)


def survival(trace: Trace, ages: Sequence[int], row: int = 0) -> Tensor:
    """[L, len(ages)]: the share of tokens still held so many steps after their own, among those old enough."""
    read_at = torch.arange(trace.length)
    lines = []
    for deaths in trace.deaths:
        lines.append([float((deaths[row, :, : trace.length - age] > read_at[: trace.length - age] + age).float().mean())
                      for age in _check_ages(ages, trace.length)])  # fmt: skip
    return torch.tensor(lines)


def ages_for(length: int) -> list[int]:
    """Ages worth a point on a logarithmic axis: 1, 2, 4, ... while at least a tenth of the tokens can reach them."""
    return [1 << power for power in range(length.bit_length()) if (1 << power) <= 0.9 * length]


def layer_agreement(trace: Trace, row: int = 0, *, only_older: bool = False) -> Tensor:
    """[L, L]: how much of what two layers hold is the same (Jaccard), averaged over steps."""
    steps = sampled_steps(trace, row)
    return torch.stack([_overlaps(_shares(trace, step, row, only_older)) for step in steps]).nanmean(0)


def chance_agreement(trace: Trace, row: int = 0) -> float:
    """The agreement on older tokens if each layer had drawn its own at random."""
    values = []
    for step in sampled_steps(trace, row):
        sizes = _shares(trace, step, row, only_older=True).sum(1)
        pools = (step + 1 - _shares(trace, step, row).sum(1)).clamp(min=1)  # what a window of its size has evicted
        both = sizes[:, None] * sizes / torch.maximum(pools[:, None], pools)
        values.append(off_diagonal(both / (sizes[:, None] + sizes - both)))
    return float(torch.tensor(values).nanmean())


def off_diagonal(square: Tensor) -> float:
    """The mean over pairs of different rows and columns; nan where there is no such pair."""
    return float(square[~torch.eye(len(square), dtype=torch.bool)].nanmean())


def head_agreement(trace: Trace, row: int = 0, *, only_older: bool = False) -> Tensor:
    """[L]: how much of what two units of one layer hold is the same; nan where a layer decides as one."""
    values = []
    for step in sampled_steps(trace, row):
        held = [_held(trace, layer, step, row, only_older) for layer in range(len(trace.deaths))]
        values.append(torch.tensor([off_diagonal(_overlaps(units.float())) for units in held]))
    return torch.stack(values).nanmean(0)


def distinct(trace: Trace, row: int = 0) -> Tensor:
    """[L]: distinct tokens in a layer's units together, in units of their mean state: 1 where all hold the same."""
    values = []
    for step in sampled_steps(trace, row):
        held = [trace.held(layer, step)[row] for layer in range(len(trace.deaths))]
        sizes = [units.sum(1).float().mean().clamp(min=1) for units in held]
        values.append(torch.stack([units.any(0).sum() / size for units, size in zip(held, sizes, strict=True)]))
    return torch.stack(values).mean(0)


def agreement_with(first: Trace, second: Trace, row: int = 0) -> Tensor:
    """[L]: how much of what each layer holds is the same in two traces of one text, e.g. layer-wise and head-wise."""
    if first.length != second.length or len(first.deaths) != len(second.deaths):
        raise ValueError(
            f"traces of {first.length} tokens in {len(first.deaths)} layers and of {second.length} in "
            f"{len(second.deaths)} cannot be compared; trace one text twice with one model"
        )
    values = []
    for step in sampled_steps(first, row):
        pairs = zip(_shares(first, step, row), _shares(second, step, row), strict=True)
        values.append(torch.stack([torch.minimum(a, b).sum() / torch.maximum(a, b).sum() for a, b in pairs]))
    return torch.stack(values).nanmean(0)


def _check_ages(ages: Sequence[int], length: int) -> Sequence[int]:
    for age in ages:
        if not 0 <= age < length:
            raise ValueError(f"no token of {length} can be {age} steps old; ask for ages from 0 to {length - 1}")
    return ages


def _held(trace: Trace, layer: int, step: int, row: int, only_older: bool) -> Tensor:
    """[U, T]"""
    held = trace.held(layer, step)[row]
    return older(held, step) if only_older else held


def _shares(trace: Trace, step: int, row: int, only_older: bool = False) -> Tensor:
    """[L, T]: the share of each layer's units that hold each token after `step`."""
    layers = range(len(trace.deaths))
    return torch.stack([_held(trace, layer, step, row, only_older).float().mean(0) for layer in layers])


def _overlaps(shares: Tensor) -> Tensor:
    """[N, T] -> [N, N]: Jaccard, for shares the sum of minima over the sum of maxima; nan where both hold nothing."""
    minima = torch.stack([torch.minimum(shares, first).sum(1) for first in shares])
    sizes = shares.sum(1)
    return minima / (sizes[:, None] + sizes - minima)
