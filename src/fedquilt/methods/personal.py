"""Baselines with personal models: Standalone and LG-FedAvg.

Both are FedAvg in which some tensors never leave the client. In Standalone none does. In LG-FedAvg
(Liang et al., "Think Locally, Act Globally", 2020) clients keep their own representation layers
and share the layers above.
"""

from __future__ import annotations

from fedquilt.methods.fedavg import FedAvg
from fedquilt.structure.groups import OUTPUTS
from fedquilt.training.descent import Optimiser


def standalone(
    optimiser: Optimiser | None = None,
    fraction: float = 1.0,
    width: float = 1.0,
    within_budgets: bool = False,
) -> FedAvg:
    """Every client trains alone."""
    optimiser = optimiser or Optimiser(clip=None)
    return FedAvg(optimiser, fraction, width, home=("*",), within_budgets=within_budgets)


def lg_fedavg(
    optimiser: Optimiser | None = None,
    fraction: float | None = None,
    width: float = 1.0,
    shared: tuple[str, ...] = (OUTPUTS,),
    within_budgets: bool = False,
) -> FedAvg:
    """Clients share the tensors that match ``shared`` (the output layer), and keep all others."""
    home = ("*", *(f"!{pattern}" for pattern in shared))
    optimiser = optimiser or Optimiser(clip=None)
    return FedAvg(optimiser, fraction, width, home=home, within_budgets=within_budgets)
