"""A worker's share of the pool of states: host memory, and the copies from and to a request's blocks.

On a GPU host memory is pinned. A block is first copied on the device, into the next place of a ring, so that its
request may go on while a stream of its own brings the copy to the host. A place of the ring is used again when that is
done: the device waits for it, never the host. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor

_RING = 256 << 20  # bytes of layers' states on their way to the host: taken at the start, as vLLM does not count them


class HostPool:
    """`states` places for the state of a request; layers: [blocks, bytes] of every layer here."""

    def __init__(self, states: int, layers: Sequence[Tensor]) -> None:
        gpu = layers[0].is_cuda
        sizes = [layer.shape[1] for layer in layers]
        parts = torch.split(_host_memory(states * sum(sizes), gpu), [states * size for size in sizes])
        self.memory = [part.view(states, size) for part, size in zip(parts, sizes, strict=True)]
        self.ring = _Ring(max(sizes), layers[0].device) if gpu else None

    @property
    def state_bytes(self) -> int:
        return sum(memory.shape[1] for memory in self.memory)

    def save(self, number: int, state: Tensor, place: int) -> None:
        """Copy one layer's part of a state to its place, after all that the current stream was told so far."""
        target = self.memory[number][place]
        if self.ring is None:
            target.copy_(state)
        else:
            self.ring.copy(state, target)

    def load(self, layers: Sequence[Tensor], place: int, block: int) -> None:
        """Copy a place's state into a block, before all that the device is told from now on."""
        if self.ring is not None:
            torch.cuda.current_stream().wait_stream(self.ring.stream)
        for memory, layer in zip(self.memory, layers, strict=True):
            layer[block].copy_(memory[place], non_blocking=True)

    def close(self) -> None:
        """The end of the pool: memory that goes back pinned stays so, and another pool may get the same address."""
        if self.ring is not None:
            torch.cuda.synchronize()
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self.memory[0].data_ptr())
        self.memory = []


class _Ring:
    """Places on the device for `size` bytes each, and the stream that empties them into host memory."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.places = torch.empty(max(1, _RING // size), size, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.emptied = [torch.cuda.Event() for _ in self.places]  # type: ignore[no-untyped-call]
        self.turns = cycle(range(len(self.places)))

    def copy(self, state: Tensor, target: Tensor) -> None:
        turn, current = next(self.turns), torch.cuda.current_stream()
        source, emptied = self.places[turn, : len(state)], self.emptied[turn]
        current.wait_event(emptied)  # of the time before; it has passed where there was none
        source.copy_(state)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            emptied.record(self.stream)


def _host_memory(size: int, pinned: bool) -> Tensor:
    """So many bytes. Pinned as they are: PyTorch's own pinned memory comes in powers of two."""
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned:
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            gib = memory.nbytes / 2**30
            raise MemoryError(f"{gib:.1f} GiB of host memory cannot be pinned (CUDA error {code}); take less")
    return memory
