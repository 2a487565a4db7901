"""Estimates a smooth density of values in a range."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MIN_BANDWIDTH = 1.0  # in the unit of the values, so that equal values can be drawn


def estimate_density(
    values: Sequence[float], low: float = 0.0, high: float = 100.0, *, points: int = 201
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Estimates a density over [low, high] with a Gaussian kernel around every value.

    The bandwidth follows Silverman's rule, 1.06 σ n^(-1/5), and is at most a fifth of the range.
    Kernels are reflected at both ends, so that the area below the curve is 1.
    ``scipy.stats.gaussian_kde`` reflects nothing, and fails on equal values.

    Returns:
        The points in the range, and the density at each.
    """
    data = np.asarray(values, dtype=np.float64)
    rule = 1.06 * data.std() * len(data) ** -0.2
    bandwidth = min(max(rule, MIN_BANDWIDTH), (high - low) / 5)
    centers = np.concatenate([data, 2 * low - data, 2 * high - data])
    x = np.linspace(low, high, points)
    kernels = np.exp(-(((x[:, None] - centers) / bandwidth) ** 2) / 2)
    return x, kernels.sum(axis=1) / (len(data) * bandwidth * np.sqrt(2 * np.pi))
