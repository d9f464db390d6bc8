"""Working memory that is used again: on the CPU, fresh pages cost more than the arithmetic done in them.

A buffer is overwritten by the next call with the same name in the same thread, so nothing that outlives a chunk may
stay in one. Other devices have allocators that do this themselves.
"""

from __future__ import annotations

import threading
from math import prod

import torch
from torch import Tensor


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], Tensor] = {}


_local = _Buffers()


@torch.inference_mode(False)
def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor, the same memory every time for a name and dtype on the CPU."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    buffers = _local.held
    size, key = prod(shape), (name, dtype)
    if key not in buffers or buffers[key].numel() < size:
        buffers[key] = torch.empty(size, dtype=dtype)
    return buffers[key][:size].view(shape)
