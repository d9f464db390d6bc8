"""`scan` compiled for the CPU: the same arguments and results as `eager.scan`.

PyTorch takes all exponentials of a chunk at once, on all cores. What is left is sequential in the rows; Numba compiles
it, without the GIL, and the units of a batch are spread over as many threads as PyTorch uses. There are two kernels:

`_dense` sums every row over the columns alive: any policy, window, sinks, padding.
`_sparse` is for scores without memory. Each row's sums are known for the case that nobody leaves; the few columns that
did are subtracted, and that moves no score down and none up by more than the row's largest factor, so only the columns
within that factor of the lowest can be the victim: those few are scored exactly.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ..policy import Policy
from ..scratch import scratch
from .eager import NEVER, Scanned

_NEVER = np.int64(NEVER)
_GONE = np.int32(2**31 - 1)  # the age of a column that is empty or has left, and that no limit reaches
_FAST = {"reassoc", "contract", "arcp", "nsz", "nnan"}
_jit: Any = numba.njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")


def scan(
    logits: Tensor,
    births: Tensor,
    steps: Tensor,
    scores: Tensor | None,
    policy: Policy,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Scanned:
    """See `eager.scan`. The weights are in scratch memory, gone with the next call; logits of hidden columns are lost."""
    scores = logits.new_zeros(births.shape) if scores is None else scores.clone()
    expiry = torch.empty(births.shape, dtype=torch.int64)
    forgetful = policy.momentum == 0 and policy.capacity is not None and window is None and sinks is None
    sparse = forgetful and _is_chunk(births, steps)
    if sparse:
        ahead = torch.ones(steps.shape[1], steps.shape[1], dtype=torch.bool).triu_(1)
        logits[..., -steps.shape[1] :].masked_fill_(ahead, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    sinks = top.new_empty(0) if sinks is None else sinks.detach().to(logits.dtype)
    if len(sinks):
        top = torch.maximum(top, sinks.view(-1, 1, 1))
    weights = scratch("weights", tuple(logits.shape), logits.dtype, logits.device)
    torch.sub(logits, top, out=weights).exp_()
    common = (births.contiguous(), steps.contiguous(), scores, expiry)
    limits = (policy.first, policy.last, NEVER if policy.capacity is None else policy.capacity)
    if sparse:
        mass = weights.sum(-1, keepdim=True)
        means = _head_means(weights, mass, births.shape[1])
        _each_unit(_sparse, births, (logits, weights, mass, means, *common), limits)
        return Scanned(weights, mass, expiry, scores)
    memory = weights.numpy().dtype.type(policy.momentum)
    more = (*limits, NEVER if window is None else window, memory)
    _each_unit(_dense, births, (logits, weights, top, *common, sinks), more)
    return Scanned(weights, None, expiry, scores)


def _is_chunk(births: Tensor, steps: Tensor) -> bool:
    """A full state, then the chunk's own tokens in order, no padding: the layout that `_sparse` takes."""
    old, new = births[..., : -steps.shape[1]], births[..., -steps.shape[1] :]
    whole = steps.shape[1] > 1 and bool((steps >= 0).all()) and bool((new == steps[:, None]).all())
    return whole and bool(((old >= 0) & (old < steps[:, None, :1])).all())


def _head_means(weights: Tensor, mass: Tensor, units: int) -> Tensor:
    """[B, U, C, N]: what each unit's scores would be if no column left."""
    batch, heads, rows, columns = weights.shape
    grouped = weights.view(batch, units, heads // units, rows, columns)
    share = mass.reciprocal().div_(heads // units).view(batch, units, heads // units, rows)
    return (share.permute(0, 1, 3, 2).unsqueeze(-2) @ grouped.transpose(2, 3)).squeeze(-2)


def _each_unit(kernel: Any, births: Tensor, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...]) -> None:
    arguments = (*(tensor.numpy() for tensor in tensors), *numbers)
    units = [(row, unit) for row in range(births.shape[0]) for unit in range(births.shape[1])]
    if len(units) == 1 or torch.get_num_threads() == 1:
        for row, unit in units:
            kernel(row, unit, *arguments)
    else:
        list(_pool(torch.get_num_threads()).map(lambda unit: kernel(*unit, *arguments), units))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="msrnn-scan")


@_jit
def _sparse(  # type: ignore[no-untyped-def]
    b, u, logits, weights, mass, means, births, steps, scores, expiry, first, last, capacity
):
    """One unit's chunk, scores without memory: only rows of columns that left are touched, and a few candidates."""
    heads, rows, columns = weights.shape[1] // births.shape[1], weights.shape[2], weights.shape[3]
    start = steps[b, 0]
    birth, score, end = births[b, u], scores[b, u], expiry[b, u]
    age = np.empty(columns, np.int32)  # from the chunk's first step on; GONE once a column has left, or if it never may
    alive = np.ones(columns, weights.dtype)
    lost = np.empty(rows, np.int64)
    gone = 0
    for n in range(columns):
        age[n] = birth[n] - start if birth[n] >= first else _GONE
        end[n] = _NEVER
    for c in range(rows):
        slack = 1.0
        for h in range(u * heads, (u + 1) * heads):
            slack = max(slack, _subtract(weights[b, h, c], logits[b, h, c], mass[b, h, c], lost[:gone], alive))
        if columns - rows + c + 1 - gone > capacity:
            inverse = 1 / mass[b, u * heads : (u + 1) * heads, c, 0]
            victim = _cheapest(means[b, u, c], weights[b, u * heads : (u + 1) * heads, c], inverse, age, c - last, slack)
            end[victim] = start + c
            age[victim] = _GONE
            alive[victim] = 0
            lost[gone] = victim
            gone += 1
    score[:] = 0
    for h in range(u * heads, (u + 1) * heads):
        for n in range(columns):
            score[n] += weights[b, h, rows - 1, n] / (mass[b, h, rows - 1, 0] * heads)


@_jit
def _subtract(row, logits, mass, lost, alive):  # type: ignore[no-untyped-def]
    """Take lost columns out of a row and its mass; by what factor the others' share grew."""
    before, taken = mass[0], row.dtype.type(0)
    for n in lost:
        taken += row[n]
        row[n] = 0
    mass[0] = before - taken
    if 2 * taken > before:  # too little is left for a difference to be exact
        mass[0] = row.sum()
    if mass[0] < 1e-30:  # a column that left held the maximum: start again from those alive
        mass[0] = _again(row, logits, alive)
        return np.inf
    return before / mass[0]


@_jit
def _cheapest(means, rows, inverse, age, limit, slack):  # type: ignore[no-untyped-def]
    """The free column with the lowest exact score, the older of equals; scores without losses are `means`."""
    low = means.dtype.type(np.inf)
    for n in range(len(means)):
        low = min(low, means[n] if age[n] <= limit else means.dtype.type(np.inf))
    bound = np.inf if slack == np.inf else low * slack * 1.0001  # rounding of the means, with room to spare
    best, victim = np.inf, -1
    for n in range(len(means)):
        if means[n] <= bound and age[n] <= limit:
            score = 0.0
            for h in range(len(rows)):
                score += rows[h, n] * inverse[h]
            if victim < 0 or score < best or (score == best and age[n] < age[victim]):
                best, victim = score, n
    return victim


@_jit
def _dense(  # type: ignore[no-untyped-def]
    b, u, logits, weights, top, births, steps, scores, expiry, sinks, first, last, capacity, window, momentum
):
    """One unit's chunk. `age` counts from the chunk's first step: a column is visible from its age on, until GONE."""
    heads, rows, columns = logits.shape[1] // births.shape[1], logits.shape[2], logits.shape[3]
    start = _first_step(steps[b])
    age = np.empty(columns, np.int32)
    newcomer = np.full(rows, -1, np.int64)  # the column that a row brings
    alive = np.zeros(columns, weights.dtype)
    total = np.empty(columns, weights.dtype)
    birth, score, end = births[b, u], scores[b, u], expiry[b, u]
    held = 0
    for n in range(columns):
        end[n] = _NEVER if birth[n] >= 0 else -1
        age[n] = birth[n] - start if birth[n] >= 0 else _GONE
        if 0 <= age[n] < rows:
            newcomer[age[n]] = n
        elif birth[n] >= 0 and start - birth[n] >= window:
            age[n] = _GONE
            end[n] = birth[n] + window - 1
        elif age[n] < 0:
            alive[n] = 1
            held += 1
    for c in range(rows):
        now = steps[b, c] - start
        if steps[b, c] < 0:
            for h in range(u * heads, (u + 1) * heads):
                weights[b, h, c, :] = 0
            continue
        alive[newcomer[now]] = 1
        held += 1
        total[:] = 0
        for h in range(u * heads, (u + 1) * heads):
            _normalise(weights[b, h, c], logits[b, h, c], top[b, h, c, 0], alive, total, sinks[h : h + 1])
        for n in range(columns):
            score[n] = momentum * score[n] + total[n] / heads
        if window != _NEVER and steps[b, c] - window + 1 >= 0:
            held -= _leave(age, alive, end, now - window + 1, steps[b, c])
        if held > capacity:
            held -= _leave(age, alive, end, _lowest(score, age, birth, first, now - last), steps[b, c])


@_jit
def _first_step(steps):  # type: ignore[no-untyped-def]
    for step in steps:
        if step >= 0:
            return step
    return 0


@_jit
def _normalise(row, logits, top, alive, total, sink):  # type: ignore[no-untyped-def]
    """The row of exponentials becomes weights over the columns alive, and they are added to `total`."""
    mass = row.dtype.type(0)
    for n in range(len(row)):
        row[n] *= alive[n]
        mass += row[n]
    if len(sink):
        mass += np.exp(sink[0] - top)
    if mass < 1e-30:  # a column that is dead or to come held the maximum: start again from the visible ones
        mass = _again(row, logits, alive)
    scale = 1 / mass
    for n in range(len(row)):
        row[n] *= scale
        total[n] += row[n]


@_jit
def _again(row, logits, alive):  # type: ignore[no-untyped-def]
    top = -np.inf
    for n in range(len(row)):
        if alive[n] > 0:
            top = max(top, logits[n])
    mass = row.dtype.type(0)
    for n in range(len(row)):
        row[n] = np.exp(logits[n] - top) if alive[n] > 0 else 0
        mass += row[n]
    return mass


@_jit
def _lowest(score, age, birth, first, limit):  # type: ignore[no-untyped-def]
    """The age of the free column with the lowest score, the older of equals."""
    low = score.dtype.type(np.inf)
    for n in range(len(score)):
        free = (age[n] <= limit) & (birth[n] >= first)
        low = min(low, score[n] if free else score.dtype.type(np.inf))
    oldest = _GONE
    for n in range(len(score)):
        free = (age[n] <= limit) & (birth[n] >= first) & (score[n] <= low)
        oldest = min(oldest, age[n] if free else _GONE)
    return oldest


@_jit
def _leave(age, alive, end, leaving, step):  # type: ignore[no-untyped-def]
    """The column of that age leaves after this step; how many did (none, if it had left before)."""
    for n in range(len(age)):
        if age[n] == leaving:
            age[n], alive[n], end[n] = _GONE, 0, step
            return 1
    return 0
