"""Random: any token of the state is as likely to leave as any other. What a policy must beat.

The draws are a hash of the token and the step, so that every path, run, layer and head draws the same.
"""

from torch import Tensor

from msrnn.core.rules import View

_WORD = 0xFFFFFFFF


def score(view: View) -> Tensor:
    return _mix(view.positions * 0x9E3779B1 + view.now * 0x85EBCA77) / 2**32


def _mix(numbers: Tensor) -> Tensor:
    """Whole numbers -> 0 to 2^32 - 1, where neighbours have nothing in common."""
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        numbers = numbers & _WORD
        numbers = (numbers ^ (numbers >> shift)) * factor
    numbers = numbers & _WORD
    return numbers ^ (numbers >> 15)
