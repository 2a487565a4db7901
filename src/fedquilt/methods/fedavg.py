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
from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.affordability import describe_ignored_budgets, list_budget_sizes
from fedquilt.methods.base import BaseMethod
from fedquilt.methods.method import PersonalStatistics
from fedquilt.ranges import Fraction
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import build_module
from fedquilt.structure.derive import make_uncut_structure
from fedquilt.training.attack import PGD
from fedquilt.training.client_loss import Masked
from fedquilt.training.conditional import make_conditional
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.objectives import Adversarial, Objective, OnceForAll, PlainLoss
from fedquilt.training.settings import LocalTraining


@dataclass(frozen=True)
class FedAvg(BaseMethod):
    """One width for all.

    Running statistics of batch normalization are averaged like weights, or with
    ``statistics="batch"`` every batch is normalized by itself in training, and statistics are asked
    for at the end.
    ``conditional`` puts in layers whose work depends on the robustness asked for (OAT).
    Budgets are ignored, unless ``within_budgets``: then the width is at most what all clients can
    afford.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        width: Width of the net that every client trains.
        local_params: Patterns of tensors that stay on their client.
        statistics: Of batch normalization: tracked, or those of each batch.
        objective: What a client minimizes.
        conditional: Whether layers are conditioned on the robustness λ.
        within_budgets: Whether the width is at most what all clients can afford.
        masked: Whether the loss leaves out classes that a client does not have; "batch": those that
            a batch does not have, as in the public code.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.FedAvg(fraction=0.5, width=0.5)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [(score.width, score.params) for score in run.scores]
    [(0.5, 35)]
    """

    local_training: LocalTraining = field(default_factory=lambda: LocalTraining(max_grad_norm=None))
    fraction: Fraction | None = None
    width: float = 1.0
    local_params: tuple[str, ...] = ()
    statistics: Literal["tracked", "batch"] = "tracked"
    objective: Objective = field(default_factory=PlainLoss)
    conditional: bool = False
    within_budgets: bool = False
    masked: Masked = False

    plans_by_budget = True

    @property
    def tracks_statistics(self) -> bool:
        """As the settings say."""
        return self.statistics == "tracked"

    @property
    def personal_statistics(self) -> PersonalStatistics | None:
        """Those of each batch, if none are tracked (Split-Mix, Appendix A.2)."""
        return None if self.tracks_statistics else "batch"

    @property
    def attack(self) -> PGD | None:
        """That of the objective."""
        objective = self.objective
        return objective.attack if isinstance(objective, (Adversarial, OnceForAll)) else None

    def prepare_model(self, setup: Setup) -> Setup:
        """The model itself, or with layers that λ conditions."""
        self._refuse_unknown_tensors(setup)
        if isinstance(self.objective, (Adversarial, OnceForAll)):
            setup.task.require_classes("adversarial training")
        if setup.structure.match_names(self.local_params) >= set(setup.structure.shapes):
            self.refuse_server_optimizer("every tensor stays on its client, so there is no mean")
        if not self.conditional:
            return setup
        width = self.common_width(setup)
        net = build_module(setup.model, setup.structure, setup.structure.subnet(width))
        with torch.random.fork_rng(devices=[]):  # its new layers are the same if it is resumed
            torch.default_generator.manual_seed(derive_seed(setup.seed, 0, 0, 1))
            net = make_conditional(net)
        setup = replace(setup, model=net, structure=make_uncut_structure(net, setup.structure))
        if not self.within_budgets:
            return setup
        clients = setup.registry.map_budgets(lambda budget: Budget(width))
        return replace(setup, clients=clients)  # what they can afford of a net that cannot be cut

    def _refuse_unknown_tensors(self, setup: Setup) -> None:
        for pattern in self.local_params:
            word = pattern.removeprefix("!")
            if not setup.structure.match_names((word,)):
                what = "stays at home" if word == pattern else "is shared"
                raise ConfigError(
                    f"'{word}' {what} but names no tensor of the model; its tensors are: "
                    f"{', '.join(setup.structure.shapes)}"
                )

    def common_width(self, setup: Setup) -> float:
        """The width that everybody trains."""
        return min(self.width, *list_budget_sizes(setup)) if self.within_budgets else self.width

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Whoever can afford less trains the same net as all."""
        width = self.common_width(setup)
        return describe_ignored_budgets(setup, width, setup.structure.subnet(width))

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """The whole net for every client, or the same part of it; weighted by examples."""
        subnet = setup.structure.subnet(self.common_width(setup))
        subnet = self.without_untracked(subnet.excluding(*self.local_params))

        def plan(client: Client) -> Task:
            return Task(
                client.id,
                (subnet,),
                state.params,
                LocalSGD(
                    self.local_training,
                    lr=self.local_training.lr_at(state.round, setup.rounds),
                    labels=client.labels,
                    masked=self.masked,
                    local_params=self.local_params,
                    weight=client.num_examples,
                    objective=self.objective,
                ),
                derive_seed(setup.seed, state.round, client.id),
            )

        return plan_each(cohort, plan)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The one width."""
        return (self.common_width(setup),)
