"""How much worse than the full model is still good enough, as the user writes it: `0.4` points or `5%`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """How much worse than full is acceptable: in perplexity points, or as a share of the full model's perplexity."""

    points: float | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """`0.4` (points) or `5%`."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
        if not match or float(match[1]) <= 0:
            raise ValueError(
                f"{text!r} is not a tolerance above 0; write perplexity points (0.4) or a share of full "
                "attention's perplexity (5%)"
            )
        value = float(match[1])
        return cls(share=value / 100) if match[2] else cls(points=value)

    def nats(self, full_perplexity: float) -> float:
        """The same as a difference of mean losses."""
        return math.log1p(self.share if self.share is not None else (self.points or 0.0) / full_perplexity)

    def __str__(self) -> str:
        return f"{self.points:g} points" if self.share is None else f"{100 * self.share:g} %"
