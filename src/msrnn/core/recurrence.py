"""The recurrence of one layer over many tokens, in chunks: exactly the token-by-token result, not its speed.

Within a chunk the state changes by one slot a step, so every column that can matter is known at the start: the state
and the chunk. One matmul gives all logits, a light scan decides who leaves when, one matmul gives the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import kernels as ops
from ..kernels import NEVER, Vanished
from ..kernels.torch.scan import Scanned, put
from ..policy import Policy
from .attention import Attention, mix
from .reference import Prompt
from .slots import State, decides_by_age
from .workspace import Columns

CHUNK = 128
Advanced = tuple[Tensor, Tensor | None]  # expiry, scores
OnEvict = Callable[[Tensor, Tensor], None]  # births [B, U, N], expiry [B, U, N] of a chunk's columns


def run(
    state: State,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    real: Tensor | None = None,
    prompt: Prompt = "recurrent",
    chunk: int = CHUNK,
    on_evict: OnEvict | None = None,
) -> Tensor:
    """query [B, H, T, D], key [B, G, T, D], value [B, G, T, V], real [B, T] (false: padding) -> [B, H, T, V].

    The state moves on by T tokens, in place. Outputs at padding are finite and mean nothing.
    """
    if state.keys.shape[1] != key.shape[1]:  # every query head decides alone, so each has rows of its own
        share = state.keys.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    total = query.shape[2]
    if total == 1:
        return _step(state, query, key, value, policy, attention, real, on_evict)
    columns = Columns(state, key, value, total if prompt == "oneshot" else chunk)
    output = value.new_empty(len(query), total, query.shape[1], value.shape[3]).transpose(1, 2)  # as models go on
    advance = _oneshot if prompt == "oneshot" else _chunk
    steps, start, reader = _steps(state, real, total), 0, None
    while start < total:
        if prompt == "recurrent" and _quick(state, query, policy, attention, min(chunk, total - start)):
            from ..kernels.numba.chunk import Reader

            reader = reader or Reader(columns, (query, key, value), steps, policy, attention, output)
            start = reader.read(start, chunk, on_evict)
            continue
        size = total if prompt == "oneshot" else _piece(state, policy, attention, total - start, chunk)
        part = slice(start, start + size)
        columns.add(key[:, :, part], value[:, :, part], steps[:, part])
        expiry, scores = advance(
            output[:, :, part], columns, query[:, :, part], steps[:, part], policy, attention, chunk
        )
        if on_evict is not None:
            on_evict(columns.births, expiry)
        columns.keep(expiry, scores)
        state.fed += size
        start += size
    state.seen += _arrived(steps)
    columns.close()
    return output


def _piece(state: State, policy: Policy, attention: Attention, left: int, chunk: int) -> int:
    """How many tokens to take next: all that surely fit where nothing leaves, else a chunk."""
    if state.scores is None and attention.window is None:
        room = left if policy.capacity is None else policy.capacity - state.fed
        if room >= chunk:
            return min(left, room if state.fed == 0 else min(room, 8 * chunk))
    return min(left, chunk)


def _nobody_leaves(state: State, policy: Policy, attention: Attention, size: int) -> bool:
    """Whether nothing has to be decided in the next `size` tokens."""
    fits = policy.capacity is None or state.fed + size <= policy.capacity
    return fits and state.scores is None and attention.window is None


def _quick(state: State, query: Tensor, policy: Policy, attention: Attention, size: int) -> bool:
    """Whether the next chunk is one for `quick`, which knows the plain kinds of attention and the wide dtypes."""
    able = ops.quick(query.device.type) and query.dtype in (torch.float32, torch.float64)
    able = able and type(attention) is Attention and not state.careful
    return able and not _nobody_leaves(state, policy, attention, size)


def _expiry_by_age(births: Tensor, policy: Policy, window: int | None) -> Tensor:
    """[...]: the last step each position is visible at, for a policy that decides by age."""
    expiry = torch.full_like(births, NEVER)
    if policy.capacity is not None and (window is None or policy.capacity < window - 1):
        expiry = torch.where(births < policy.first, expiry, births + policy.last)
    if window is not None:
        expiry = torch.minimum(expiry, births + (window - 1))
    return torch.where(births < 0, -1, expiry)


def _steps(state: State, real: Tensor | None, size: int) -> Tensor:
    """[B, C]: the step of each new token, counting real tokens only; -1 for padding."""
    if real is None:
        return state.seen[:, None] + torch.arange(size, device=state.seen.device)
    return torch.where(real, state.seen[:, None] + real.cumsum(1) - 1, -1)


def _chunk(
    output: Tensor, columns: Columns, query: Tensor, steps: Tensor, policy: Policy, attention: Attention, chunk: int
) -> Advanced:
    """A chunk under the recurrence: its outputs are written, its expiry and scores returned."""
    keys, values, births, state = columns.keys, columns.values, columns.births, columns.state
    nobody_leaves = _nobody_leaves(state, policy, attention, query.shape[2])
    if nobody_leaves or decides_by_age(policy, attention.window):
        expiry = _expiry_by_age(births, replace(policy, capacity=None) if nobody_leaves else policy, attention.window)
        causal = nobody_leaves and state.fed == 0 and bool((steps >= 0).all())
        _attend(output, state, query, keys, values, attention, (births, expiry, steps), causal)
        return torch.where(expiry <= steps.amax(1)[:, None, None], expiry, NEVER), None
    scanned = _scan(state, query, keys, births, steps, columns.scores, policy, attention)
    mix(scanned.weights, values, scanned.mass, out=output)
    return scanned.expiry, scanned.scores


def _scan(
    state: State,
    query: Tensor,
    keys: Tensor,
    births: Tensor,
    steps: Tensor,
    scores: Tensor | None,
    policy: Policy,
    attention: Attention,
) -> Scanned:
    """A chunk's evictions by all heads, and the weights of those that this process holds.

    The quick scan for as long as this layer's logits allow it, the careful one from then on.
    """
    rest = (births, steps, scores, policy, attention.window, attention.sinks)
    scanned = None
    if not state.careful and ops.quick(query.device.type):
        try:
            weights = attention.gather(attention.logits(query, keys, exponentials=True))
            scanned = ops.scan(weights, *rest, exponentials=True)
        except Vanished:
            state.careful = True
    if scanned is None:
        scanned = ops.scan(attention.gather(attention.logits(query, keys)), *rest)
    mass = None if scanned.mass is None else attention.own(scanned.mass)
    return scanned._replace(weights=attention.own(scanned.weights), mass=mass)


def _oneshot(
    output: Tensor, columns: Columns, query: Tensor, steps: Tensor, policy: Policy, attention: Attention, chunk: int
) -> Advanced:
    """All under full attention, then down to the capacity at once by the scores after the last token."""
    nobody = replace(policy, capacity=None, first=0, last=0)
    births, scores = columns.births, columns.scores
    parts = (torch.split(query, chunk, 2), torch.split(steps, chunk, 1), torch.split(output, chunk, 2))
    for rows, part, out in zip(*parts, strict=True):
        logits = attention.logits(rows, columns.keys)
        scanned = ops.scan(logits, births, part, scores, nobody, attention.window, attention.sinks)
        mix(scanned.weights, columns.values, scanned.mass, out=out)
        scores = scanned.scores
    assert scores is not None
    last = torch.maximum(steps.amax(1), columns.state.seen - 1)[:, None, None]
    expiry = _expiry_by_age(births, nobody, attention.window)
    expiry = _drop_lowest(torch.where(expiry <= last, expiry, NEVER), scores, births, last, policy)
    return expiry, scores


def _arrived(steps: Tensor) -> Tensor:
    """[B]: how many real tokens a chunk brought."""
    return (steps >= 0).sum(1)


def _attend(
    output: Tensor,
    state: State,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention: Attention,
    visible: tuple[Tensor, Tensor, Tensor],
    causal: bool = False,
) -> None:
    """Attention to what is `visible` (births, expiry, steps), or `causal`, which is the same and faster to say."""
    if attention.plain and (causal or query.is_cuda or query.shape[2] == 1):
        mask = None if causal else ops.mask(*visible)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], 1)
        grouped = keys.shape[1] != query.shape[1]
        output.copy_(
            scaled_dot_product_attention(
                query, keys, values, mask, is_causal=causal, scale=attention.scale, enable_gqa=grouped
            )
        )
        return
    if not state.careful:  # on the CPU twice as fast as SDPA under a mask
        try:
            weights = attention.logits(query, keys, exponentials=True)
            mix(weights, values, ops.hide(weights, *visible, attention.sinks), out=output)
            return
        except Vanished:
            state.careful = True
    mask = ops.mask(*visible)
    logits = attention.logits(query, keys)
    logits.view(len(mask), mask.shape[1], -1, *mask.shape[2:]).masked_fill_(~mask[:, :, None], -torch.inf)
    if attention.sinks is None:
        mix(torch.softmax(logits, -1, out=logits), values, None, out=output)
        return
    sinks = attention.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    mix(torch.cat([logits, sinks], -1).softmax(-1)[..., :-1], values, None, out=output)


def _step(
    state: State,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    real: Tensor | None,
    on_evict: OnEvict | None,
) -> Tensor:
    """One token in place: it is written to an empty slot, attended to with the rest, and one slot is emptied."""
    steps = _steps(state, real, 1)
    state.fed += 1
    state.packed = False
    state.reserve(state.fed)
    used = slice(0, state.filled)
    positions = state.positions[:, :, used]
    vacant = positions.argmin(-1, keepdim=True)  # empty is -1, and one slot always is
    positions.scatter_(2, vacant, steps[:, None].expand_as(vacant))
    keys, values = state.keys[:, :, used], state.values[:, :, used]
    put(keys, vacant, key)
    put(values, vacant, value)
    scores = None if state.scores is None else state.scores[:, :, used].scatter(2, vacant, 0)
    output = value.new_empty(*query.shape[:3], value.shape[3])
    if decides_by_age(policy, attention.window):
        expiry = _expiry_by_age(positions, policy, attention.window)
        _attend(output, state, query, keys, values, attention, (positions, expiry, steps))
    else:
        scanned = _scan(state, query, keys, positions, steps, scores, policy, attention)
        expiry, scores = scanned.expiry, scanned.scores
        mix(scanned.weights, values, scanned.mass, out=output)
    leaving = expiry <= steps[:, None]
    if on_evict is not None:
        on_evict(positions, torch.where(leaving, expiry, NEVER))
    positions.masked_fill_(leaving, -1)
    if state.scores is not None and scores is not None:
        state.scores[:, :, used] = scores
    state.seen += _arrived(steps)
    return output


def _drop_lowest(expiry: Tensor, scores: Tensor, births: Tensor, now: Tensor, policy: Policy) -> Tensor:
    """[B, U, N]: `now` for the free columns with the lowest scores, as many as are held beyond the capacity."""
    if policy.capacity is None:
        return expiry
    alive = expiry == NEVER
    free = alive & (births >= policy.first) & (births <= now - policy.last)
    excess = (alive.sum(-1, keepdim=True) - policy.capacity).clamp(min=0)
    by_age = births.argsort(dim=-1, stable=True)
    ranked = scores.masked_fill(~free, torch.inf).gather(2, by_age).argsort(dim=-1, stable=True)
    order = by_age.gather(2, ranked)
    rank = torch.arange(order.shape[2], device=order.device).expand_as(order)
    dropped = torch.zeros_like(alive).scatter_(2, order, rank < excess)
    return torch.where(dropped, now, expiry)
