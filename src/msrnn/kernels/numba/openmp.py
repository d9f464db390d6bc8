"""Compiled work on PyTorch's own threads.

PyTorch's threads wait for its next operation by spinning, so a second pool would compete with them for the same cores;
and a server such as vLLM has bound them to the cores it wants used, where new threads would all share the first one's.
OpenMP on Linux has one entry for every parallel region, `GOMP_parallel` (in libgomp, and in Intel's and LLVM's runtimes
for those who were compiled against it), and it takes any C function. Where there is none, the work runs on one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch


def run(work: Any, data: int, most: int) -> None:
    """`work`, compiled by numba.cfunc, is called with the address `data` on up to `most` threads; ends when all have.

    Every thread gets the same address: they share the work out by counting in what lies there.
    """
    threads = min(most, torch.get_num_threads())
    parallel = _parallel() if threads > 1 else None
    if parallel is None:
        work.ctypes(data)
    else:
        parallel(work.address, data, threads, 0)


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, data, threads, flags) of the OpenMP that PyTorch is linked to."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        parallel: Any = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    found: Callable[[int, int, int, int], None] = parallel
    return found
