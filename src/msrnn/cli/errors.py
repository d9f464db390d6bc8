"""Which errors are answers to what was asked, and how they are told: in one line."""

from __future__ import annotations

import os

MAYBE = (ValueError, OSError, RuntimeError, MemoryError)  # what `expected` is asked about


def expected(error: BaseException) -> bool:
    """Whether an error is about what was asked for. Any other is ours, and its traceback is what a report needs."""
    if os.environ.get("MSRNN_TRACEBACK"):
        return False
    if not isinstance(error, RuntimeError):
        return True
    import torch

    from ..hf.cache import BoundIgnored

    return isinstance(error, BoundIgnored | torch.OutOfMemoryError)


def one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({said[:200]}); use a smaller capacity, model or --dtype"
    return said
