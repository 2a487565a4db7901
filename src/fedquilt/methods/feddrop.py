"""Federated dropout: in every round clients train a part of the channels, drawn at random.

Caldas, Konečný, McMahan, Talwalkar. "Expanding the Reach of Federated Learning by Reducing Client
Resource Requirements." 2018. As a baseline of ADDS (Sec. 4.1.2) it is called FedDrop: the same
channels for all clients of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedquilt.federation.client import Client, Task, seed_of
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Rounds, affordable, refuse_no_widths, sizes_within_budget
from fedquilt.ranges import Fraction
from fedquilt.structure.groups import Group, leading
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser
from fedquilt.training.sgd import SGD


@dataclass(frozen=True)
class FedDrop(Rounds):
    """The share ``width`` of the channels of every layer, drawn anew in every round.

    All clients of a round train the same channels, or with ``each`` every one its own. A client
    that cannot afford so many trains as many as it can: the first in the order that was drawn, so
    that parts of one draw are nested. Batches are normalised by themselves in training: channels
    meet others in every round, and the whole net only in the end, when its statistics are asked
    for. With ``scaler`` outputs are divided by the share of channels that is kept, as dropout does,
    so that sums are as large in the whole net.
    """

    optimiser: Optimiser = field(default_factory=lambda: Optimiser(clip=None))
    fraction: Fraction | None = None
    width: float = 0.75
    each: bool = False
    scaler: bool = True
    masked: bool = False
    own_rows: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        refuse_no_widths((self.width,))

    @property
    def tracks_statistics(self) -> bool:
        """Those of parts that change in every round would mean nothing."""
        return False

    @property
    def scales_outputs(self) -> bool:
        """As dropout does."""
        return self.scaler

    def asked_of(self, setup: Setup, client: Client, sizes: tuple[float, ...]) -> tuple[float, ...]:
        """The whole net, if a client can afford it."""
        return sizes_within_budget(setup, client, sizes)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """A part for every client; weighted by examples."""
        return [
            Task(
                client.id,
                (self.to_train(self.part(setup, state.round, client)),),
                state.params,
                SGD(
                    self.optimiser,
                    lr=self.optimiser.rate(state.round, setup.rounds),
                    labels=client.labels,
                    masked=self.masked,
                    own_rows=self.own_rows,
                    scale=self.scaler,
                    weight=client.num_examples,
                ),
                seed_of(setup.seed, state.round, client.id),
            )
            for client in cohort
        ]

    def part(self, setup: Setup, round: int, client: Client) -> Subnet:
        """The channels that a client trains in a round: the first, in the order of the round."""
        width = min(self.width, affordable(setup, client))
        groups = (setup.structure.groups[name] for name in setup.structure.cut_groups())
        return Subnet.of(
            {
                group.name: self.order(setup, round, client, group)[: leading(group.size, width)]
                for group in groups
                if leading(group.size, width) < group.size
            }
        )

    def order(
        self, setup: Setup, round: int, client: Client, group: Group
    ) -> npt.NDArray[np.int64]:
        """The channels of a group in the order in which they are taken."""
        whose = (client.id,) if self.each else ()
        number = setup.structure.cut_groups().index(group.name)
        draw = np.random.default_rng(seed_of(setup.seed, round, number, 2, *whose))
        return draw.permutation(group.size)
