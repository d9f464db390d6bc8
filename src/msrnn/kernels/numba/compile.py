"""Numba's decorators, with a cache on disk wherever there is a place for one.

Numba keeps compiled functions beside their source or in the user's cache folder. Where neither can be written (a
read-only installation without a home) the cache is ours, and where that cannot be written either, there is none. A disk
that is full, or a damaged file of the cache, costs a compilation and no call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numba
from numba.core.caching import FunctionCache

from ...system.console import note
from ...system.downloads import cache_folder

_noted = False
FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}  # not nnan: a row with an overflow must be seen


def jit(fastmath: set[str]) -> Any:
    """A decorator: compiled at its first call, without the GIL."""
    return lambda function: _cached(partial(_jit, function, fastmath))


def _jit(function: Any, fastmath: set[str], on_disk: bool) -> Any:
    compiled = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)
    if on_disk:
        compiled._cache = _Cache(function)  # as `cache=True` does, with Numba's own class
    return compiled


def cfunc(signature: Any, function: Any) -> Any:
    """`function` compiled now, as C code can call it."""
    return _cached(lambda on_disk: numba.cfunc(signature, nopython=True, cache=on_disk, error_model="numpy")(function))


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, which is read and written at a function's first call."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged pickle can raise anything
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _note_once(f"{error.strerror}: {self.cache_path}", "NUMBA_CACHE_DIR to a folder with room")


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
        reason = f"neither the installation nor {cache_folder()} can be written"
        _note_once(reason, "MSRNN_CACHE to a folder that can be written")
        return compile(False)
    finally:
        numba.config.CACHE_DIR = before


def _note_once(reason: str, remedy: str) -> None:
    global _noted
    if not _noted:
        _noted = True
        note(
            f"compiled code cannot be kept: {reason}, so every start compiles anew (about half a minute); set {remedy}"
        )
