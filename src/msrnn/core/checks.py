"""What is true of slots between two calls. A saved state is held to this before any kernel works on it.

A checksum shows that a file is intact, not that its indices are valid: kernels index by `next`, count on `positions`
and stop at `limit`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..policy import KV, Policy
from .formats import scale_count
from .slots import Slots, keeps_gains, keeps_residual, keeps_scores, lowest_empty, slot_count, stored_memory, unit_count

LONGEST = 2**31 - 2  # tokens: kernels count in 32 bits
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES: dict[KV | None, tuple[tuple[torch.dtype, ...], ...]] = {  # of keys and of values
    None: (_FLOATS, _FLOATS),
    "int8": ((torch.int8,), (torch.int8,)),
    "k8v4": ((torch.int8,), (torch.uint8,)),
}


def fault(slots: Slots, policy: Policy, window: int | None = None) -> str | None:
    """What is wrong with slots that a policy has filled, in words; None if nothing is."""
    for checks in (_layout, _counts, _contents):  # each relies on the one before
        message = next(checks(slots, policy, window), None)
        if message is not None:
            return message
    return None


def _layout(slots: Slots, policy: Policy, window: int | None) -> Iterator[str]:
    """Shapes and dtypes."""
    keys, values = slots.keys, slots.values
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.ndim != 4 or 0 in tensor.shape:
            yield f"{name} have the shape {tuple(tensor.shape)}, not [sequences, heads, slots, size]"
    for name, tensor, dtypes in zip(("keys", "values"), (keys, values), _DTYPES[policy.kv], strict=True):
        if tensor.dtype not in dtypes:
            yield f"{name} are {_name(tensor.dtype)}, not {' or '.join(map(_name, dtypes))}"
    batch, stored, size = keys.shape[:3]
    if values.shape[:3] != keys.shape[:3] or (policy.kv is None and values.dtype != keys.dtype):
        yield f"values {_show(values)} do not belong to keys {_show(keys)}"
    units = unit_count(policy, stored, stored)
    sums, remembered = _sums(slots), stored_memory(policy, window)
    scales = scale_count(policy.kv, slots.sizes[1]) if policy.kv else 0
    expected = {
        "positions": (slots.positions, (batch, units, size), torch.int64),
        "next": (slots.next, (batch, units), torch.int64),
        "seen": (slots.seen, (batch,), torch.int64),
        "scores": (slots.scores, (batch, units, size) if keeps_scores(policy, window) else None, sums),
        "scales": (slots.scales, (batch, stored, size, scales) if policy.kv else None, torch.float16),
        "gains": (slots.gains, (batch, stored, size) if keeps_gains(policy, window) else None, sums),
        "residual": (
            slots.residual,
            (batch, stored, sum(slots.sizes) + 1) if keeps_residual(policy, window) else None,
            sums,
        ),
        "memory": (slots.memory, (batch, units, size, remembered) if remembered else None, sums),
    }
    for name, (rows, shape, dtype) in expected.items():
        if (rows is None) != (shape is None):
            yield f"{policy} has {'no ' if shape is None else ''}{name}, the state has {'none' if shape else 'some'}"
        elif rows is not None and (tuple(rows.shape), rows.dtype) != (shape, dtype):
            yield f"{name} are {_show(rows)}, not {_name(dtype)} {list(shape or ())}"


def _sums(slots: Slots) -> torch.dtype:
    """The dtype to add up in: codes do not tell the model's, so what is there decides between the two there are."""
    if slots.scales is None:
        return torch.promote_types(slots.keys.dtype, torch.float32)
    return torch.float64 if slots.sum_dtype == torch.float64 else torch.float32


def _counts(slots: Slots, policy: Policy, window: int | None) -> Iterator[str]:
    """Numbers of slots and of tokens."""
    limit, size, most = slot_count(policy, window), slots.keys.shape[2], int(slots.seen.max())
    if slots.limit != limit:
        yield f"it is for {slots.limit} slots; {policy} has {limit}"
    if limit is not None and size != limit:
        yield f"it has {size} slots; {policy} has {limit}"
    if not 0 < slots.fed <= LONGEST:
        yield f"{slots.fed} columns were fed; that is no number from 1 to {LONGEST}"
    if int(slots.seen.min()) < 0 or most > slots.fed:
        yield f"{int(slots.seen.min())} to {most} tokens were read of {slots.fed} that were fed"
    if limit is None and slots.fed > size:
        yield f"{slots.fed} columns do not fit into {size} slots"


def _contents(slots: Slots, policy: Policy, window: int | None) -> Iterator[str]:
    """Positions, the next slot, and finite numbers."""
    positions, seen = slots.positions, slots.seen[:, None, None]
    if bool(((positions < -1) | (positions >= seen)).any()):
        yield f"positions run from {int(positions.min())} to {int(positions.max())} after {_span(slots.seen)} tokens"
    ordered = positions.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        yield "a unit holds the same position twice"
    if bool((positions[:, :, slots.filled :] >= 0).any()):
        yield f"slots past the {slots.filled} that were filled hold tokens"
    yield from _held(slots, policy, window)
    if not torch.equal(slots.next, lowest_empty(positions)):
        yield "the next slot is not the lowest empty one"
    for name, tensor in slots.tensors().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield f"{name} hold numbers that are not finite"
    if slots.scores is not None and policy.rule is None and bool((slots.scores < 0).any()):
        yield "scores are below 0, and attention is not"
    if slots.gains is not None and bool((slots.gains < 0).any()):
        yield "gains are below 0, and norms are not"
    if slots.residual is not None and bool((slots.residual[..., -1] < 0).any()):
        yield "the residual holds fewer than 0 tokens"


def _held(slots: Slots, policy: Policy, window: int | None) -> Iterator[str]:
    """As many tokens as fit, and those that may not leave."""
    positions, seen, held = slots.positions, slots.seen[:, None], slots.held
    most = slots.keys.shape[2] if policy.capacity is None else policy.capacity
    if bool((held > most).any()):
        yield f"a unit holds {int(held.max())} tokens, more than the capacity of {most}"
    if window is None and bool((held < seen.clamp(max=most)).any()):
        yield f"a unit holds {int(held.min())} tokens of {_span(slots.seen)} that were read, and there is room for more"
    alive = seen[:, :, None] - (window or LONGEST)  # the model's own window takes protected tokens too
    here = (positions >= 0) & (positions > alive)
    last, first = seen[:, :, None] - policy.last, policy.first
    protected = (here & ((positions < first) | (positions >= last))).sum(-1)
    oldest = (seen - (window or LONGEST) + 1).clamp(min=0)  # [B, 1]: the first position in the model's window
    start = torch.maximum(oldest, (seen - policy.last).clamp(min=0))
    early = (seen.clamp(max=first) - oldest).clamp(min=0)
    needed = early + (seen - torch.maximum(start, seen.clamp(max=first))).clamp(min=0)
    if bool((protected < needed).any()):
        yield f"tokens are missing that {policy} protects, the first {first} or the last {policy.last}"


def _span(numbers: Tensor) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"


def _show(tensor: Tensor) -> str:
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
