"""Compiled work on PyTorch's own threads.

PyTorch's threads spin while they wait for its next operation, so a second pool would compete with them for the same
cores; and a server such as vLLM has pinned them to the cores it wants used. OpenMP on Linux has one entry point for
every parallel region, `GOMP_parallel` (in libgomp, and in Intel's and LLVM's runtimes for code compiled against it),
and it takes any C function. Where there is none, the work runs on one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch


def run(function: Any, address: int, most: int) -> None:
    """`function`, compiled by numba.cfunc, is called with `address` on up to `most` threads; returns when all are done.

    Every thread gets the same address: they share out the work by a counter that lies there.
    """
    threads = min(most, torch.get_num_threads())
    parallel = _gomp_parallel() if threads > 1 else None
    if parallel is None:
        function.ctypes(address)
    else:
        parallel(function.address, address, threads, 0)


@cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, data, threads, flags) of the OpenMP that PyTorch is linked to."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        parallel: Any = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    typed: Callable[[int, int, int, int], None] = parallel
    return typed
