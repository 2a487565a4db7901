"""SHeteroFL: HeteroFL in which a client trains every width it can afford, on every batch.

Hong, Wang, Wang, Zhou. "Efficient Split-Mix Federated Learning for On-Demand and In-Situ
Customization." ICLR 2022, Sec. 4.1: HeteroFL with slimmable training (Yu et al., 2018).
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
    sizes_within_budget,
    trained_sizes,
    up_to_budget,
)
from fedquilt.ranges import Fraction
from fedquilt.structure.groups import NORMS, STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser
from fedquilt.training.slimmable import Slimmable


@dataclass(frozen=True)
class SHeteroFL(Rounds):
    """Nested widths, the gradients of all that a client can afford summed.

    With ``statistics="tracked"`` every width has normalisation of its own; with ``"batch"`` they
    share it, each batch is normalised by itself in training, and the statistics of every width are
    asked for at the end. Clients count by their data; ``count_widths`` counts a client once for
    each width it trains, as the public code does.
    """

    optimiser: Optimiser = field(default_factory=lambda: Optimiser(clip=None))
    fraction: Fraction = 1.0
    widths: tuple[float, ...] | None = None
    statistics: Literal["batch", "tracked"] = "batch"
    scaler: bool = False
    masked: bool = True
    count_widths: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        refuse_no_widths(self.widths)

    def usual_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """Those of Split-Mix, which it is compared with: down to an eighth."""
        return tuple(width for width in super().usual_budgets(model) if width >= 0.125)

    @property
    def tracks_statistics(self) -> bool:
        """As the settings say."""
        return self.statistics == "tracked"

    @property
    def scales_outputs(self) -> bool:
        """As the settings say."""
        return self.scaler

    def asked_of(self, setup: Setup, client: Client, sizes: tuple[float, ...]) -> tuple[float, ...]:
        """The widths that a client can afford."""
        return sizes_within_budget(setup, client, sizes)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """Every width that a client can afford, the widest with all that they share."""
        return [
            Task(
                client.id,
                self._nested(setup, client),
                state.params,
                Slimmable(
                    self.optimiser,
                    lr=self.optimiser.rate(state.round, setup.rounds),
                    labels=client.labels,
                    masked=self.masked,
                    scale=self.scaler,
                    weight=client.num_examples,
                ),
                seed_of(setup.seed, state.round, client.id),
            )
            for client in cohort
        ]

    def _nested(self, setup: Setup, client: Client) -> tuple[Subnet, ...]:
        widths = up_to_budget(setup, client, self.sizes(setup))
        widest, *narrow = (self._trained_width(setup, width) for width in widths)
        if not self.count_widths:  # the rest is part of the widest
            narrow = [s.leaving("*", *(f"!{pattern}" for pattern in s.own)) for s in narrow]
        return (widest, *narrow)

    def _trained_width(self, setup: Setup, width: float) -> Subnet:
        if self.tracks_statistics:
            return self.subnet(setup, width)
        return self.to_train(setup.structure.subnet(width))

    def subnet(self, setup: Setup, width: float) -> Subnet:
        """The leading channels; what is a width's own is that of the next larger one, if need be.

        That is all of its normalisation where it was tracked in training, else its statistics.
        """
        own = NORMS if self.tracks_statistics else STATISTICS
        return nested(setup, width, self.sizes(setup), own)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The trained widths, largest first."""
        return trained_sizes(setup, self.widths)

    def mix(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """One subnet."""
        return (self.subnet(setup, width),)
