"""FjORD: a client trains all widths that it can afford, one drawn for every batch.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane. "FjORD: Fair and Accurate Federated
Learning under heterogeneous targets with Ordered Dropout." NeurIPS 2021.

Symbols of the paper -> names here: p -> width, p_max -> the widest that a client can afford,
P -> widths. What the authors' code does differently is in docs/methods/fjord.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from fedquilt.federation.client import Client, Task, seed_of
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import (
    Rounds,
    nested,
    refuse_no_widths,
    trained_sizes,
    up_to_budget,
)
from fedquilt.ranges import Fraction
from fedquilt.structure.groups import NORMS, STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser
from fedquilt.training.ordered import OrderedDropout

FIFTHS = (1.0, 0.8, 0.6, 0.4, 0.2)
OWN = {"statistics": STATISTICS, "norms": NORMS}


@dataclass(frozen=True)
class FjORD(Rounds):
    """Nested widths, ordered dropout, self-distillation, statistics of every width tracked.

    With ``distil`` the widest of a client's nets learns from the labels of every batch and the
    drawn one from its answers. ``own`` is what of batch normalisation every width has for itself:
    its ``statistics`` (the weights are shared, as other weights are), or the whole ``norms``.
    """

    optimiser: Optimiser = field(
        default_factory=lambda: Optimiser(
            lr=0.1, momentum=0.0, weight_decay=1e-4, epochs=1, batch_size=32, clip=None
        )
    )
    fraction: Fraction | None = None
    widths: tuple[float, ...] | None = None
    distil: bool = True
    own: Literal["statistics", "norms"] = "statistics"

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        refuse_no_widths(self.widths)

    def usual_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """P of the authors' port: fifths."""
        return FIFTHS

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """Every width p ≤ p_max of a client, the widest with all that they share."""
        return [
            Task(
                client.id,
                self._nested(setup, client),
                state.params,
                OrderedDropout(
                    self.optimiser,
                    lr=self.optimiser.rate(state.round, setup.rounds),
                    distil=self.distil,
                    weight=client.num_examples,
                ),
                seed_of(setup.seed, state.round, client.id),
            )
            for client in cohort
        ]

    def _nested(self, setup: Setup, client: Client) -> tuple[Subnet, ...]:
        widths = up_to_budget(setup, client, self.sizes(setup))
        widest, *narrow = (self.subnet(setup, width) for width in widths)
        return (widest, *(s.leaving("*", *(f"!{pattern}" for pattern in s.own)) for s in narrow))

    def subnet(self, setup: Setup, width: float) -> Subnet:
        """The leading channels, with what that width owns, or else the next larger one."""
        return nested(setup, width, self.sizes(setup), OWN[self.own])

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The trained widths, largest first."""
        return trained_sizes(setup, self.widths)

    def mix(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """One subnet."""
        return (self.subnet(setup, width),)
