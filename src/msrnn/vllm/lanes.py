"""Pipelined prefill of a long prompt alone in a batch: pieces of it are in the model together, each a layer behind.

The scan of one prompt is a chain of decisions that leaves most of a GPU idle. A layer may take a piece as soon as it is
done with the one before, whatever the layers above are doing. So vLLM's forward pass runs once for every piece, on a
few streams, the lanes, and a piece waits in every layer for the one before it. Without a GPU pieces run in turn.
Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

PIECE = 1024  # tokens: the host launches a layer anew for each piece, and at both ends of a prompt lanes stand idle
LANES = 6  # pieces on their way at once: more would leave the matmuls too few SMs


class Turns:
    """The order of pieces in every layer: each takes a layer when the one before has left it."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.readers: dict[Any, Any] = {}  # by layer: what its pieces have in common
        self._left: dict[Any, torch.cuda.Event] = {}

    @contextmanager
    def take(self, layer: Any) -> Iterator[None]:
        stream = torch.cuda.current_stream() if self.gpu else None
        if stream is not None and layer in self._left:
            stream.wait_event(self._left[layer])
        yield
        if stream is not None:
            self._left[layer] = stream.record_event()


class Streams:
    """The lanes of a device."""

    def __init__(self, device: torch.device, lanes: int = LANES) -> None:
        self.device, self.lanes = device, lanes

    @cached_property
    def streams(self) -> list[torch.cuda.Stream]:
        """Taken when first needed: PyTorch has 32 streams for everybody."""
        lanes = self.lanes if self.device.type == "cuda" else 0
        return [torch.cuda.Stream(self.device) for _ in range(lanes)]  # type: ignore[no-untyped-call]

    def turns(self) -> Turns:
        return Turns(bool(self.streams))

    def run(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """The results of calls, each on a lane, in turn: after all that came before, and before all that follows.

        Nothing is copied: a lane waits at its next use for what is done with its results here.
        """
        if not self.streams:
            return [call() for call in calls]
        main, results = torch.cuda.current_stream(), []
        for stream in self.streams:
            stream.wait_stream(main)
        for number, call in enumerate(calls):
            with torch.cuda.stream(self.streams[number % self.lanes]):
                results.append(call())
        for stream in self.streams:
            main.wait_stream(stream)
        return results
