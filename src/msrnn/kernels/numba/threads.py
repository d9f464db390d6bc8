"""Work of compiled functions spread over threads that release the GIL."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

WORTHWHILE = 1 << 20  # elements: about 0.7 ms of one core


def units_of(positions: Tensor) -> list[tuple[int, int]]:
    """Every (row, unit) of positions [B, U, N]: the tasks that compiled functions are called for."""
    return [(row, unit) for row in range(positions.shape[0]) for unit in range(positions.shape[1])]


def parallel_for(function: Any, tasks: list[tuple[int, int]], elements: int, *arguments: Any) -> None:
    """function(*task, *arguments) for every task; `function` releases the GIL.

    On as many threads as PyTorch uses, this one among them, if there are enough `elements` to be worth waking others.
    """
    threads = min(torch.get_num_threads(), len(tasks)) if elements >= WORTHWHILE else 1
    queue = iter(tasks)  # next() on a list's iterator is atomic under the GIL: each task is taken once

    def drain() -> None:
        for task in queue:
            function(*task, *arguments)

    others = [_pool(threads - 1).submit(drain) for _ in range(threads - 1)]
    drain()
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="msrnn-scan", initializer=_use_all_cores)


def _use_all_cores() -> None:
    """Let this thread run on every core of the process.

    A thread inherits the affinity of the one that started it. Where OpenMP pins PyTorch's threads (as under vLLM) that
    is one core, which the whole pool would share.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            cores |= os.sched_getaffinity(int(task))
    os.sched_setaffinity(0, cores)
