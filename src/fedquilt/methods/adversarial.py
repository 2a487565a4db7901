"""Federated adversarial training: the baselines of Split-Mix's robustness.

FedAvg+AT trains one net for one trade-off λ_n between clean and attacked inputs (Eq. 1 of Hong et
al., ICLR 2022). FedAvg+OAT trains one net whose layers are conditioned on λ (Wang et al.,
"Once-for-All Adversarial Training", NeurIPS 2020).
"""

from __future__ import annotations

from typing import Literal

from fedquilt.methods.fedavg import FedAvg
from fedquilt.training.attack import PGD
from fedquilt.training.descent import Optimiser
from fedquilt.training.objectives import Adversarial, OnceForAll

OPTIMISER = Optimiser(epochs=1, clip=None)  # one epoch a round, as Hong et al. on Digits


def fedavg_at(
    optimiser: Optimiser | None = None,
    fraction: float = 1.0,
    width: float = 1.0,
    share: float = 0.5,
    epsilon: float = 8 / 255,
    steps: int = 7,
    statistics: Literal["tracked", "batch"] = "tracked",
    within_budgets: bool = False,
) -> FedAvg:
    """FedAvg that minimises (1 - share) · clean loss + share · loss under attack."""
    return FedAvg(
        optimiser or OPTIMISER,
        fraction,
        width,
        statistics=statistics,
        objective=Adversarial(PGD(epsilon=epsilon, steps=steps), share),
        within_budgets=within_budgets,
    )


def fedavg_oat(
    optimiser: Optimiser | None = None,
    fraction: float = 1.0,
    width: float = 1.0,
    epsilon: float = 8 / 255,
    steps: int = 7,
    within_budgets: bool = False,
) -> FedAvg:
    """FedAvg with layers conditioned on λ, which is drawn anew for every batch."""
    return FedAvg(
        optimiser or OPTIMISER,
        fraction,
        width,
        objective=OnceForAll(PGD(epsilon=epsilon, steps=steps)),
        conditional=True,
        within_budgets=within_budgets,
    )
