"""A progress bar over measurements, which names the one that runs."""

from __future__ import annotations

import sys
from typing import Any


def bar(total: int | None, unit: str, quiet: bool) -> Any:
    from tqdm import tqdm

    seen = sys.stderr.isatty()  # in a log, a line now and then is enough
    return tqdm(
        total=total,
        unit=unit,
        unit_scale=unit == "tok",
        leave=False,
        disable=quiet,
        delay=0.5 if seen else 10,
        mininterval=0.1 if seen else 10,
    )
