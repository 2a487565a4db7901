"""Differentiable sampling of channels: how likely each is kept, and what that depends on (ADDS).

Gong, Gao, Wu, Qin. "ADDS: Adaptive Differentiable Sampling for Robust Multi-Party Learning."
Sec. 3.3.

Symbols of the paper -> names here: α -> share, b_c -> importance, p_c -> rates, ω_c -> gates,
β -> shift, ε -> softness.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROUNDS = 200  # far more than numbers of 64 bits need
CLOSE = 1e-9  # of the mean rate to the share


def shift(importance: npt.NDArray[np.float64], share: float, softness: float) -> float:
    """Eq. 14: the β at which the rates of all channels sum to share · C.

    Rates fall as β grows. Outside of the importances by ε · log(…) they are all nearly 1 or 0, so
    β is between. Steps by the slope (Eq. 17) and halvings take turns: the former end it quickly,
    the latter surely.
    """
    count = len(importance)
    if share >= 1:
        return -math.inf
    reach = softness * (math.log(count / min(share, 1 - share)) + 1)
    low, high = float(importance.min()) - reach, float(importance.max()) + reach
    middle = (low + high) / 2
    for number in range(ROUNDS):
        kept = _sigmoid((importance - middle) / softness)
        excess = float(kept.sum()) - share * count
        if abs(excess) <= CLOSE * count:
            break
        low, high = (middle, high) if excess > 0 else (low, middle)
        slope = float((kept * (1 - kept)).sum()) / softness
        following = middle + excess / slope if number % 2 == 0 and slope > 0 else low
        middle = following if low < following < high else (low + high) / 2
        if not low < middle < high:  # neighbours, as far as numbers go
            break
    return middle


def rates(importance: Tensor, share: float, softness: float) -> Tensor:
    """Eq. 13: p_c = σ((b_c - β) / ε), whose mean is the share."""
    return torch.from_numpy(_sigmoid(_distance(importance, share, softness)))


def gates(share: Tensor, importance: Tensor, softness: float, noise: Tensor) -> Tensor:
    """ω_c ~ Bernoulli(p_c), 0 or 1; ``noise`` is uniform in [0, 1).

    The gradient with respect to the share goes back straight through them.
    """
    drawn: Tensor = _Gates.apply(share, importance, softness, noise)  # type: ignore[no-untyped-call]
    return drawn


class _Gates(torch.autograd.Function):
    """Straight through: the gradient of ω_c is taken for that of p_c. By Eq. 18 that of α is
    C Σ_c g_c p_c (1 - p_c) / Σ_c p_c (1 - p_c): a mean, in which channels that are not yet decided
    count most.
    """

    @staticmethod
    def forward(
        ctx: Any, share: Tensor, importance: Tensor, softness: float, noise: Tensor
    ) -> Tensor:
        """Open where the noise is below the rate."""
        distance = _distance(importance, float(share), softness)
        ctx.weights = _spread(distance)
        kept = torch.from_numpy(_sigmoid(distance))
        return (noise < kept).to(importance.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Eq. 18."""
        found = len(gradient) * (gradient.double() * ctx.weights).sum()
        return found.to(gradient.dtype), None, None, None


def _distance(importance: Tensor, share: float, softness: float) -> npt.NDArray[np.float64]:
    """(b_c - β) / ε."""
    values = importance.detach().double().numpy()
    found: npt.NDArray[np.float64] = (values - shift(values, share, softness)) / softness
    return found


def _spread(distance: npt.NDArray[np.float64]) -> Tensor:
    """p_c (1 - p_c) as parts of their sum; also where all of them are too small for a number."""
    size = np.abs(distance)
    if not np.isfinite(size).all():  # a share of 1: nothing is undecided
        return torch.full((len(size),), 1 / len(size), dtype=torch.float64)
    return torch.from_numpy(-size - 2 * np.log1p(np.exp(-size))).softmax(0)


def _sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(x))
    found: npt.NDArray[np.float64] = np.where(x >= 0, 1, small) / (1 + small)
    return found


def divergence(counts: npt.NDArray[np.int64]) -> float:
    """The Jensen-Shannon divergence of labels from the uniform distribution, in [0, 1].

    >>> divergence(np.array([5, 5])), round(divergence(np.array([5, 0])), 3)
    (0.0, 0.311)
    """
    own = counts / counts.sum()
    uniform = np.full(len(own), 1 / len(own))
    middle = (own + uniform) / 2

    def towards(part: npt.NDArray[np.float64]) -> float:
        there = part > 0
        return float((part[there] * np.log2(part[there] / middle[there])).sum())

    return max(0.0, (towards(own) + towards(uniform)) / 2)
