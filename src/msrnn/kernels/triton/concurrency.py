"""How many scans run at the same time on one device: each then takes fewer SMs and leaves some for the matmuls.

A scan's programs wait for each other, so each holds an SM from beginning to end. Only speed depends on this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_scans: ContextVar[int] = ContextVar("concurrent scans", default=1)


@contextmanager
def concurrent_scans(count: int) -> Iterator[None]:
    """Inside this context, so many scans are launched on streams beside each other."""
    before = _scans.set(count)
    try:
        yield
    finally:
        _scans.reset(before)


def scan_count() -> int:
    return _scans.get()
