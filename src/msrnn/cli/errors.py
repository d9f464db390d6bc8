"""Which errors are about the user's input, and how they are printed: in one line."""

from __future__ import annotations

import os

CAUGHT = (ValueError, OSError, RuntimeError, MemoryError)  # the types that `is_user_error` tells apart


def is_user_error(error: BaseException) -> bool:
    """Whether an error is about the input. Any other is a bug of ours, and a bug report needs its traceback."""
    if os.environ.get("MSRNN_TRACEBACK"):
        return False
    if not isinstance(error, RuntimeError):
        return True
    import torch

    from ..hf.attention import BoundIgnored

    return isinstance(error, BoundIgnored | torch.OutOfMemoryError)


def one_line(error: BaseException) -> str:
    """The error message in one line, with the way out where memory ran out."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({message[:200]}); use a smaller capacity, model or --dtype"
    return message
