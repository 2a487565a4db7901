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


def solve_shift(importance: npt.NDArray[np.float64], share: float, softness: float) -> float:
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
        if not low < middle < high:  # neighbors, as far as numbers go
            break
    return middle


def compute_rates(importance: Tensor, share: float, softness: float) -> Tensor:
    """Eq. 13: p_c = σ((b_c - β) / ε), whose mean is the share."""
    return torch.from_numpy(_sigmoid(_compute_distance(importance, share, softness)))


def sample_gates(share: Tensor, importance: Tensor, softness: float, noise: Tensor) -> Tensor:
    """ω_c ~ Bernoulli(p_c), 0 or 1; ``noise`` is uniform in [0, 1).

    The gradient with respect to the share goes back straight through them.
    """
    drawn: Tensor = _SampleGates.apply(share, importance, softness, noise)  # type: ignore[no-untyped-call]
    return drawn


class _SampleGates(torch.autograd.Function):
    """Straight through: the gradient of ω_c is taken for that of p_c. By Eq. 18 that of α is
    C Σ_c g_c p_c (1 - p_c) / Σ_c p_c (1 - p_c): a mean, in which channels that are not yet decided
    count most.
    """

    @staticmethod
    def forward(
        ctx: Any, share: Tensor, importance: Tensor, softness: float, noise: Tensor
    ) -> Tensor:
        """Open where the noise is below the rate."""
        distance = _compute_distance(importance, float(share), softness)
        ctx.weights = _compute_spread(distance)
        kept = torch.from_numpy(_sigmoid(distance))
        return (noise < kept).to(importance)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Eq. 18."""
        slope = len(gradient) * (gradient.cpu().double() * ctx.weights).sum()
        return slope.to(gradient), None, None, None


def _compute_distance(importance: Tensor, share: float, softness: float) -> npt.NDArray[np.float64]:
    """(b_c - β) / ε."""
    values = importance.detach().cpu().double().numpy()  # few, and solved for on the host
    distance: npt.NDArray[np.float64] = (values - solve_shift(values, share, softness)) / softness
    return distance


def _compute_spread(distance: npt.NDArray[np.float64]) -> Tensor:
    """p_c (1 - p_c) as parts of their sum; also where all of them are too small for a number."""
    size = np.abs(distance)
    if not np.isfinite(size).all():  # a share of 1: nothing is undecided
        return torch.full((len(size),), 1 / len(size), dtype=torch.float64)
    return torch.from_numpy(-size - 2 * np.log1p(np.exp(-size))).softmax(0)


def _sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(x))
    values: npt.NDArray[np.float64] = np.where(x >= 0, 1, small) / (1 + small)
    return values


def label_divergence(counts: npt.NDArray[np.int64]) -> float:
    """The Jensen-Shannon divergence of labels from the uniform distribution, in [0, 1].

    >>> label_divergence(np.array([5, 5])), round(label_divergence(np.array([5, 0])), 3)
    (0.0, 0.311)
    """
    own = counts / counts.sum()
    uniform = np.full(len(own), 1 / len(own))
    middle = (own + uniform) / 2

    def towards(part: npt.NDArray[np.float64]) -> float:
        is_present = part > 0
        return float((part[is_present] * np.log2(part[is_present] / middle[is_present])).sum())

    return max(0.0, (towards(own) + towards(uniform)) / 2)
