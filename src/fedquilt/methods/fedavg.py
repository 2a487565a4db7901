"""FedAvg: every client trains the same net; the server takes the mean.

McMahan et al. "Communication-Efficient Learning of Deep Networks from Decentralized Data."
AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, Task, seed_of
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Rounds, budget_sizes, ignored_budgets
from fedquilt.ranges import Fraction
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import build
from fedquilt.training.conditional import conditional
from fedquilt.training.descent import Optimiser
from fedquilt.training.objectives import Objective, Plain
from fedquilt.training.sgd import SGD


@dataclass(frozen=True)
class FedAvg(Rounds):
    """One width for all.

    Running statistics of batch normalisation are averaged like weights, or with
    ``statistics="batch"`` every batch is normalised by itself in training, and statistics are asked
    for at the end.
    ``conditional`` puts in layers whose work depends on the robustness asked for (OAT).
    Budgets are ignored, unless ``within_budgets``: then the width is at most what all clients can
    afford.
    """

    optimiser: Optimiser = field(default_factory=lambda: Optimiser(clip=None))
    fraction: Fraction | None = None
    width: float = 1.0
    home: tuple[str, ...] = ()
    statistics: Literal["tracked", "batch"] = "tracked"
    objective: Objective = field(default_factory=Plain)
    conditional: bool = False
    within_budgets: bool = False

    @property
    def tracks_statistics(self) -> bool:
        """As the settings say."""
        return self.statistics == "tracked"

    def prepared(self, setup: Setup) -> Setup:
        """The model itself, or with layers that λ conditions."""
        self._refuse_unknown_tensors(setup)
        if not self.conditional:
            return setup
        width = self.common_width(setup)
        net = build(setup.model, setup.structure, setup.structure.subnet(width))
        with torch.random.fork_rng(devices=[]):  # its new layers are the same if it is resumed
            torch.default_generator.manual_seed(seed_of(setup.seed, 0, 0, 1))
            net = conditional(net)
        setup = replace(setup, model=net, structure=setup.structure.uncut(net))
        if not self.within_budgets:
            return setup
        clients = tuple(replace(client, budget=Budget(width)) for client in setup.clients)
        return replace(setup, clients=clients)  # what they can afford of a net that cannot be cut

    def _refuse_unknown_tensors(self, setup: Setup) -> None:
        for pattern in self.home:
            word = pattern.removeprefix("!")
            if not setup.structure.matching((word,)):
                what = "stays at home" if word == pattern else "is shared"
                raise ConfigError(
                    f"'{word}' {what} but names no tensor of the model; its tensors are: "
                    f"{', '.join(setup.structure.shapes)}"
                )

    def common_width(self, setup: Setup) -> float:
        """The width that everybody trains."""
        return min(self.width, *budget_sizes(setup)) if self.within_budgets else self.width

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Whoever can afford less trains the same net as all."""
        width = self.common_width(setup)
        return ignored_budgets(setup, width, setup.structure.subnet(width))

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """The whole net for every client, or the same part of it; weighted by examples."""
        subnet = setup.structure.subnet(self.common_width(setup))
        subnet = self.to_train(subnet.leaving(*self.home))
        return [
            Task(
                client.id,
                (subnet,),
                state.params,
                SGD(
                    self.optimiser,
                    lr=self.optimiser.rate(state.round, setup.rounds),
                    labels=client.labels,
                    home=self.home,
                    weight=client.num_examples,
                    objective=self.objective,
                ),
                seed_of(setup.seed, state.round, client.id),
            )
            for client in cohort
        ]

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The one width."""
        return (self.common_width(setup),)
