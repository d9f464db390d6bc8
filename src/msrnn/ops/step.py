"""`step`, one token of every row through the recurrence, chosen once by device: plain PyTorch, or Triton on a GPU."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from types import ModuleType

from torch import Tensor

from ..attention import Attention
from ..policy import Policy
from . import eager_step


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
    chosen = _choose(query.device.type, os.environ.get("MSRNN_OPS", "auto"))
    out: Tensor = chosen.step(query, key, value, keys, values, positions, scores, slot, seen, policy, attention)
    return out


@cache
def _choose(device: str, wanted: str) -> ModuleType:
    """MSRNN_OPS=eager asks for plain PyTorch everywhere."""
    if device != "cuda" or wanted == "eager" or importlib.util.find_spec("triton") is None:
        return eager_step
    from . import gpu_step

    return gpu_step
