"""`scan` in Triton: the same arguments and results as `kernels/torch/scan.py`, one launch for a whole chunk.

The kernel is in `scan_kernel.py`; here are its grid, its tiles, and the memory that its programs share.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.attention import Attention
from ...core.slots import Columns
from ...core.units import UnitPolicies
from ...policy import Policy
from ..torch import scan as torch_scan
from ..torch.scan import Scan
from . import scan_kernel, scan_residual
from .concurrency import scan_count

_ROWS = 16  # rows per block: with fewer, programs wait for each other more often; with more, bounds are looser
_TILE = 512  # elements of [heads, columns] a warp works on at a time
_MOST_COLUMNS = 2**15  # columns that one program can hold
_CLOSE = True  # whether a near decision is tried among the nearest columns alone before the whole row is summed
_PART = 2  # concurrent scans may occupy 1 / PART of the SMs


def scan(logits: Tensor, columns: Columns, steps: Tensor, policy: Policy, attention: Attention) -> Scan:
    """See `kernels/torch/scan.py`. Nothing waits for the device."""
    if columns.residual is not None:
        return scan_residual.scan(logits, columns, steps, policy, attention)
    batch, heads, rows, size = logits.shape
    if size > _MOST_COLUMNS:
        return torch_scan.scan(logits, columns, steps, policy, attention)
    positions, gains, window, sinks = columns.positions, columns.gains, attention.window, attention.sinks
    units, tensors = positions.shape[1], _outputs(logits, columns)
    plan = _plan(batch * units, heads // units, size, policy.momentum == 0, logits.device, _ROWS, _TILE, scan_count())
    rough = logits.new_empty(batch * units, 2, _ROWS, 2, size)  # two blocks' sums and maxima over heads
    notes = torch.zeros(batch * units, 3 + 2 * _ROWS + rows, dtype=torch.int32, device=logits.device)
    scan_kernel.scan[(batch * units * plan["programs"],)](
        *(logits.contiguous(), tensors.weights, tensors.total, positions.contiguous(), steps.contiguous()),
        *(tensors.scores, tensors.expiry, logits if sinks is None else sinks.detach().to(logits.dtype)),
        *(logits if gains is None else gains.contiguous(), rough, notes, units, heads // units, rows, size),
        2**31 - 1 if policy.capacity is None else policy.capacity,
        *(policy.first, policy.last, window or 0, *split_momentum(policy.momentum)),
        numbers=policy.numbers if isinstance(policy, UnitPolicies) else None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        GAINS=gains is not None,
        GROUP=1 if gains is None else heads // gains.shape[1],
        ALL=triton.next_power_of_2(rows),
        SLACK=1e-5 if logits.dtype == torch.float32 else 1e-12,
        FAST=logits.dtype == torch.float32 and logits.is_cuda,
        CLOSE=_CLOSE,
        **plan,
    )
    return tensors


def _outputs(logits: Tensor, columns: Columns) -> Scan:
    """Empty tensors for the results; the scores begin as they were."""
    scores = logits.new_zeros(columns.positions.shape) if columns.scores is None else columns.scores.clone()
    weights = torch.empty_like(logits, memory_format=torch.contiguous_format)
    expiry = torch.empty_like(columns.positions, memory_format=torch.contiguous_format)
    return Scan(weights, logits.new_empty(*logits.shape[:3], 1), expiry, scores)


def split_momentum(momentum: float) -> tuple[float, float]:
    """As two float32, which is what a kernel takes. As a constant, every momentum would be compiled anew."""
    high = float(torch.tensor(momentum, dtype=torch.float32))
    return high, momentum - high


@cache
def _plan(
    units: int, heads: int, columns: int, memoryless: bool, device: torch.device, rows: int, tile: int, scans: int
) -> dict[str, Any]:
    """Tiles, and programs per unit, all of which must be resident at once.

    Concurrent `scans` share the SMs; each has one deciding program and at least two helpers.
    """
    wide = max(16, triton.next_power_of_2(columns))
    most = triton.next_power_of_2(heads)
    warps = 4 if most * wide <= 4 * tile else 8 if wide <= 2048 else 16 if wide <= 4096 else 32
    some = max(1, min(most, tile * warps // wide))
    programs, registers = 1, min(128, 2048 // warps)
    if device.type == "cuda":  # not in the interpreter, which runs one program after the other
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        programs = max(1, min(rows + 1, sms * max(1, 16 // warps) // units))
        if scans > 1:
            programs = min(programs, max(3, sms // (_PART * scans * units)))
        if warps <= 8 and programs * units <= sms:
            registers = 255  # each has an SM to itself
    plan = {"programs": programs, "SHARED": programs > 1, "num_warps": warps, "maxnreg": registers}
    plan |= {"ROWS": rows, "WIDE": wide, "SOME": some, "MOST": most, "GUESS": memoryless}
    return plan | ({"launch_cooperative_grid": True} if programs > 1 else {})
