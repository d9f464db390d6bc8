"""A worker's share of the pool of states: host memory, and the copies from and to a request's blocks.

On a GPU host memory is pinned. A block is first copied on the device, into the next place of a ring, so that its
request may go on while a stream of its own brings the copy to the host. A place of the ring is used again when that is
done, and a state is loaded when all its layers are there: the device waits for it, never the host. Nothing here imports
vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle

import torch
from torch import Tensor

_RING = 256 << 20  # bytes of layers' states on their way to the host
_reserved: dict[torch.device, Tensor | None] = {}  # None: a pool has it


def reserve_ring(device: torch.device) -> None:
    """Take the memory of a pool's ring before there is the pool: while vLLM measures what is left for blocks."""
    if device not in _reserved:
        with torch.inference_mode(False):
            _reserved[device] = torch.empty(_RING, dtype=torch.uint8, device=device)


class HostPool:
    """`states` places for the state of a request; layers: [blocks, bytes] of every layer here.

    `saves`: whether states come from blocks, too; others are laid out in `memory` by whoever has them.
    """

    def __init__(self, states: int, layers: Sequence[Tensor], saves: bool = True) -> None:
        self.gpu = layers[0].is_cuda
        sizes = [layer.shape[1] for layer in layers]
        parts = torch.split(_host_memory(states * sum(sizes), self.gpu), [states * size for size in sizes])
        self.memory = [part.view(states, size) for part, size in zip(parts, sizes, strict=True)]
        self.ring = _Ring(max(sizes), layers[0].device) if self.gpu and saves else None
        self.copied: defaultdict[int, torch.cuda.Event] = defaultdict(torch.cuda.Event)  # the last layer, by place

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
            self.copied[place].record(self.ring.stream)

    def load(self, layers: Sequence[Tensor], place: int, block: int) -> None:
        """Copy a place's state into a block, before all that the device is told from now on."""
        if place in self.copied:
            torch.cuda.current_stream().wait_event(self.copied[place])
        for memory, layer in zip(self.memory, layers, strict=True):
            layer[block].copy_(memory[place], non_blocking=True)

    def close(self) -> None:
        """The end of the pool: memory that goes back pinned stays so, and another pool may get the same address."""
        if self.gpu and self.memory:
            with suppress(torch.AcceleratorError):  # an earlier one, which was seen: the device is lost for good
                torch.cuda.synchronize()
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self.memory[0].data_ptr())
        if self.ring is not None:
            _reserved.pop(self.ring.places.device, None)
        self.memory, self.ring = [], None


class _Ring:
    """Places on the device for `size` bytes each, and the stream that empties them into host memory."""

    def __init__(self, size: int, device: torch.device) -> None:
        count, memory = max(1, _RING // size), _reserved.get(device)
        if memory is None or memory.numel() < count * size:
            memory = torch.empty(count * size, dtype=torch.uint8, device=device)
        _reserved[device] = None
        self.places = memory[: count * size].view(count, size)
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
