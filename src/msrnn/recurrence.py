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

from . import ops
from .attention import Attention, mix
from .columns import Columns, put
from .ops import NEVER, Vanished
from .ops.eager import Scanned
from .policy import Policy
from .reference import Prompt
from .state import State, decides_by_age

CHUNK = 256
Advanced = tuple[Tensor, Tensor, Tensor | None]  # outputs, expiry, scores
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
    output = value.new_empty(*query.shape[:3], value.shape[3])
    advance = _oneshot if prompt == "oneshot" else _chunk
    start = 0
    while start < total:
        size = total if prompt == "oneshot" else _piece(state, policy, attention, total - start, chunk)
        part = slice(start, start + size)
        steps = _steps(state, None if real is None else real[:, part], size)
        columns.add(key[:, :, part], value[:, :, part], steps)
        output[:, :, part], expiry, scores = advance(columns, query[:, :, part], steps, policy, attention, chunk)
        if on_evict is not None:
            on_evict(columns.births, expiry)
        columns.keep(expiry == NEVER, scores)
        state.fed += size
        state.seen += _arrived(steps)
        start += size
    columns.close()
    return output


def _piece(state: State, policy: Policy, attention: Attention, left: int, chunk: int) -> int:
    """How many tokens to take next: all that surely fit where nothing leaves, else a chunk."""
    if state.scores is None and attention.window is None:
        room = left if policy.capacity is None else policy.capacity - state.fed
        if room >= chunk:
            return min(left, room if state.fed == 0 else min(room, 8 * chunk))
    return min(left, chunk)


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
    columns: Columns, query: Tensor, steps: Tensor, policy: Policy, attention: Attention, chunk: int
) -> Advanced:
    """Outputs, expiry and scores of a chunk under the recurrence."""
    keys, values, births, state = columns.keys, columns.values, columns.births, columns.state
    fits = policy.capacity is None or state.fed + query.shape[2] <= policy.capacity
    nobody_leaves = fits and state.scores is None and attention.window is None
    if nobody_leaves or decides_by_age(policy, attention.window):
        expiry = _expiry_by_age(births, replace(policy, capacity=None) if nobody_leaves else policy, attention.window)
        causal = nobody_leaves and state.fed == 0 and bool((steps >= 0).all())
        output = _attend(state, query, keys, values, attention, None if causal else _mask(births, expiry, steps))
        return output, torch.where(expiry <= steps.amax(1)[:, None, None], expiry, NEVER), None
    scanned = _scan(state, query, keys, births, steps, columns.scores, policy, attention)
    return mix(scanned.weights, values, scanned.mass), scanned.expiry, scanned.scores


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
    """The quick scan for as long as this layer's logits allow it, the careful one from then on."""
    rest = (births, steps, scores, policy, attention.window, attention.sinks)
    if not state.careful and ops.quick(query.device.type):
        try:
            return ops.scan(attention.logits(query, keys, exponentials=True), *rest, exponentials=True)
        except Vanished:
            state.careful = True
    return ops.scan(attention.logits(query, keys), *rest)


def _oneshot(
    columns: Columns, query: Tensor, steps: Tensor, policy: Policy, attention: Attention, chunk: int
) -> Advanced:
    """All under full attention, then down to the capacity at once by the scores after the last token."""
    nobody = replace(policy, capacity=None, first=0, last=0)
    births, scores, outputs = columns.births, columns.scores, []
    for rows, part in zip(torch.split(query, chunk, 2), torch.split(steps, chunk, 1), strict=True):
        logits = attention.logits(rows, columns.keys)
        scanned = ops.scan(logits, births, part, scores, nobody, attention.window, attention.sinks)
        outputs.append(mix(scanned.weights, columns.values, scanned.mass))
        scores = scanned.scores
    assert scores is not None
    last = torch.maximum(steps.amax(1), columns.state.seen - 1)[:, None, None]
    expiry = _expiry_by_age(births, nobody, attention.window)
    expiry = _drop_lowest(torch.where(expiry <= last, expiry, NEVER), scores, births, last, policy)
    return torch.cat(outputs, 2), expiry, scores


def _arrived(steps: Tensor) -> Tensor:
    """[B]: how many real tokens a chunk brought."""
    return (steps >= 0).sum(1)


def _mask(births: Tensor, expiry: Tensor, steps: Tensor) -> Tensor:
    """[B, U, C, N]: which columns each row sees. A row of padding sees everything, so that it stays finite."""
    now = steps[:, None, :, None]
    born = (births[:, :, None] >= 0) & (births[:, :, None] <= now)
    return (born & (now <= expiry[:, :, None])) | (now < 0)


def _attend(
    state: State, query: Tensor, keys: Tensor, values: Tensor, attention: Attention, mask: Tensor | None
) -> Tensor:
    """Attention under a mask [B, U, C, N], or causal where there is none."""
    heads, rows = query.shape[1:3]
    if attention.plain and (mask is None or query.is_cuda or rows == 1):
        mask = mask if mask is None or mask.shape[1] == 1 else mask.repeat_interleave(heads // mask.shape[1], 1)
        grouped = keys.shape[1] != heads
        return scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None, scale=attention.scale, enable_gqa=grouped
        )
    if mask is None:
        mask = torch.ones(1, 1, rows, keys.shape[2], dtype=torch.bool, device=query.device).tril_()
    quick = None if state.careful else _quick_softmax(attention.logits(query, keys, True), mask, attention.sinks)
    if quick is not None:
        return mix(quick[0], values, quick[1])
    state.careful = True
    logits = attention.logits(query, keys)
    _by_unit(logits, mask).masked_fill_(~mask[:, :, None], -torch.inf)
    if attention.sinks is None:
        return mix(torch.softmax(logits, -1, out=logits), values)
    sinks = attention.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return mix(torch.cat([logits, sinks], -1).softmax(-1)[..., :-1], values)


def _by_unit(rows: Tensor, mask: Tensor) -> Tensor:
    """rows [B, H, C, N] as [B, U, H / U, C, N] for a mask [B, U, C, N]."""
    return rows.view(len(rows), mask.shape[1], -1, *rows.shape[2:])


def _quick_softmax(weights: Tensor, mask: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Weights and mass from exponentials, in their own memory; None where they have overflowed or underflowed.

    On the CPU twice as fast as SDPA under a mask.
    """
    _by_unit(weights, mask).mul_(mask[:, :, None].to(weights.dtype))
    mass = weights.sum(-1, keepdim=True)
    if sinks is not None:
        mass += sinks.detach().to(mass.dtype).exp().view(-1, 1, 1)
    low, high = torch.aminmax(mass)
    return (weights, mass) if bool((low > 1e-30) & (high < 1e37)) else None


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
    if decides_by_age(policy, attention.window):
        expiry = _expiry_by_age(positions, policy, attention.window)
        output = _attend(state, query, keys, values, attention, _mask(positions, expiry, steps))
    else:
        scanned = _scan(state, query, keys, positions, steps, scores, policy, attention)
        output, expiry, scores = mix(scanned.weights, values, scanned.mass), scanned.expiry, scanned.scores
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
