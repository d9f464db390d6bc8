"""Spending a number of slots where it buys most: from each layer's loss by capacity to one capacity per layer.

Plain numbers in, plain numbers out. The losses of the layers are taken to add up; whether they do is for the caller to
measure. Under that assumption the result is the best there is, up to the interpolation between measured capacities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import log

Curve = Mapping[int, float]  # capacity -> loss over a full state
Points = list[tuple[int, float]]
_BETWEEN = 8  # points put between two measured capacities
_NOTHING = 1e-9  # a loss too small to be told from none


def allocate(curves: Sequence[Curve], total: int) -> list[int]:
    """Capacities that sum to `total` with the least sum of losses; slots beyond the ends of all curves go to all alike.

    Every step along a convex curve buys less than the one before, so taking the best step of all layers, again and
    again, is taking all steps in the order of what a slot buys: the Lagrangian's answer for every total at once.
    """
    hulls = [convex(between(falling(curve))) for curve in curves]
    capacities = [hull[0][0] for hull in hulls]
    left = total - sum(capacities)
    if left < 0:
        raise ValueError(f"{total} slots are fewer than the smallest capacities of all layers, {sum(capacities)}")
    for _, layer, slots in sorted(_steps(hulls)):
        taken = min(slots, left)
        capacities[layer] += taken
        left -= taken
    each, more = divmod(left, len(hulls))
    return [capacity + each + (layer < more) for layer, capacity in enumerate(capacities)]


def _steps(hulls: Sequence[Points]) -> Iterable[tuple[float, int, int]]:
    """(what a slot changes, layer, slots) of every piece of every curve; equal gains go to the lower layer first."""
    for layer, hull in enumerate(hulls):
        for (low, loss), (high, less) in pairwise(hull):
            yield (less - loss) / (high - low), layer, high - low


def expected(curves: Sequence[Curve], capacities: Sequence[int]) -> float:
    """The sum of the layers' losses, as the curves tell it."""
    return sum(_at(between(falling(curve)), capacity) for curve, capacity in zip(curves, capacities, strict=True))


def falling(curve: Curve) -> Points:
    """The nearest curve (least squares) that never rises: more slots are never worse, but for noise."""
    blocks: list[tuple[float, int]] = []  # mean, members
    for _, loss in sorted(curve.items()):
        mean, members = max(loss, 0.0), 1
        while blocks and blocks[-1][0] < mean:
            before, count = blocks.pop()
            mean, members = (before * count + mean * members) / (count + members), members + count
        blocks.append((mean, members))
    return list(zip(sorted(curve), [mean for mean, members in blocks for _ in range(members)], strict=True))


def between(points: Points) -> Points:
    """The same curve with points in between, on straight lines of log loss against log capacity.

    Losses fall roughly as a power of the capacity; a straight line from 256 to 512 would say that nothing in between
    is worth having.
    """
    filled: Points = []
    for (low, loss), (high, less) in pairwise(points):
        for capacity in sorted({round(low * (high / low) ** (i / _BETWEEN)) for i in range(_BETWEEN)}):
            if capacity < high:
                filled.append((capacity, _power(low, loss, high, less, capacity)))
    return [*filled, points[-1]]


def _power(low: int, loss: float, high: int, less: float, at: int) -> float:
    if less < _NOTHING:  # no logarithm: a straight line to nothing
        return loss + (less - loss) * (at - low) / (high - low)
    return float(loss * (less / loss) ** (log(at / low) / log(high / low)))


def _at(points: Points, capacity: int) -> float:
    """Straight between two points, level outside."""
    for (low, loss), (high, less) in pairwise(points):
        if low <= capacity <= high:
            return loss + (less - loss) * (capacity - low) / (high - low)
    return points[0][1] if capacity < points[0][0] else points[-1][1]


def convex(points: Points) -> Points:
    """The lower convex hull: the points that some price per slot would choose."""
    hull: Points = []
    for point in points:
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(left: tuple[int, float], middle: tuple[int, float], right: tuple[int, float]) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    rise = (right[1] - left[1]) * (middle[0] - left[0])
    return (middle[1] - left[1]) * (right[0] - left[0]) >= rise
