"""Centralised training: the server gathers everybody's data; what federated training aims at.

The reference of ADDS (Sec. 4.1.2): no privacy, and no clients whose data differ from the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedquilt.federation.client import EVERYONE, Client, Task, seed_of
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Rounds, ignored_budgets
from fedquilt.ranges import Fraction
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser
from fedquilt.training.sgd import SGD


@dataclass(frozen=True)
class Centralised(Rounds):
    """The whole net, trained in every round on the training data of all clients, as one set.

    ``fraction`` means nothing here: whoever is sampled, all data are at the server. With one
    client it is FedAvg.
    """

    optimiser: Optimiser = field(default_factory=lambda: Optimiser(epochs=1, clip=None))
    fraction: Fraction = 1.0

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """The whole net is trained, whatever clients can afford."""
        return ignored_budgets(setup)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """One task, whatever the cohort."""
        labels = {label for client in setup.clients for label in client.labels}
        recipe = SGD(
            self.optimiser,
            lr=self.optimiser.rate(state.round, setup.rounds),
            labels=tuple(sorted(labels)),
        )
        seed = seed_of(setup.seed, state.round, 0)  # as that of FedAvg's only client
        return [Task(EVERYONE, (Subnet(),), state.params, recipe, seed)]
