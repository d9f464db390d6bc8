"""The recurrence of one layer: `read` takes a chunk at a time, `step` one token. Both equal the definition exactly.

Within a chunk the state changes by one slot a step, so every column that can matter is known at its start: the slots
and the chunk. One matmul gives all logits, a light scan decides who leaves when, one matmul gives the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import kernels
from ..policy import Policy
from .attention import Attention, OutOfRange, weighted_sum
from .slots import NEVER, Columns, Slots, decides_by_age, expiry_by_age, lowest_empty
from .workspace import Workspace

CHUNK, GPU_CHUNK = 128, 256  # tokens of a chunk; more on a GPU, where launches take most of the time
Prompt = Literal["recurrent", "oneshot"]
OnEvict = Callable[[Tensor, Tensor], None]  # positions [B, U, N] and expiry [B, U, N] of a chunk's columns


def read(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    real: Tensor | None = None,
    chunk: int | None = None,
    on_evict: OnEvict | None = None,
) -> Tensor:
    """query [B, H, T, D], key [B, G, T, D], value [B, G, T, V], real [B, T] (false: padding) -> [B, H, T, V].

    `chunk`: so many tokens at a time, None for what is fast on the device.
    The slots move on by T tokens, in place. Outputs at padding are finite and mean nothing.
    """
    total = query.shape[2]
    if total == 1:
        return _one_token(slots, query, key, value, policy, attention, real, on_evict)
    key, value = slots.expand(key, value)
    chunk = chunk or default_chunk(query.device)
    space, output = Workspace(slots, key, chunk), _output(query, value)
    steps, start = step_numbers(slots, real, total), 0
    plain = Chunks(space, (query, key, value), steps, policy, attention, output)
    fast = kernels.fast_chunks(space, (query, key, value), steps, policy, attention, output)
    while start < total:
        size = _chunk_size(slots, policy, attention, total - start, chunk)
        chunks = plain if fast is None or nothing_leaves(slots, policy, attention, size) else fast
        size = min(size, chunks.rows or size)
        part = slice(start, start + size)
        expiry = chunks.attend(part)
        if expiry is None:  # exponentials were out of range: the rest of this call subtracts row maxima
            fast, chunks = None, plain
            expiry = plain.attend(part)
        if on_evict is not None:
            on_evict(space.columns.positions, expiry)
        chunks.evict(expiry)
        slots.fed += size
        start += size
    slots.seen += _arrivals(steps)
    space.close()
    return output


def default_chunk(device: torch.device) -> int:
    return GPU_CHUNK if device.type == "cuda" else CHUNK


def step(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    out: Tensor | None = None,
) -> Tensor:
    """query [B, H, D], key [B, G, D], value [B, G, V] -> [B, H, V]: one token of every row, in place.

    `seen` stays as it is: whoever steps counts it on, as layers may share it. Nothing waits for the device.
    """
    key, value = slots.expand(key, value)
    return kernels.step(slots, query, key, value, policy, attention, out)


class Chunks:
    """The chunks of one `read`, or of a pipeline's lane; tokens: query, key and value of all T."""

    rows: int | None = None  # rows of a chunk at most

    def __init__(
        self,
        space: Workspace,
        tokens: tuple[Tensor, Tensor, Tensor],
        steps: Tensor,
        policy: Policy,
        attention: Attention,
        output: Tensor,
    ) -> None:
        self.space, self.tokens, self.steps = space, tokens, steps
        self.policy, self.attention, self.output = policy, attention, output
        self.subtract_max = not kernels.takes_exponentials(tokens[0].device.type, policy)
        self.scores: Tensor | None = None

    def attend(self, part: slice) -> Tensor:
        """The chunk joins the workspace, its outputs are written -> expiry [B, U, N]."""
        query, key, value = (token[:, :, part] for token in self.tokens)
        steps, output = self.steps[:, part], self.output[:, :, part]
        space, policy, attention = self.space, self.policy, self.attention
        keep_all = nothing_leaves(space.slots, policy, attention, query.shape[2])
        space.add(key, value, steps)
        if keep_all or decides_by_age(policy, attention.window):
            policy = _keep_all(policy) if keep_all else policy
            expiry = expiry_by_age(space.columns.positions, policy, attention.window)
            causal = keep_all and space.slots.fed == 0 and bool((steps >= 0).all())
            self._attend_visible(output, query, steps, expiry, causal)
            self.scores = None
            return torch.where(expiry <= steps.amax(1)[:, None, None], expiry, NEVER)
        result = self._scan(query, steps)
        weighted_sum(result.weights, space.columns.attended[1], result.total, out=output)
        self.scores = result.scores
        space.remember(result.memory, result.residual)
        return result.expiry

    def evict(self, expiry: Tensor) -> None:
        """What left makes room for the survivors past the slots' end."""
        self.space.evict(expiry, self.scores)

    def _scan(self, query: Tensor, steps: Tensor) -> kernels.Scan:
        """Evictions by all heads that decide together, and the weights of those that this process holds."""
        columns, attention = self.space.columns, self.attention
        if columns.gains is not None and attention.sharded:
            columns = columns._replace(gains=attention.gather(columns.gains))
        keys, result = columns.attended[0], None
        query = query if columns.residual is None else query.to(keys.dtype)
        if not self.subtract_max:
            try:
                weights = attention.gather(attention.logits(query, keys, exponentials=True))
                result = kernels.scan(weights, columns, steps, self.policy, attention, exponentials=True)
            except OutOfRange:
                self.subtract_max = True
        if result is None:
            logits = attention.gather(attention.logits(query, keys))
            result = kernels.scan(logits, columns, steps, self.policy, attention)
        total = None if result.total is None else attention.local(result.total)
        return result._replace(weights=attention.local(result.weights), total=total)

    def _attend_visible(self, output: Tensor, query: Tensor, steps: Tensor, expiry: Tensor, causal: bool) -> None:
        """Attention to what is visible by `expiry`; `causal` says the same where nothing was read before."""
        columns, attention = self.space.columns, self.attention
        if attention.plain and (causal or query.is_cuda):
            mask = None if causal else kernels.mask(columns.positions, expiry, steps)
            output.copy_(_sdpa(query, columns, mask, attention.scale))
            return
        if not self.subtract_max:  # on the CPU twice as fast as SDPA with a mask
            try:
                weights = attention.logits(query, columns.keys, exponentials=True)
                total = kernels.mask_exponentials(weights, columns.positions, expiry, steps, attention.sinks)
                weighted_sum(weights, columns.values, total, out=output)
                return
            except OutOfRange:
                self.subtract_max = True
        mask = kernels.mask(columns.positions, expiry, steps)
        logits = attention.logits(query, columns.keys)
        logits.view(len(mask), mask.shape[1], -1, *mask.shape[2:]).masked_fill_(~mask[:, :, None], -torch.inf)
        weighted_sum(_softmax(logits, attention.sinks), columns.values, None, out=output)


def _keep_all(policy: Policy) -> Policy:
    return replace(policy, capacity=None, first=0, last=0, residual=None)


def nothing_leaves(slots: Slots, policy: Policy, attention: Attention, size: int) -> bool:
    """Whether nothing has to be decided in the next `size` tokens, and no score has to be kept."""
    fits = policy.capacity is None or slots.fed + size <= policy.capacity
    return fits and slots.scores is None and attention.window is None


def step_numbers(slots: Slots, real: Tensor | None, size: int) -> Tensor:
    """[B, C]: the position of each new token, counting real tokens only; -1 for padding."""
    if real is None:
        return slots.seen[:, None] + torch.arange(size, device=slots.seen.device)
    return torch.where(real, slots.seen[:, None] + real.cumsum(1) - 1, -1)


def read_oneshot(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    real: Tensor | None = None,
    chunk: int | None = None,
    on_evict: OnEvict | None = None,
) -> Tensor:
    """The arguments of `read`: all tokens under full attention, then down to the capacity by the last scores.

    This is what the paper's released code does, not its definition.
    """
    if slots.residual is not None:
        raise ValueError(f"{policy}: a residual needs every eviction in its turn; use prompt='recurrent'")
    if query.shape[2] == 1:
        return _one_token(slots, query, key, value, policy, attention, real, on_evict)
    key, value = slots.expand(key, value)
    total, chunk = query.shape[2], chunk or default_chunk(query.device)
    space, output = Workspace(slots, key, total), _output(query, value)
    steps, keep_all = step_numbers(slots, real, total), _keep_all(policy)
    space.add(key, value, steps)
    columns, scores, memory = space.columns, space.columns.scores, space.columns.memory
    parts = (torch.split(query, chunk, 2), torch.split(steps, chunk, 1), torch.split(output, chunk, 2))
    for rows, part, out in zip(*parts, strict=True):
        logits = attention.logits(rows, columns.keys)
        result = kernels.scan(logits, columns._replace(scores=scores, memory=memory), part, keep_all, attention)
        weighted_sum(result.weights, columns.values, result.total, out=out)
        scores, memory = result.scores, result.memory
    assert scores is not None
    last = torch.maximum(steps.amax(1), slots.seen - 1)[:, None, None]
    expiry = expiry_by_age(columns.positions, keep_all, attention.window)
    expiry = _drop_lowest(torch.where(expiry <= last, expiry, NEVER), scores, columns.positions, last, policy)
    if on_evict is not None:
        on_evict(columns.positions, expiry)
    space.remember(memory, None)
    space.evict(expiry, scores)
    slots.fed += total
    slots.seen += _arrivals(steps)
    space.close()
    return output


def _one_token(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    real: Tensor | None,
    on_evict: OnEvict | None,
) -> Tensor:
    """query [B, H, 1, D] ... -> [B, H, 1, V]: a step, counted, and reported where somebody records evictions."""
    _grow(slots)
    numbers = step_numbers(slots, real, 1)[:, 0]
    before = None if on_evict is None else _with_newcomer(slots, numbers)
    rows = slots if real is None else replace(slots, seen=numbers)
    output = step(rows, query[:, :, 0], key[:, :, 0], value[:, :, 0], policy, attention)
    if on_evict is not None and before is not None:
        on_evict(before, torch.where(slots.positions == before, NEVER, numbers[:, None, None]))
    slots.fed += 1
    slots.seen += (numbers >= 0).to(slots.seen.dtype)
    return output[:, :, None]


def _grow(slots: Slots) -> None:
    """Room for one more token where there is no limit."""
    before = slots.positions.shape[2]
    slots.reserve(slots.fed + 1)
    if slots.positions.shape[2] != before:
        slots.next = lowest_empty(slots.positions)


def _with_newcomer(slots: Slots, numbers: Tensor) -> Tensor:
    """[B, U, S]: the positions with the new token in its slot, as the step sees them."""
    place = slots.next.clamp(min=0)[:, :, None]
    new = numbers[:, None, None].expand_as(place)
    return slots.positions.scatter(2, place, torch.where(new >= 0, new, slots.positions.gather(2, place)))


def _chunk_size(slots: Slots, policy: Policy, attention: Attention, left: int, chunk: int) -> int:
    """How many tokens to take next: all that surely fit where nothing leaves, else a chunk."""
    if slots.scores is None and attention.window is None:
        room = left if policy.capacity is None else policy.capacity - slots.fed
        if room >= chunk:
            return min(left, room if slots.fed == 0 else min(room, 8 * chunk))
    return min(left, chunk)


def _output(query: Tensor, value: Tensor) -> Tensor:
    """[B, H, T, V] in the memory layout that the output projection expects."""
    return value.new_empty(len(query), query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)


def _arrivals(steps: Tensor) -> Tensor:
    """[B]: how many real tokens came."""
    return (steps >= 0).sum(1)


def _sdpa(query: Tensor, columns: Columns, mask: Tensor | None, scale: float) -> Tensor:
    if mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], 1)
    grouped = columns.keys.shape[1] != query.shape[1]
    return scaled_dot_product_attention(
        query, columns.keys, columns.values, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return torch.softmax(logits, -1, out=logits)
    sink = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def _drop_lowest(expiry: Tensor, scores: Tensor, positions: Tensor, now: Tensor, policy: Policy) -> Tensor:
    """[B, U, N]: `now` for the free columns with the lowest scores, as many as are held beyond the capacity."""
    if policy.capacity is None:
        return expiry
    alive = expiry == NEVER
    free = alive & (positions >= policy.first) & (positions <= now - policy.last)
    excess = (alive.sum(-1, keepdim=True) - policy.capacity).clamp(min=0)
    by_age = positions.argsort(dim=-1, stable=True)
    most = torch.finfo(scores.dtype).max  # for a score that is no number: behind all others that are free
    ranked = scores.nan_to_num(most, most).masked_fill(~free, torch.inf).gather(2, by_age).argsort(dim=-1, stable=True)
    order = by_age.gather(2, ranked)
    rank = torch.arange(order.shape[2], device=order.device).expand_as(order)
    dropped = torch.zeros_like(alive).scatter_(2, order, rank < excess)
    return torch.where(dropped, now, expiry)
