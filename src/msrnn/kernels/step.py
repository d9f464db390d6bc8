"""`step`, one token of every row through the recurrence, chosen once by device: plain PyTorch, Numba or Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..core.attention import Attention
from ..policy import Policy
from . import compiled
from .torch import step as eager_step


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scores: Tensor | None,
    slot: Tensor,
    seen: Tensor,
    policy: Policy,
    attention: Attention,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token in place; see `eager_step.step` for the meaning of every argument."""
    given = (query, key, value, keys, values, positions, scores, slot, seen, policy, attention, rows, out)
    device = query.device.type
    if device not in ("cpu", "cuda") or not compiled(device):
        return eager_step.step(*given)
    if device == "cpu":
        from .numba import step as cpu_step

        return cpu_step.step(*given)
    from .triton import step as gpu_step

    return gpu_step.step(*given)


def side(device: torch.device) -> AbstractContextManager[None]:
    """Within it, where there is a GPU, who leaves is decided while the model goes on; outside, all are decided."""
    if device.type != "cuda" or not compiled("cuda"):
        return nullcontext()
    from .triton import step as gpu_step

    return gpu_step.Side(device)
