"""Sizes in bytes, as people write and read them: the one parser and the one formatter of the whole project."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """`16GiB`, `500MB`, `1024` as a number of bytes; a fraction of a byte is dropped."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", text.upper(), re.ASCII)
    if not match or match[2] not in UNITS:
        raise ValueError(f"{text!r} is not a size; write e.g. 16GiB, 500MB or a number of bytes")
    return int(Fraction(match[1]) * UNITS[match[2]])


def human(count: float) -> str:
    """Bytes in powers of 1024, with one decimal: 23.6 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
