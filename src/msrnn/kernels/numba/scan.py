"""`scan` compiled for the CPU: the same arguments and results as `eager.scan`.

PyTorch takes all exponentials of a chunk at once, on all cores. What is left is sequential in the rows: sums over the
columns still alive, the head mean, the victim. Numba compiles that to loops over columns that vectorise; it releases
the GIL, and the units of a batch are spread over as many threads as PyTorch uses.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ...core.buffers import scratch
from ...policy import Policy
from ..torch.scan import NEVER, Scanned, Vanished

_NEVER = np.int64(NEVER)
_GONE = np.int32(2**31 - 1)  # the age of a column that is empty or has left, and that no limit reaches
FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan: a row with an overflow must be seen
WORTH = 1 << 20  # about 0.7 ms of one core
_jit: Any = numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")


def scan(
    logits: Tensor,
    births: Tensor,
    steps: Tensor,
    scores: Tensor | None,
    policy: Policy,
    window: int | None = None,
    sinks: Tensor | None = None,
    exponentials: bool = False,
) -> Scanned:
    """See `eager.scan`. The weights are in scratch memory: gone with the next call.

    From logits, a row's maximum is taken from it first, and a row whose visible mass vanishes even so is done again.
    Where `logits` holds exponentials already they are used in place: some passes over memory less, right for logits
    up to about 80, and `Vanished` is raised for others.
    """
    scores = logits.new_zeros(births.shape) if scores is None else scores.clone()
    expiry = torch.empty_like(births, memory_format=torch.contiguous_format)
    sunk = logits.new_zeros(1, 1, 1) if sinks is None else sinks.detach().to(logits.dtype).view(-1, 1, 1)
    mass = logits.new_empty(*logits.shape[:3], 1)  # holds the sinks' share already, if there are sinks
    if not exponentials:
        top = logits.amax(-1, keepdim=True)
        top = top if sinks is None else torch.maximum(top, sunk)
        weights = scratch("weights", tuple(logits.shape), logits.dtype, logits.device)
        torch.sub(logits, top, out=weights).exp_()
        torch.sub(sunk, top, out=mass).exp_()
    else:
        weights = logits
        if sinks is not None:
            mass.copy_(sunk.exp())
    bits = scores.view(torch.int32 if scores.itemsize == 4 else torch.int64)
    failed = np.zeros(births.shape[:2], np.bool_)
    tensors = (logits, weights, mass, births.contiguous(), steps.contiguous(), scores, bits, expiry)
    arguments = (
        *(tensor.numpy() for tensor in tensors),
        failed,
        sunk.numpy(),
        sinks is not None,
        not exponentials,
        policy.first,
        policy.last,
        NEVER if policy.capacity is None else policy.capacity,
        NEVER if window is None else window,
        np.float32(policy.momentum) if weights.itemsize == 4 else np.float64(policy.momentum),
    )
    spread(scan_unit, units(births), weights.numel(), *arguments)
    if failed.any():
        raise Vanished("a row's exponentials overflowed or vanished")
    return Scanned(weights, mass, expiry, scores)


def units(births: Tensor) -> list[tuple[int, int]]:
    """Every (row, unit) of births [B, U, N]: the parts that compiled passes go through."""
    return [(row, unit) for row in range(births.shape[0]) for unit in range(births.shape[1])]


def spread(work: Any, parts: list[tuple[int, int]], elements: int, *arguments: Any) -> None:
    """work(*part, *arguments) for every part; `work` releases the GIL.

    On as many threads as PyTorch uses, this one among them, if there are enough `elements` to be worth waking others.
    """
    threads = min(torch.get_num_threads(), len(parts)) if elements >= WORTH else 1
    left = iter(parts)  # the GIL makes next() safe: each part is taken once

    def drain() -> None:
        for part in left:
            work(*part, *arguments)

    others = [_pool(threads - 1).submit(drain) for _ in range(threads - 1)]
    drain()
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="msrnn-scan", initializer=_unbind)


def _unbind() -> None:
    """Let this thread run wherever one of this process may.

    A thread inherits the cores of the one that made it, and where OpenMP binds PyTorch's threads (as vLLM has it) that
    is one core: all of the pool would share it with their maker.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            cores |= os.sched_getaffinity(int(task))
    os.sched_setaffinity(0, cores)


@_jit
def scan_unit(  # type: ignore[no-untyped-def]
    b,
    u,
    logits,
    weights,
    mass,
    births,
    steps,
    scores,
    bits,
    expiry,
    failed,
    sinks,
    sinking,
    careful,
    first,
    last,
    capacity,
    window,
    momentum,
):
    """One unit's chunk. `age` counts from the chunk's first step: a column is visible from its age on, until GONE."""
    heads, rows, columns = logits.shape[1] // births.shape[1], logits.shape[2], logits.shape[3]
    start = _first_step(steps[b])
    age = np.empty(columns, np.int32)
    free = np.empty(columns, np.int32)  # the age again, but GONE for columns that may never be chosen
    newcomer = np.full(rows, -1, np.int64)  # the column that a row brings
    alive = np.zeros(columns, weights.dtype)
    total = np.empty(columns, weights.dtype)
    birth, score, end = births[b, u], scores[b, u], expiry[b, u]
    held, reach = 0, 0  # columns from `reach` on are yet to come
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
            reach = n + 1
        free[n] = age[n] if birth[n] >= first else _GONE
    for c in range(rows):
        now = steps[b, c] - start
        if steps[b, c] < 0:
            for h in range(u * heads, (u + 1) * heads):
                weights[b, h, c, :] = 0
                mass[b, h, c] = 1
            continue
        alive[newcomer[now]] = 1
        held += 1
        reach = max(reach, newcomer[now] + 1)
        total[:] = 0
        for h in range(u * heads, (u + 1) * heads):
            weights[b, h, c, reach:] = 0
            if not _normalise(weights[b, h, c, :reach], mass[b, h, c], alive, total, sinking):
                if not careful:
                    failed[b, u] = True
                    return
                sink = sinks[h % len(sinks), 0, 0]
                _again(weights[b, h, c, :reach], mass[b, h, c], logits[b, h, c], alive, total, sinking, sink)
        for n in range(columns):
            score[n] = momentum * score[n] + total[n] / heads
        if window != _NEVER and steps[b, c] - window + 1 >= 0:
            held -= _leave(age, free, alive, end, now - window + 1, steps[b, c])
        if held > capacity:
            held -= _leave(age, free, alive, end, _lowest(bits[b, u], free, np.int32(now - last)), steps[b, c])


@_jit
def _first_step(steps):  # type: ignore[no-untyped-def]
    for step in steps:
        if step >= 0:
            return step
    return 0


@_jit
def _normalise(row, mass, alive, total, sinking):  # type: ignore[no-untyped-def]
    """Hide what is not alive, find the row's mass (a sink's share is in it already), add the weights to `total`.

    False, and nothing added, if the mass is no number to divide by.
    """
    left = mass[0] if sinking else row.dtype.type(0)
    for n in range(len(row)):
        row[n] *= alive[n]
        left += row[n]
    if not 1e-30 < left < 1e37:
        return False
    scale = 1 / left
    for n in range(len(row)):
        total[n] += row[n] * scale
    mass[0] = left
    return True


@_jit
def _again(row, mass, logits, alive, total, sinking, sink):  # type: ignore[no-untyped-def]
    """A hidden column held the maximum: start again from the visible ones."""
    top = sink if sinking else -np.inf
    for n in range(len(row)):
        if alive[n] > 0:
            top = max(top, logits[n])
    left = np.exp(sink - top) if sinking else 0.0
    for n in range(len(row)):
        row[n] = np.exp(logits[n] - top) if alive[n] > 0 else 0
        left += row[n]
    for n in range(len(row)):
        total[n] += row[n] / left
    mass[0] = left


@_jit
def _lowest(bits, free, limit):  # type: ignore[no-untyped-def]
    """The age of the free column with the lowest score, the older of equals.

    Scores are not negative, so their bits order as they do, and a minimum of integers vectorises.
    """
    low = bits.dtype.type(np.iinfo(bits.dtype).max)
    for n in range(len(free)):
        low = min(low, bits[n] if free[n] <= limit else low)
    oldest = _GONE
    for n in range(len(free)):
        oldest = min(oldest, free[n] if bits[n] == low and free[n] <= limit else _GONE)
    return oldest


@_jit
def _leave(age, free, alive, end, leaving, step):  # type: ignore[no-untyped-def]
    """The column of that age leaves after this step; how many did (none, if it had left before)."""
    for n in range(len(age)):
        if age[n] == leaving:
            age[n], free[n], alive[n], end[n] = _GONE, _GONE, 0, step
            return 1
    return 0
