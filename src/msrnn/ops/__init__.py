"""The hot operation, `scan`, chosen once by device: plain PyTorch, compiled for the CPU, or Triton on a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

from torch import Tensor

from ..policy import Policy
from . import eager

NEVER = eager.NEVER
Vanished = eager.Vanished
Scan = Callable[..., eager.Scanned]


def choose(device: str) -> Scan:
    """The implementation for a kind of device; MSRNN_OPS=eager asks for plain PyTorch everywhere."""
    wanted = os.environ.get("MSRNN_OPS", "auto")
    if wanted not in ("auto", "eager", "compiled"):
        raise ValueError(f"MSRNN_OPS is {wanted!r}; allowed: auto, eager, compiled")
    if wanted != "eager" and device == "cpu" and importlib.util.find_spec("numba"):
        from . import cpu

        return cpu.scan
    if wanted == "compiled":
        raise RuntimeError(f"MSRNN_OPS=compiled, but there is no compiled scan for {device} here (is numba installed?)")
    return eager.scan


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
    chosen = choose(logits.device.type)
    more = {"exponentials": True} if exponentials else {}
    return chosen(logits, births, steps, scores, policy, window, sinks, **more)


def quick(device: str) -> bool:
    """Whether the implementation for a kind of device takes exponentials."""
    return choose(device).__module__ == f"{__name__}.cpu"
