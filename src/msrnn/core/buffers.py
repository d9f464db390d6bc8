"""Reusable working memory: on the CPU, touching fresh pages costs more than the arithmetic done in them.

A buffer is overwritten by the next call with the same name in the same thread, so nothing that outlives a chunk may
stay in one. Other devices have caching allocators.
"""

from __future__ import annotations

import threading
from math import prod

import torch
from torch import Tensor


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[tuple[str, torch.dtype], Tensor] = {}


_buffers = _Buffers()


@torch.inference_mode(False)
def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on the CPU the same memory every time for a name and dtype."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    buffers, size, key = _buffers.by_name, prod(shape), (name, dtype)
    if key not in buffers or buffers[key].numel() < size:
        buffers[key] = torch.empty(size, dtype=dtype)
    return buffers[key][:size].view(shape)
