"""CUDA streams for work of one layer that may run side by side. Without a GPU all of it runs in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

from .. import kernels

_MOST = 4  # streams, the current one among them


@contextmanager
def side_by_side(device: torch.device, count: int) -> Iterator[list[AbstractContextManager[object]]]:
    """A context for each of `count` pieces of work; what follows comes after all of them.

    Memory that a piece takes belongs to its stream, and what it is given stays in use until the end: nothing is freed
    too early. A graph that is captured gets branches.
    """
    if device.type != "cuda" or count < 2:
        yield [nullcontext()] * count
        return
    main, sides = torch.cuda.current_stream(device), _streams(device)[: count - 1]
    for side in sides:
        side.wait_stream(main)
    contexts: list[AbstractContextManager[object]] = [nullcontext(), *(torch.cuda.stream(side) for side in sides)]
    with kernels.concurrent_scans(len(contexts)):
        yield [contexts[piece % len(contexts)] for piece in range(count)]
    for side in sides:
        main.wait_stream(side)


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_MOST - 1)]  # type: ignore[no-untyped-call]
