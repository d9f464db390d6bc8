"""The hot operations, chosen once by device: plain PyTorch, compiled for the CPU, or Triton on a GPU."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

from torch import Tensor

from ..policy import Policy
from .torch import scan as eager

NEVER = eager.NEVER
Vanished = eager.Vanished
mask = eager.mask


def compiled(device: str) -> bool:
    """Whether a kind of device has compiled operations here; MSRNN_OPS=eager asks for plain PyTorch everywhere."""
    wanted = os.environ.get("MSRNN_OPS", "auto")
    if wanted not in ("auto", "eager", "compiled"):
        raise ValueError(f"MSRNN_OPS is {wanted!r}; allowed: auto, eager, compiled")
    package = {"cpu": "numba", "cuda": "triton"}.get(device)
    able = package is not None and importlib.util.find_spec(package) is not None
    if wanted == "compiled" and not able:
        advice = f"install {package}" if package else "it has plain PyTorch only"
        raise RuntimeError(f"MSRNN_OPS=compiled, but there is no compiled scan for {device} here: {advice}")
    return able and wanted != "eager"


def _rows(device: str) -> ModuleType:
    """Whoever moves rows and hides weights on a kind of device."""
    if device == "cpu" and compiled(device):
        from .numba import compact as cpu_rows

        return cpu_rows
    return eager


def scan(
    logits: Tensor,
    births: Tensor,
    steps: Tensor,
    scores: Tensor | None,
    policy: Policy,
    window: int | None = None,
    sinks: Tensor | None = None,
    exponentials: bool = False,
) -> eager.Scanned:
    """Run a chunk's evictions; see `eager.scan` for the meaning of every argument.

    An implementation that is `quick` also takes the logits' exponentials in their place, and works in their memory. It
    raises `Vanished` if they have overflowed or underflowed: then call again with the logits themselves.
    """
    device = logits.device.type
    if not compiled(device):
        return eager.scan(logits, births, steps, scores, policy, window, sinks)
    if device == "cuda":
        from .triton import scan as gpu

        return gpu.scan(logits, births, steps, scores, policy, window, sinks)
    from .numba import scan as cpu

    return cpu.scan(logits, births, steps, scores, policy, window, sinks, exponentials)


def quick(device: str) -> bool:
    """Whether the scan for a kind of device takes exponentials."""
    return compiled(device) and device == "cpu"


def hide(weights: Tensor, births: Tensor, expiry: Tensor, steps: Tensor, sinks: Tensor | None) -> Tensor:
    """Exponentials of what is not visible become 0; see `eager.hide`."""
    mass: Tensor = _rows(weights.device.type).hide(weights, births, expiry, steps, sinks)
    return mass


def compact(
    births: Tensor, scores: Tensor | None, rows: tuple[Tensor, ...], expiry: Tensor, used: int, end: int
) -> None:
    """Close the gaps that a chunk's evictions left; see `eager.compact`."""
    if births.is_cuda and compiled("cuda"):
        from .triton import compact as gpu_rows

        gpu_rows.compact(births, scores, rows, expiry, used, end)
        return
    _rows(births.device.type).compact(births, scores, rows, expiry, used, end)
