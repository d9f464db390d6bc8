"""Numba's decorators, with a cache on disk wherever there is a place for one.

Numba keeps compiled functions beside their source or in the user's cache folder. Where neither can be written (a
read-only installation without a home) the cache is ours, and where that cannot be written either, there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba

from ...system.console import note
from ...system.downloads import cache_folder

FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}  # not nnan: a row with an overflow must be seen


def jit(fastmath: set[str]) -> Any:
    """A decorator: compiled at its first call, without the GIL."""
    return lambda function: _cached(
        lambda on_disk: numba.njit(nogil=True, cache=on_disk, fastmath=fastmath, error_model="numpy")(function)
    )


def cfunc(signature: Any, function: Any) -> Any:
    """`function` compiled now, as C code can call it."""
    return _cached(lambda on_disk: numba.cfunc(signature, nopython=True, cache=on_disk, error_model="numpy")(function))


def _cached(compile: Callable[[bool], Any]) -> Any:
    """Compile with a cache in the first place that can be written; Numba looks for one as it decorates."""
    try:
        return compile(True)
    except (RuntimeError, OSError):
        pass  # "no locator available"
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(cache_folder() / "numba")
        return compile(True)
    except (RuntimeError, OSError):
        _warn()
        return compile(False)
    finally:
        numba.config.CACHE_DIR = before


@cache
def _warn() -> None:
    note(
        f"compiled code cannot be kept: neither the installation nor {cache_folder()} can be written, so every start "
        "compiles anew (about half a minute); set MSRNN_CACHE to a folder that can be written"
    )
