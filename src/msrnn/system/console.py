"""Tables, progress bars and notes for people at a terminal: one of each for the whole project."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

_NUMBER = re.compile(r"[-+]?\d|-$")  # "-" stands for a number that is missing


def table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """Aligned text under a header: text to the left, columns of numbers to the right, the first to the left.

    Cells are printed as they are; integers get thousands separators. A first column of nothing but numbers, such as
    layer indices, stands to the right too.
    """
    from tabulate import tabulate

    cells = [[_text(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells under a header of {len(header)}: {row}")
    columns = [list(column) for column in zip(*cells, strict=True)] or [[] for _ in header]
    align = [_align(column, every=index == 0) for index, column in enumerate(columns)]
    # as a row like the others: tabulate pads columns that have headers by two spaces
    text: str = tabulate([list(header), *cells], tablefmt="plain", colalign=align, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _text(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _align(column: list[str], every: bool) -> str:
    """`right` where some cell begins with a number; with `every`, only where all of them do."""
    numbers = [bool(_NUMBER.match(cell)) for cell in column]
    return "right" if numbers and (all(numbers) if every else any(numbers)) else "left"


def progress(total: int | None, description: str, unit: str, quiet: bool = False) -> Any:
    """A tqdm bar on standard error that shows up only when something takes long; in a log, one line every 10 seconds.

    Call `update(n)` as work is done; tokens (`tok`) are counted in thousands and millions.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=description or None,
        unit=unit,
        unit_scale=unit == "tok",
        leave=False,
        disable=quiet,
        delay=0.5 if terminal else 10,
        mininterval=0.1 if terminal else 10,
    )


def note(text: str) -> None:
    """One line for a person, on standard error: standard output is for results."""
    print(f"msrnn: {text}", file=sys.stderr, flush=True)
