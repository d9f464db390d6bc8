"""`scan` in Triton: the same arguments and results as `eager.scan`, one launch for a whole chunk.

The kernel is in `gpu_kernels`; here is how the work is cut, and the memory that programs share.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...policy import Policy
from ..torch import scan as eager
from ..torch.scan import Scanned
from . import concurrency as beside
from . import scan_kernel as gpu_kernels

_ROWS = 16  # rows per block: with fewer, programs wait for each other more often; with more, bounds are looser
_TILE = 512  # elements of [heads, columns] a warp works on at a time
_WIDEST = 2**15  # columns that one program can hold
_CLOSE = True  # whether a near decision is tried among the nearest columns alone before the whole row is summed
_PART = 2  # one over the part of the processors that scans beside each other may hold


def scan(
    logits: Tensor,
    births: Tensor,
    steps: Tensor,
    scores: Tensor | None,
    policy: Policy,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Scanned:
    """See `eager.scan`. Nothing waits for the device."""
    batch, heads, rows, columns = logits.shape
    if columns > _WIDEST:
        return eager.scan(logits, births, steps, scores, policy, window, sinks)
    units = births.shape[1]
    weights = torch.empty_like(logits, memory_format=torch.contiguous_format)
    mass = logits.new_empty(batch, heads, rows, 1)
    expiry = torch.empty_like(births, memory_format=torch.contiguous_format)
    scores = logits.new_zeros(births.shape) if scores is None else scores.clone()
    plan = _plan(
        batch * units, heads // units, columns, policy.momentum == 0, logits.device, _ROWS, _TILE, beside.scans()
    )
    rough = logits.new_empty(batch * units, 2, _ROWS, 2, columns)  # two blocks' sums and maxima over heads
    notes = torch.zeros(batch * units, 3 + 2 * _ROWS + rows, dtype=torch.int32, device=logits.device)
    gpu_kernels.scan[(batch * units * plan["programs"],)](
        *(logits.contiguous(), weights, mass, births.contiguous(), steps.contiguous(), scores, expiry),
        *(logits if sinks is None else sinks.detach().to(logits.dtype), rough, notes),
        *(units, heads // units, rows, columns),
        2**31 - 1 if policy.capacity is None else policy.capacity,
        *(policy.first, policy.last, window or 0, *halves(policy.momentum)),
        WINDOW=window is not None,
        SINKS=sinks is not None,
        ALL=triton.next_power_of_2(rows),
        SLACK=1e-5 if logits.dtype == torch.float32 else 1e-12,
        FAST=logits.dtype == torch.float32 and logits.is_cuda,
        CLOSE=_CLOSE,
        **plan,
    )
    return Scanned(weights, mass, expiry, scores)


def halves(momentum: float) -> tuple[float, float]:
    """As two float32, which is what a kernel takes. As a constant, every momentum would have to be compiled."""
    high = float(torch.tensor(momentum, dtype=torch.float32))
    return high, momentum - high


@cache
def _plan(
    units: int, heads: int, columns: int, memoryless: bool, device: torch.device, rows: int, tile: int, scans: int
) -> dict[str, Any]:
    """How the work is cut: the tiles, and the programs per unit, all of which must be resident at once.

    Of several `scans` at once each has its part of the processors, and a decider with two helpers at least.
    """
    wide = max(16, triton.next_power_of_2(columns))
    most = triton.next_power_of_2(heads)
    warps = 4 if most * wide <= 4 * tile else 8 if wide <= 2048 else 16 if wide <= 4096 else 32
    some = max(1, min(most, tile * warps // wide))
    programs, registers = 1, min(128, 2048 // warps)
    if device.type == "cuda":  # not in the interpreter, which runs one program after the other
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        programs = max(1, min(rows + 1, processors * max(1, 16 // warps) // units))
        if scans > 1:
            programs = min(programs, max(3, processors // (_PART * scans * units)))
        if warps <= 8 and programs * units <= processors:
            registers = 255  # each has a processor to itself
    plan = {"programs": programs, "SHARED": programs > 1, "num_warps": warps, "maxnreg": registers}
    plan |= {"ROWS": rows, "WIDE": wide, "SOME": some, "MOST": most, "GUESS": memoryless}
    return plan | ({"launch_cooperative_grid": True} if programs > 1 else {})
