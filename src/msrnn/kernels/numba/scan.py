"""`scan` compiled for the CPU: the same arguments and results as `kernels/torch/scan.py`.

PyTorch takes all exponentials of a chunk at once, on all cores. What is left is sequential in the rows: sums over the
visible columns, the mean over heads, the victim. Numba compiles that to loops over columns that vectorise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.attention import LARGEST_SUM, SMALLEST_SUM, Attention, OutOfRange
from ...core.buffers import buffer
from ...core.slots import NEVER, Columns
from ...policy import Policy
from ..torch.scan import Scan, shares_of
from .compile import FAST_MATH, jit
from .threads import parallel_for, units_of

_NEVER = np.int64(NEVER)
_GONE = np.int32(2**31 - 1)  # the age of a column that is empty or has left: past every limit
_jit = jit(FAST_MATH)


def scan(
    logits: Tensor,
    columns: Columns,
    steps: Tensor,
    policy: Policy,
    attention: Attention,
    exponentials: bool = False,
) -> Scan:
    """See `kernels/torch/scan.py`. The weights are in a buffer: gone with the next call.

    From logits, each row's maximum is subtracted first, and a row whose visible sum vanishes even so is done again.
    Exponentials are used in place: fewer passes over memory, right for logits up to about 80, `OutOfRange` for others.
    """
    positions, sinks, shares = columns.positions, attention.sinks, shares_of(columns, logits, attention)
    scores = logits.new_zeros(positions.shape) if columns.scores is None else columns.scores.clone()
    expiry = torch.empty_like(positions, memory_format=torch.contiguous_format)
    sink = logits.new_zeros(1, 1, 1) if sinks is None else sinks.detach().to(logits.dtype).view(-1, 1, 1)
    total = logits.new_empty(*logits.shape[:3], 1)  # begins with the sinks' share, if there are sinks
    top = total
    if not exponentials:
        top = logits.amax(-1, keepdim=True)
        top = top if sinks is None else torch.maximum(top, sink)
        weights = buffer("weights", tuple(logits.shape), logits.dtype, logits.device)
        torch.sub(logits, top, out=weights).exp_()
        torch.sub(sink, top, out=total).exp_()
    else:
        weights = logits
        if sinks is not None:
            total.copy_(sink.exp())
    failed = np.zeros(positions.shape[:2], np.bool_)
    tensors = (logits, weights, total, positions.contiguous(), steps.contiguous(), scores, _bits(scores), expiry)
    arguments = (
        *(tensor.numpy() for tensor in tensors),
        failed,
        sink.numpy(),
        gains_array(columns.gains, logits.dtype),
        None if shares is None else shares.counts.numpy(),
        top.numpy(),
        sinks is not None,
        not exponentials,
        *limits_of(policy, attention, weights.numpy().dtype.type),
    )
    parallel_for(scan_unit, units_of(positions), weights.numel(), *arguments)
    if failed.any():
        raise OutOfRange("a row's exponentials overflowed or vanished")
    return Scan(weights, total, expiry, scores, residual=None if shares is None else shares.residual())


def _bits(scores: Tensor) -> Tensor:
    return scores.view(torch.int32 if scores.itemsize == 4 else torch.int64)


def gains_array(gains: Tensor | None, dtype: torch.dtype) -> np.ndarray | None:
    """gains [B, G, N] as the kernel takes them; None compiles a kernel without gains."""
    return None if gains is None else gains.to(dtype).contiguous().numpy()


def limits_of(policy: Policy, attention: Attention, number: Any) -> tuple[Any, ...]:
    """first, last, capacity, window, momentum and the residual's decay as `scan_unit` takes them."""
    capacity = NEVER if policy.capacity is None else policy.capacity
    window = NEVER if attention.window is None else attention.window
    return policy.first, policy.last, capacity, window, number(policy.momentum), number(policy.residual or 0)


@_jit
def scan_unit(  # type: ignore[no-untyped-def]
    b,
    u,
    logits,
    weights,
    totals,
    positions,
    steps,
    scores,
    bits,
    expiry,
    failed,
    sinks,
    gains,
    counts,
    tops,
    has_sinks,
    has_logits,
    first,
    last,
    capacity,
    window,
    momentum,
    decay,
):
    """One unit's chunk. `age` is a position relative to the chunk's first step, GONE once the column has left.

    `counts` [B, U, N + 1]: how much each column counts in the residual, if there is one (`kernels/torch/residual.py`).
    """
    heads, rows = logits.shape[1] // positions.shape[1], logits.shape[2]
    columns = logits.shape[3] - (counts is not None)
    start = _first_step(steps[b])
    age = np.empty(columns, np.int32)
    free = np.empty(columns, np.int32)  # the age again, but GONE for columns that may never be chosen
    newcomer = np.full(rows, -1, np.int64)  # the column that a row brings
    alive = np.zeros(columns, weights.dtype)
    mean = np.empty(columns, weights.dtype)
    position, score, end = positions[b, u], scores[b, u], expiry[b, u]
    held, reach = 0, 0  # columns from `reach` on come later
    for n in range(columns):
        end[n] = _NEVER if position[n] >= 0 else -1
        age[n] = position[n] - start if position[n] >= 0 else _GONE
        if 0 <= age[n] < rows:
            newcomer[age[n]] = n
        elif position[n] >= 0 and start - position[n] >= window:
            age[n] = _GONE
            end[n] = position[n] + window - 1
        elif age[n] < 0:
            alive[n] = 1
            held += 1
            reach = n + 1
        free[n] = age[n] if position[n] >= first else _GONE
    for c in range(rows):
        now = steps[b, c] - start
        if steps[b, c] < 0:
            for h in range(u * heads, (u + 1) * heads):
                weights[b, h, c, :] = 0
                totals[b, h, c] = 1
            continue
        if now < 0 or now >= rows or newcomer[now] < 0:  # positions of other steps: nothing may be written by them
            failed[b, u] = True
            return
        alive[newcomer[now]] = 1
        held += 1
        reach = max(reach, newcomer[now] + 1)
        mean[:] = 0
        for h in range(u * heads, (u + 1) * heads):
            row = weights[b, h, c, :reach]
            weights[b, h, c, reach:] = 0
            number, mixed = logits.dtype.type(0), logits.dtype.type(-np.inf)
            if counts is not None:
                number, mixed = _residual(logits[b, h, c], counts[b, u])
            if not _normalise(row, totals[b, h, c], alive, has_sinks):
                if not has_logits:
                    failed[b, u] = True
                    return
                sink = sinks[h % len(sinks), 0, 0]
                tops[b, h, c, 0] = _normalise_again(
                    row, totals[b, h, c], logits[b, h, c], alive, has_sinks, sink, mixed
                )
            extra = weights.dtype.type(0)
            if number > 0:
                extra = number * np.exp(mixed - tops[b, h, c, 0])
                totals[b, h, c, 0] += extra
            if gains is None:
                _add(mean, row, totals[b, h, c, 0])
            else:
                _add_with_gains(mean, row, totals[b, h, c, 0], gains[b, h * gains.shape[1] // logits.shape[1]])
            if counts is not None:
                _spread(weights[b, h, c], counts[b, u], number, extra)
        for n in range(columns):
            score[n] = momentum * score[n] + mean[n] / heads
        if window != _NEVER and steps[b, c] - window + 1 >= 0:
            held -= _leave(age, free, alive, end, now - window + 1, steps[b, c])
        if held > capacity:
            leaving = _lowest(bits[b, u], free, np.int32(now - last))
            if counts is not None:
                _blend(counts[b, u], age, leaving, decay)
            held -= _leave(age, free, alive, end, leaving, steps[b, c])


@_jit
def _residual(logits, counts):  # type: ignore[no-untyped-def]
    """The number of tokens in the residual, and the logit of its mean key."""
    number, mean = logits.dtype.type(0), logits.dtype.type(0)
    for n in range(len(counts)):
        number += counts[n]
        mean += counts[n] * logits[n]
    return number, mean / number if number > 0 else logits.dtype.type(-np.inf)


@_jit
def _spread(row, counts, number, extra):  # type: ignore[no-untyped-def]
    """The residual's weight goes to the columns in it."""
    if number > 0:
        extra /= number
        for n in range(len(counts)):
            row[n] += extra * counts[n]


@_jit
def _blend(counts, age, leaving, decay):  # type: ignore[no-untyped-def]
    """The column of that age joins the residual."""
    for n in range(len(age)):
        if age[n] == leaving:
            for m in range(len(counts)):
                counts[m] *= decay
            counts[n] = 1
            return


@_jit
def _first_step(steps):  # type: ignore[no-untyped-def]
    for step in steps:
        if step >= 0:
            return step
    return 0


@_jit
def _normalise(row, total, alive, has_sinks):  # type: ignore[no-untyped-def]
    """Zero what is not alive and sum the rest; `total` may hold a sink's share already.

    False if the sum is out of the range that can be divided by.
    """
    left = total[0] if has_sinks else row.dtype.type(0)
    for n in range(len(row)):
        row[n] *= alive[n]
        left += row[n]
    total[0] = left
    return SMALLEST_SUM < left < LARGEST_SUM


@_jit
def _normalise_again(row, total, logits, alive, has_sinks, sink, residual):  # type: ignore[no-untyped-def]
    """An evicted column held the maximum: start again from the visible ones; what is subtracted now.

    residual: the logit of its mean key, -inf if it is empty.
    """
    top = max(sink, residual) if has_sinks else residual
    for n in range(len(row)):
        if alive[n] > 0:
            top = max(top, logits[n])
    left = np.exp(sink - top) if has_sinks else 0.0
    for n in range(len(row)):
        row[n] = np.exp(logits[n] - top) if alive[n] > 0 else 0
        left += row[n]
    total[0] = left
    return top


@_jit
def _add(mean, row, total):  # type: ignore[no-untyped-def]
    scale = 1 / total
    for n in range(len(row)):
        mean[n] += row[n] * scale


@_jit
def _add_with_gains(mean, row, total, gain):  # type: ignore[no-untyped-def]
    scale = 1 / total
    for n in range(len(row)):
        mean[n] += row[n] * scale * gain[n]


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
