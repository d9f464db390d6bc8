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
from .ops import NEVER
from .policy import Policy
from .reference import Prompt
from .scratch import scratch
from .state import State, decides_by_age

CHUNK = 128
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
    if prompt == "oneshot" and total > 1:
        return _oneshot(state, query, key, value, policy, attention, real, chunk, on_evict)
    outputs, start = [], 0
    while start < total:
        size = _piece(state, policy, attention, total - start, chunk)
        part = slice(start, start + size)
        inside = None if real is None else real[:, part]
        advance = _step if size == 1 else _chunk
        arguments = (query[:, :, part], key[:, :, part], value[:, :, part], policy, attention, inside, on_evict)
        outputs.append(advance(state, *arguments))
        start += size
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _piece(state: State, policy: Policy, attention: Attention, left: int, chunk: int) -> int:
    """How many tokens to take next: all that surely fit where nothing leaves, else a chunk."""
    if state.scores is None and attention.window is None:
        room = left if policy.capacity is None else policy.capacity - state.fed
        if room >= chunk:
            return min(left, room if state.fed == 0 else 8 * chunk)
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


def _columns(state: State, key: Tensor, value: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Keys, values, births and scores of everything the chunk can see: the state, then the chunk itself."""
    old = slice(0, state.filled)
    births = steps[:, None].expand(-1, state.positions.shape[1], -1)
    if state.fed == 0:
        return key, value, births, None
    keys, values = _joined("keys", state.keys[:, :, old], key), _joined("values", state.values[:, :, old], value)
    scores = None
    if state.scores is not None:
        scores = torch.cat([state.scores[:, :, old], state.scores.new_zeros(births.shape)], 2)
    return keys, values, torch.cat([state.positions[:, :, old], births], 2), scores


def _joined(name: str, old: Tensor, new: Tensor) -> Tensor:
    """The rows of both, in scratch memory."""
    shape = (*old.shape[:2], old.shape[2] + new.shape[2], old.shape[3])
    return torch.cat([old, new], 2, out=scratch(name, shape, old.dtype, old.device))


def _chunk(
    state: State,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    real: Tensor | None,
    on_evict: OnEvict | None,
) -> Tensor:
    steps = _steps(state, real, query.shape[2])
    keys, values, births, scores = _columns(state, key, value, steps)
    fits = policy.capacity is not None and state.fed + query.shape[2] <= policy.capacity and state.scores is None
    if (fits and attention.window is None) or decides_by_age(policy, attention.window):
        nobody = replace(policy, capacity=None) if fits else policy
        expiry = _expiry_by_age(births, nobody, attention.window)
        causal = state.fed == 0 and real is None and attention.window is None and (fits or policy.capacity is None)
        mask = None if causal else _mask(births, expiry, steps)
        output = _attend(query, keys, values, attention, mask)
        expiry = torch.where(expiry < (state.seen + _arrived(steps))[:, None, None], expiry, NEVER)
    else:
        logits = attention.logits(query, keys)
        weights, mass, expiry, scores = ops.scan(
            logits, births, steps, scores, policy, attention.window, attention.sinks
        )
        output = mix(weights, values, mass)
    _keep(state, keys, values, births, expiry, scores, steps, on_evict)
    return output


def _arrived(steps: Tensor) -> Tensor:
    """[B]: how many real tokens a chunk brought."""
    return (steps >= 0).sum(1)


def _mask(births: Tensor, expiry: Tensor, steps: Tensor) -> Tensor:
    """[B, U, C, N]: which columns each row sees. A row of padding sees everything, so that it stays finite."""
    now = steps[:, None, :, None]
    born = (births[:, :, None] >= 0) & (births[:, :, None] <= now)
    return (born & (now <= expiry[:, :, None])) | (now < 0)


def _attend(query: Tensor, keys: Tensor, values: Tensor, attention: Attention, mask: Tensor | None) -> Tensor:
    """Attention under a mask [B, U, C, N], or causal where there is none."""
    heads = query.shape[1]
    if mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(heads // mask.shape[1], 1)
    if attention.plain:
        grouped = keys.shape[1] != heads
        return scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None, scale=attention.scale, enable_gqa=grouped
        )
    logits = attention.logits(query, keys)
    if mask is None:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    logits = logits.masked_fill(~mask, -torch.inf)
    if attention.sinks is None:
        return mix(logits.softmax(-1), values)
    sinks = attention.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return mix(torch.cat([logits, sinks], -1).softmax(-1)[..., :-1], values)


def _keep(
    state: State,
    keys: Tensor,
    values: Tensor,
    births: Tensor,
    expiry: Tensor,
    scores: Tensor | None,
    steps: Tensor,
    on_evict: OnEvict | None,
) -> None:
    """The survivors among the columns become the state."""
    if on_evict is not None:
        on_evict(births, expiry)
    state.fed += steps.shape[1]
    state.seen += _arrived(steps)
    state.reserve(state.fed)
    state.packed = True
    alive = expiry == NEVER
    births = births.where(alive, -1)
    if state.limit is not None and births.shape[2] >= state.limit:
        kept = (~alive).to(torch.uint8).argsort(dim=-1, stable=True)[..., : state.limit]  # survivors first, in order
        _take(keys, kept, state.keys)
        _take(values, kept, state.values)
        torch.gather(births, 2, kept, out=state.positions)
        if state.scores is not None and scores is not None:
            torch.gather(scores, 2, kept, out=state.scores)
        return
    room = slice(0, births.shape[2])  # all of it fits, holes and all
    state.keys[:, :, room], state.values[:, :, room], state.positions[:, :, room] = keys, values, births
    if state.scores is not None and scores is not None:
        state.scores[:, :, room] = scores


def _take(rows: Tensor, kept: Tensor, out: Tensor) -> None:
    """rows [B, E, N, D], kept [B, U, S]: those rows of every head, into out [B, E, S, D]."""
    if kept.shape[:2] == (1, 1):
        torch.index_select(rows, 2, kept[0, 0], out=out)
        return
    share = rows.shape[1] // kept.shape[1]
    index = kept.repeat_interleave(share, 1)[..., None].expand(-1, -1, -1, rows.shape[3])
    torch.gather(rows, 2, index, out=out)


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
    _put(keys, vacant, key)
    _put(values, vacant, value)
    scores = None if state.scores is None else state.scores[:, :, used].scatter(2, vacant, 0)
    if decides_by_age(policy, attention.window):
        expiry = _expiry_by_age(positions, policy, attention.window)
        output = _attend(query, keys, values, attention, _mask(positions, expiry, steps))
    else:
        logits = attention.logits(query, keys)
        weights, mass, expiry, scores = ops.scan(
            logits, positions, steps, scores, policy, attention.window, attention.sinks
        )
        output = mix(weights, values, mass)
    leaving = expiry <= steps[:, None]
    if on_evict is not None:
        on_evict(positions, torch.where(leaving, expiry, NEVER))
    positions.masked_fill_(leaving, -1)
    if state.scores is not None and scores is not None:
        state.scores[:, :, used] = scores
    state.seen += _arrived(steps)
    return output


def _put(rows: Tensor, slot: Tensor, new: Tensor) -> None:
    """rows [B, E, S, D], slot [B, U, 1], new [B, E, 1, D]: written in place."""
    index = slot.repeat_interleave(rows.shape[1] // slot.shape[1], 1)[..., None].expand(-1, -1, -1, rows.shape[3])
    rows.scatter_(2, index, new)


def _oneshot(
    state: State,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    real: Tensor | None,
    chunk: int,
    on_evict: OnEvict | None,
) -> Tensor:
    """All of it under full attention, then down to the capacity at once by the scores after the last token."""
    steps = _steps(state, real, query.shape[2])
    keys, values, births, scores = _columns(state, key, value, steps)
    nobody = replace(policy, capacity=None, first=0, last=0)
    window, sinks = attention.window, attention.sinks
    outputs, expiry = [], births
    for rows, part in zip(torch.split(query, chunk, 2), torch.split(steps, chunk, 1), strict=True):
        logits = attention.logits(rows, keys)
        weights, mass, expiry, scores = ops.scan(logits, births, part, scores, nobody, window, sinks)
        outputs.append(mix(weights, values, mass))
    assert scores is not None
    last = (state.seen + _arrived(steps))[:, None, None] - 1
    if window is not None:
        expiry = torch.minimum(expiry, births + (window - 1))
    expiry = _drop_lowest(torch.where(expiry <= last, expiry, NEVER), scores, births, last, policy)
    _keep(state, keys, values, births, expiry, scores, steps, on_evict)
    return torch.cat(outputs, 2)


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
