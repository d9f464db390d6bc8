"""Kernels compiled side by side before they are first used; one after the other would take most of a minute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import triton
from triton.runtime.jit import JITFunction

_THREADS = min(16, os.cpu_count() or 1)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside this context kernels are compiled, on threads, and not launched: results mean nothing.

    What cannot be compiled says so when it is launched.
    """
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(_THREADS) as threads, _on(threads):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch


def _on(threads: ThreadPoolExecutor) -> AbstractContextManager[object]:
    """Triton's own way to compile on threads; versions without it compile in this one."""
    mode: Any = getattr(triton, "AsyncCompileMode", None)
    return nullcontext() if mode is None else mode(threads, ignore_errors=True)
