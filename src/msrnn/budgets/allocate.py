"""Allocate a number of slots to layers: from each layer's loss by capacity to one capacity per layer.

Plain numbers in, plain numbers out. The losses of the layers are assumed to add up; whether they do is for the caller
to measure. Under that assumption the result is optimal, up to the interpolation between measured capacities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import log

Curve = Mapping[int, float]  # capacity -> loss over a full state
Points = list[tuple[int, float]]
_STEPS = 8  # interpolation steps between two measured capacities
_ZERO = 1e-9  # a loss below this counts as none


def allocate(curves: Sequence[Curve], total: int) -> list[int]:
    """Capacities that sum to `total` with the least sum of losses; slots beyond all curves' ends are shared equally.

    Along a convex curve every step gains less per slot than the one before, so greedily taking the best step over all
    layers takes steps in the order of their gain: the Lagrangian solution for every total at once.
    """
    hulls = [convex_hull(interpolate(non_increasing(curve))) for curve in curves]
    capacities = [hull[0][0] for hull in hulls]
    left = total - sum(capacities)
    if left < 0:
        raise ValueError(f"{total} slots are fewer than the smallest capacities of all layers, {sum(capacities)}")
    for _, layer, slots in sorted(_steps(hulls)):
        slots = min(slots, left)
        capacities[layer] += slots
        left -= slots
    each, more = divmod(left, len(hulls))
    return [capacity + each + (layer < more) for layer, capacity in enumerate(capacities)]


def _steps(hulls: Sequence[Points]) -> Iterable[tuple[float, int, int]]:
    """(change of loss per slot, layer, slots) of every segment of every curve; sorted, the lower layer goes first."""
    for layer, hull in enumerate(hulls):
        for (low, loss), (high, less) in pairwise(hull):
            yield (less - loss) / (high - low), layer, high - low


def expected_loss(curves: Sequence[Curve], capacities: Sequence[int]) -> float:
    """The sum of the layers' losses according to the curves."""
    return sum(
        _value_at(interpolate(non_increasing(curve)), capacity)
        for curve, capacity in zip(curves, capacities, strict=True)
    )


def non_increasing(curve: Curve) -> Points:
    """The nearest curve (isotonic regression) that never rises: where more slots are worse, that is noise."""
    blocks: list[tuple[float, int]] = []  # mean, members
    for _, loss in sorted(curve.items()):
        mean, members = max(loss, 0.0), 1
        while blocks and blocks[-1][0] < mean:
            before, count = blocks.pop()
            mean, members = (before * count + mean * members) / (count + members), members + count
        blocks.append((mean, members))
    return list(zip(sorted(curve), [mean for mean, members in blocks for _ in range(members)], strict=True))


def interpolate(points: Points) -> Points:
    """The same curve with points in between, on straight lines of log loss against log capacity.

    Losses fall roughly as a power of the capacity; on a straight line from 256 to 512 no capacity in between would
    ever be chosen.
    """
    filled: Points = []
    for (low, loss), (high, less) in pairwise(points):
        for capacity in sorted({round(low * (high / low) ** (i / _STEPS)) for i in range(_STEPS)}):
            if capacity < high:
                filled.append((capacity, _power_law(low, loss, high, less, capacity)))
    return [*filled, points[-1]]


def _power_law(low: int, loss: float, high: int, less: float, at: int) -> float:
    if less < _ZERO:  # it has no logarithm: a straight line to zero
        return loss + (less - loss) * (at - low) / (high - low)
    return float(loss * (less / loss) ** (log(at / low) / log(high / low)))


def _value_at(points: Points, capacity: int) -> float:
    """Linear between two points, constant outside."""
    for (low, loss), (high, less) in pairwise(points):
        if low <= capacity <= high:
            return loss + (less - loss) * (capacity - low) / (high - low)
    return points[0][1] if capacity < points[0][0] else points[-1][1]


def convex_hull(points: Points) -> Points:
    """The lower convex hull: the points that are optimal at some price per slot."""
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
