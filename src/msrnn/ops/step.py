"""`step`, one token of every row through the recurrence, chosen once by device: plain PyTorch, or Triton on a GPU."""

from __future__ import annotations

from torch import Tensor

from ..attention import Attention
from ..policy import Policy
from . import compiled, eager_step


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
) -> Tensor:
    """One token in place; see `eager_step.step` for the meaning of every argument."""
    if query.device.type != "cuda" or not compiled("cuda"):
        return eager_step.step(query, key, value, keys, values, positions, scores, slot, seen, policy, attention)
    from . import gpu_step

    return gpu_step.step(query, key, value, keys, values, positions, scores, slot, seen, policy, attention)
