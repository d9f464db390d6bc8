"""`step` compiled for the CPU: the same arguments and results as `kernels/torch/step.py`, in place, without a copy.

A task is one stored head of one row: it reads each held key and value once, for all query heads that share it. The
thread that finishes the last task of a unit takes the mean over its heads and chooses the victim, while the weights are
still in the cache. Threads take tasks from a shared counter.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core.attention import Attention
from ...core.buffers import buffer
from ...core.slots import NEVER, NO_SOFTCAP, Slots
from ...policy import Policy
from ..torch import step as torch_step
from . import openmp
from .step_kernel import KINDS, STRIDED, WORK, compiled


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
    model = key.dtype
    if model not in KINDS:
        output = torch_step.step(slots, query, key, value, policy, attention)
        return output if out is None else out.copy_(output)
    dtype = torch.promote_types(model, torch.float32)
    output = query.new_empty(*query.shape[:2], value.shape[2]) if out is None else out
    result = output if output.dtype == dtype else buffer("step output", tuple(output.shape), dtype, query.device)
    query, key, value = (new if new.stride(2) == 1 else new.contiguous() for new in (query, key, value))
    work, alive = _work(slots, query, key, value, result, policy, attention)
    openmp.run(compiled(model, slots.kv), work.ctypes.data, len(query) * slots.keys.shape[1])
    del alive  # tensors that the work points to
    return output if output is result else output.copy_(result)


def _work(
    slots: Slots, query: Tensor, key: Tensor, value: Tensor, output: Tensor, policy: Policy, attention: Attention
) -> tuple[np.ndarray, tuple[Tensor, ...]]:
    """What the threads are told, and the tensors made for it, which must outlive the call."""
    (batch, heads, size), (units, count), dtype = query.shape, slots.positions.shape[1:], output.dtype
    unused = slots.positions  # stands in for tensors that there are none of
    scores, gains, residual = (unused if one is None else one for one in (slots.scores, slots.gains, slots.residual))
    stored = (slots.keys, slots.values, unused if slots.scales is None else slots.scales)
    strided = (query, key, value, output, *stored, slots.positions, scores, gains, residual, slots.next)
    _check(dict(zip(STRIDED, strided, strict=True)))
    seen, sinks = slots.seen.contiguous(), attention.sinks
    plain = (
        seen,
        seen if slots.rows is None else slots.rows.contiguous(),
        seen if sinks is None else sinks.detach().to(dtype).contiguous(),
        buffer("step weights", (batch, heads, count), dtype, query.device),
        torch.zeros(batch, units, dtype=torch.int64),
    )
    capacity = NEVER if policy.capacity is None else policy.capacity
    kept = (slots.scores, slots.gains, slots.residual, slots.rows, sinks)
    if slots.residual is not None and attention.softcap is not None:
        raise ValueError(NO_SOFTCAP)
    work = np.array(
        (
            *(0, batch, heads, slots.keys.shape[1], units, count, size, value.shape[2], len(slots.keys)),
            *(slots.values.shape[3], 0 if slots.scales is None else slots.scales.shape[3]),
            *(policy.first, policy.last, capacity, attention.window or 0, *(tensor is not None for tensor in kept)),
            *(tensor.data_ptr() for tensor in plain),
            *(number for tensor in strided for number in _strides(tensor)),
            *(attention.scale, attention.softcap or 0.0, policy.momentum, policy.residual or 0.0),
        ),
        WORK,
    )
    return work, plain


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
