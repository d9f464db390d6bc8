"""`scan` in Triton for policies with a residual: one program for every unit, row after row.

A residual changes with every eviction, and with it every softmax after it. So nothing can be prepared ahead, as
`scan_kernel.py` does; a row is read once, and all that lasts from row to row stays in registers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.attention import Attention
from ...core.slots import NEVER, Columns
from ...policy import Policy
from ..torch import scan as torch_scan
from ..torch.scan import Scan, shares_of

_MOST_COLUMNS = 2**13  # that one program can hold
_TILE = 1024  # elements of [heads, columns] that a warp works on at a time
_NEVER = tl.constexpr(NEVER)
_OLD = tl.constexpr(2**62)  # older than any position is not: of columns that may not be chosen


def scan(logits: Tensor, columns: Columns, steps: Tensor, policy: Policy, attention: Attention) -> Scan:
    """See `kernels/torch/scan.py`. Nothing waits for the device."""
    batch, heads, rows, size = logits.shape
    if size > _MOST_COLUMNS:
        return torch_scan.scan(logits, columns, steps, policy, attention)
    shares = shares_of(columns, logits, attention)
    assert shares is not None
    units, sinks, gains = columns.positions.shape[1], attention.sinks, columns.gains
    wide, members = triton.next_power_of_2(size), heads // units
    warps = max(4, min(16, triton.next_power_of_2(members) * wide // _TILE))
    scores = logits.new_zeros(columns.positions.shape) if columns.scores is None else columns.scores.clone()
    weights = torch.empty_like(logits, memory_format=torch.contiguous_format)
    expiry = torch.empty_like(columns.positions, memory_format=torch.contiguous_format)
    scan_rows[(batch * units,)](
        *(logits.contiguous(), weights, columns.positions.contiguous(), steps.contiguous(), scores, expiry),
        *(shares.counts, logits if sinks is None else sinks.detach().to(logits.dtype)),
        *(logits if gains is None else gains.contiguous(), units, rows, size - 1),
        *(2**31 - 1 if policy.capacity is None else policy.capacity, policy.first, policy.last),
        *(attention.window or 0, decays(policy, logits)),
        MEMBERS=members,
        WINDOW=attention.window is not None,
        SINKS=sinks is not None,
        GAINS=gains is not None,
        GROUP=1 if gains is None else heads // gains.shape[1],
        WIDE=wide,
        SOME=max(1, min(triton.next_power_of_2(members), warps * _TILE // wide)),
        num_warps=warps,
    )
    return Scan(weights, None, expiry, scores, residual=shares.residual())


def decays(policy: Policy, like: Tensor) -> Tensor:
    """Momentum and the residual's decay on the device: as arguments they would be rounded to float32."""
    return _decays(policy.momentum, policy.residual or 0.0, like.dtype, like.device)


@cache
def _decays(momentum: float, decay: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([momentum, decay], dtype=dtype, device=device)


@triton.jit(do_not_specialize=["units", "rows", "columns", "capacity", "first", "last", "window"])
def scan_rows(
    logits, weights, positions, steps, scores, expiry, counts, sinks, gains, units, rows, columns,
    capacity, first, last, window, decays,
    MEMBERS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, GAINS: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """One unit's chunk. Column number `columns` is the residual as it was before; `counts` says who is in it now."""
    program = tl.program_id(0).to(tl.int64)
    b, u = program // units, program % units
    n = tl.arange(0, WIDE)
    inside = n < columns
    heads = program * MEMBERS  # the unit's first, over the whole batch
    gains += (b * units + u) * (MEMBERS // GROUP) * columns
    at = program * columns + n
    position = tl.load(positions + at, mask=inside, other=-1)
    score = tl.load(scores + at, mask=inside, other=0.0)
    count = tl.load(counts + program * (columns + 1) + n, mask=n <= columns, other=0.0)
    left = tl.where(position < 0, -1, _NEVER)
    if WINDOW:
        left = tl.minimum(left, tl.where(position < 0, -1, position + window - 1))
    momentum, decay = tl.load(decays), tl.load(decays + 1)
    latest = tl.full([], -1, tl.int64)
    for row in range(rows):
        now = tl.load(steps + b * rows + row)
        latest = tl.maximum(latest, now)
        visible = (position >= 0) & (position <= now) & (now <= left)
        mean = _attend(
            logits, weights, sinks, gains, heads, u, row, rows, columns, visible, count, now,
            MEMBERS, SINKS, GAINS, GROUP, WIDE, SOME,
        )  # fmt: skip
        score = tl.where(now >= 0, momentum * score + mean, score)
        staying = visible & (now < left)
        full = (tl.sum(staying.to(tl.int32), 0) > capacity) & (now >= 0)
        free = staying & (position >= first) & (position <= now - last)
        free = tl.where(tl.max(free.to(tl.int32), 0) > 0, free, staying)
        ranked = tl.where(free & (score == score), score, float("inf"))
        _, _, place = tl.reduce((ranked, tl.where(free, position, _OLD), n), 0, _lowest)
        victim = full & (n == place)
        left = tl.where(victim, now, left)
        count = tl.where(victim, 1.0, tl.where(full, decay * count, count)).to(count.dtype)
    tl.store(expiry + at, tl.where(left <= latest, left, _NEVER), mask=inside)
    tl.store(scores + at, score, mask=inside)
    tl.store(counts + program * (columns + 1) + n, count, mask=n <= columns)


@triton.jit
def _attend(
    logits, weights, sinks, gains, heads, unit, row, rows, columns, visible, count, now,
    MEMBERS: tl.constexpr, SINKS: tl.constexpr, GAINS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """The row's softmaxes are written, the residual's weight in the columns that are in it -> their mean over heads."""
    n = tl.arange(0, WIDE)
    number = tl.sum(count, 0)
    share = count / tl.maximum(number, 1.0)
    mean = tl.zeros([WIDE], count.dtype)
    for start in range(0, MEMBERS, SOME):
        h = start + tl.arange(0, SOME)
        mine = (h < MEMBERS)[:, None] & (n <= columns)[None, :]
        at = ((heads + h)[:, None] * rows + row) * (columns + 1) + n[None, :]
        logit = tl.load(logits + at, mask=mine, other=0.0)
        blended = tl.sum(tl.where((count > 0)[None, :], share[None, :] * logit, 0.0), 1)
        blended = tl.where((number > 0) & (now >= 0), blended + tl.log(tl.maximum(number, 1.0)), -float("inf"))
        seen = tl.where(visible[None, :] & mine, logit, -float("inf"))
        top = tl.maximum(tl.max(seen, 1), blended)
        sink = tl.full([SOME], -float("inf"), count.dtype)
        if SINKS:
            sink = tl.load(sinks + unit * MEMBERS + h, mask=h < MEMBERS, other=-float("inf"))
            top = tl.maximum(top, sink)
        top = tl.where(top > -float("inf"), top, 0.0)  # a row of padding sees nothing
        weight, rest = tl.exp(seen - top[:, None]), tl.exp(blended - top)
        whole = tl.sum(weight, 1) + rest + tl.exp(sink - top)
        whole = tl.where(whole > 0, whole, 1.0)
        weight /= whole[:, None]
        tl.store(weights + at, weight + (rest / whole)[:, None] * share[None, :], mask=mine)
        if GAINS:
            own = gains + (h // GROUP)[:, None] * columns + n[None, :]
            weight *= tl.load(own, mask=(h < MEMBERS)[:, None] & (n < columns)[None, :], other=0.0)
        mean += tl.sum(weight, 0)
    return mean / MEMBERS


@triton.jit
def _lowest(a, age, i, b, other, j):
    """The lowest and where it is; the older of equals."""
    less = (a < b) | ((a == b) & (age < other))
    return tl.where(less, a, b), tl.where(less, age, other), tl.where(less, i, j)
