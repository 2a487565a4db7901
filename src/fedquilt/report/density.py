"""How values lie: counts, and a smooth curve over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, pstdev

NARROWEST = 1.0  # the least that a value is spread, in its own unit


def smoothed(
    values: Sequence[float], low: float = 0.0, high: float = 100.0, *, points: int = 201
) -> list[tuple[float, float]]:
    """A density over [low, high] that is a mean of bells, one around every value.

    A bell's width is Silverman's rule, 1.06 σ n^(-1/5), and at most a fifth of the range. What
    would lie outside is folded back at the ends, so that the area below the curve is 1.
    """
    rule = 1.06 * pstdev(values) * len(values) ** -0.2
    bell = NormalDist(0.0, min(max(rule, NARROWEST), (high - low) / 5))
    step = (high - low) / (points - 1)

    def folded(x: float) -> float:
        return fmean(
            bell.pdf(x - v) + bell.pdf(2 * low - x - v) + bell.pdf(2 * high - x - v) for v in values
        )

    return [(x, folded(x)) for x in (low + step * i for i in range(points))]


def counted(
    values: Sequence[float], low: float = 0.0, high: float = 100.0, *, bins: int = 20
) -> list[int]:
    """How many values are in each of equal parts of [low, high]; the last has its upper end.

    >>> counted([0.0, 4.9, 5.0, 100.0])[:2], counted([100.0])[-1]
    ([2, 1], 1)
    """
    found = [0] * bins
    for value in values:
        place = math.floor((value - low) / (high - low) * bins)
        found[min(max(place, 0), bins - 1)] += 1
    return found
