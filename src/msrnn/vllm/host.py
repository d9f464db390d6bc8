"""A worker's share of the pool of states: host memory, and the copies from and to a request's blocks.

On a GPU memory is pinned, and a block is first copied on the device, so that its request may go on while a stream of
its own brings the copy to the host. Where too many bytes wait for that already, the block is copied from where it is,
and the request waits. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

_STAGED = 256 << 20  # bytes of states that wait on the device at once: memory that vLLM has not counted


class HostPool:
    """`states` places for the state of a request; layers: [blocks, bytes] of every layer here."""

    def __init__(self, states: int, layers: Sequence[Tensor]) -> None:
        self.gpu = layers[0].is_cuda
        sizes = [layer.shape[1] for layer in layers]
        parts = torch.split(_host_memory(states * sum(sizes), self.gpu), [states * size for size in sizes])
        self.memory = [part.view(states, size) for part, size in zip(parts, sizes, strict=True)]
        self.stream = torch.cuda.Stream(layers[0].device) if self.gpu else None  # type: ignore[no-untyped-call]
        self.copies: deque[tuple[torch.cuda.Event, int]] = deque()  # that wait on the device, with their bytes
        self.waiting = 0  # the sum of these bytes

    @property
    def state_bytes(self) -> int:
        return sum(memory.shape[1] for memory in self.memory)

    def save(self, number: int, state: Tensor, place: int) -> None:
        """Copy one layer's part of a state to its place, after all that the current stream was told so far."""
        target = self.memory[number][place]
        if self.stream is None:
            target.copy_(state)
            return
        current, staged = torch.cuda.current_stream(), self._has_room(state.nbytes)
        source = state.clone() if staged else state
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            if staged:
                source.record_stream(self.stream)
                self.copies.append((self.stream.record_event(), source.nbytes))
                self.waiting += source.nbytes
        if not staged:
            current.wait_stream(self.stream)  # what runs next may write to the block

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes more may wait on the device for their way to the host."""
        while self.copies and self.copies[0][0].query():  # type: ignore[no-untyped-call]
            self.waiting -= self.copies.popleft()[1]
        return self.waiting + size <= _STAGED

    def load(self, layers: Sequence[Tensor], place: int, block: int) -> None:
        """Copy a place's state into a block, before all that the device is told from now on."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        for memory, layer in zip(self.memory, layers, strict=True):
            layer[block].copy_(memory[place], non_blocking=True)


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
