"""How many scans run at once on one device: each takes fewer of its processors then, and leaves some for the matmuls.

A scan's programs wait for each other, so all of them hold a processor from its beginning to its end. Nothing but speed
depends on this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_together: ContextVar[int] = ContextVar("scans under way at once", default=1)


@contextmanager
def together(scans: int) -> Iterator[None]:
    """Within, so many scans are launched beside each other."""
    before = _together.set(scans)
    try:
        yield
    finally:
        _together.reset(before)


def scans() -> int:
    return _together.get()
