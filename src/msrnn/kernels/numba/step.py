"""`step` compiled for the CPU: the same arguments and results as `kernels/torch/step.py`, in place, without a copy.

A task is one stored head of one row: it reads each held key and value once, for all query heads that share it. The
thread that finishes the last task of a unit takes the mean over its heads and chooses the victim, while the weights are
still in the cache. Threads take tasks from a shared counter, those of the longest heads first where KV heads have slots
of their own. What is the same at every step is worked out once (`Works`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.attention import Attention
from ...core.buffers import buffer
from ...core.slots import NEVER, NO_SOFTCAP, Slots
from ...policy import Policy
from ..torch import step as torch_step
from . import openmp
from .step_kernel import KINDS, SLOTS, WORK, compiled

Tables = dict[object, Any]  # Works, or None where one kernel does not take them, by the facts that they follow from
_layers: Tables = {}  # of slots that the heads of a layer share
_MOST_LAYERS = 1024


def step(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels/torch/step.py`. Float16 is left to it: CPUs here have no instructions for it."""
    if query.dtype not in KINDS:
        output = torch_step.step(slots, query, key, value, policy, attention)
        return output if out is None else out.copy_(output)
    facts = _facts((slots,), query, (policy,), attention)
    works = _layers.get(facts)
    if works is None:
        if len(_layers) >= _MOST_LAYERS:
            _layers.clear()
        works = _layers[facts] = _works((slots,), query, (policy,), attention)
    return _run(works, slots, query, key, value, attention, out)


def step_heads(
    slots: Sequence[Slots],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policies: Sequence[Policy],
    attention: Attention,
    tables: Tables,
    out: Tensor | None = None,
) -> Tensor | None:
    """All KV heads of a layer, each with slots and a policy of its own, as the tasks of one parallel region.

    None, and nothing done, where one kernel cannot take them all. `tables` keeps what is worked out for these slots.
    """
    if query.dtype not in KINDS:
        return None
    facts = _facts(slots, query, policies, attention)
    works: Works | None
    try:
        works = tables[facts]
    except KeyError:
        works = tables[facts] = _works(slots, query, policies, attention) if _alike(slots, policies) else None
    return None if works is None else _run(works, slots[0], query, key, value, attention, out)


def _facts(slots: Sequence[Slots], query: Tensor, policies: Sequence[Policy], attention: Attention) -> object:
    """All that `Works` follow from, as plain values: slots that have moved are other facts."""
    places = tuple(map(_places, slots))
    model = (attention.scale, attention.softcap, attention.window, query.shape[1], query.dtype)
    return places, tuple(policies), model


def _places(slots: Slots) -> object:
    """Where tensors are, and how large. Every step asks: one more call for each would show in a decode step."""
    keys, values = slots.keys, slots.values  # their shapes and a policy give those of the others
    others = (slots.scales, slots.positions, slots.scores, slots.gains, slots.residual, slots.next)
    rows = [one if one is None else (one.data_ptr(), one.stride()) for one in (keys, values, *others)]
    return keys.shape, keys.dtype, values.shape, values.dtype, *rows


def _alike(slots: Sequence[Slots], policies: Sequence[Policy]) -> bool:
    """Whether one kernel takes all heads: one unit each, in slots of the same format, and no research rule."""
    single = all(one.keys.shape[1] == one.positions.shape[1] == 1 for one in slots)
    formats = {(one.kv, one.keys.dtype) for one in slots}
    return single and len(formats) == 1 and all(policy.rule is None for policy in policies)


class Works(NamedTuple):
    """What the threads are told about the slots of a layer, or of each KV head of it, at every step."""

    records: np.ndarray  # WORK, the longest first: threads begin in that order, so the last ones at work are short
    address: int
    number: int  # of records
    kernel: Any
    stored: int  # heads of all records
    shared: int  # units of several stored heads in a row
    weights: int  # of these units


def _works(slots: Sequence[Slots], query: Tensor, policies: Sequence[Policy], attention: Attention) -> Works:
    stored, units = slots[0].keys.shape[1], slots[0].positions.shape[1]
    group = query.shape[1] // (stored * len(slots))
    parts = sorted(range(len(slots)), key=lambda part: -slots[part].positions.shape[2])
    heads = [(part * stored, group, stored, units) for part in parts]
    records = [_record(slots[part], own, policies[part], attention) for part, own in zip(parts, heads, strict=True)]
    table, shared = np.array(records, WORK), units if units < stored else 0
    weights = stored * group * slots[0].positions.shape[2] if shared else 0
    kernel = compiled(query.dtype, slots[0].kv)
    return Works(table, table.ctypes.data, len(slots), kernel, stored * len(slots), shared, weights)


def _record(slots: Slots, heads: tuple[int, ...], policy: Policy, attention: Attention) -> tuple[float, ...]:
    """A line of WORK. heads: the first stored one, query heads of each, stored ones, units."""
    if slots.residual is not None and attention.softcap is not None:
        raise ValueError(NO_SOFTCAP)
    unused = slots.positions  # stands in for tensors that there are none of
    tensors = {name: unused if rows is None else rows for name in SLOTS for rows in (getattr(slots, name),)}
    _check(tensors)
    capacity = NEVER if policy.capacity is None else policy.capacity
    optional = (slots.scores, slots.gains, slots.residual)
    return (
        *(*heads, slots.positions.shape[2], *slots.sizes, len(slots.keys)),
        *(slots.values.shape[3], 0 if slots.scales is None else slots.scales.shape[3]),
        *(policy.first, policy.last, capacity, attention.window or 0, *(rows is not None for rows in optional)),
        *(number for rows in tensors.values() for number in _strides(rows)),
        *(attention.scale, attention.softcap or 0.0, policy.momentum, policy.residual or 0.0),
    )


def _run(
    works: Works, slots: Slots, query: Tensor, key: Tensor, value: Tensor, attention: Attention, out: Tensor | None
) -> Tensor:
    """`slots`: any of those that step, as all have read the same."""
    dtype = _number(query.dtype)
    output = query.new_empty(*query.shape[:2], value.shape[2]) if out is None else out
    result = output if output.dtype == dtype else buffer("step output", tuple(output.shape), dtype, query.device)
    _check({"output": result})
    tokens = [new if new.stride(2) == 1 else new.contiguous() for new in (query, key, value)]
    call, alive = _call(works, slots, [*tokens, result], attention)
    openmp.run(works.kernel, call.buffer_info()[0], len(query) * works.stored)
    del alive  # tensors that the call points to
    return output if output is result else output.copy_(result)


def _call(
    works: Works, slots: Slots, tokens: Sequence[Tensor], attention: Attention
) -> tuple[array[int], tuple[Tensor | None, ...]]:
    """A CALL, and the tensors made for it, which must outlive it. tokens: query, key, value and output."""
    batch, dtype, sinks = len(tokens[0]), tokens[3].dtype, attention.sinks
    plain = (
        slots.seen.contiguous(),
        None if slots.rows is None else slots.rows.contiguous(),
        None if sinks is None else sinks.detach().to(dtype).contiguous(),
        buffer("step weights", (batch * works.weights,), dtype, slots.keys.device) if works.shared else None,
        torch.zeros(batch * works.shared, dtype=torch.int64) if works.shared else None,
    )
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in plain)
    strided = (number for tensor in tokens for number in _strides(tensor))
    return array("q", (0, batch, works.number, works.address, *addresses, *strided)), plain


def _number(model: torch.dtype) -> torch.dtype:
    """What to compute in."""
    return torch.promote_types(model, torch.float32)


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """A tensor's address, and the bytes from row to row and from head to head."""
    stride, size = tensor.stride(), tensor.itemsize
    return tensor.data_ptr(), stride[0] * size, stride[1] * size


def _check(tensors: dict[str, Tensor]) -> None:
    """A head's own numbers must lie one after the other; anything may lie between heads and between rows."""
    for name, tensor in tensors.items():
        inner = tensor.stride()[2:] if tensor.dim() > 2 else tensor.stride()[1:]
        dense = inner == (tensor.shape[3], 1) if tensor.dim() == 4 else inner == (1,)
        if not dense:
            raise ValueError(f"{name} has the strides {tensor.stride()}: what belongs to a head must lie together")
