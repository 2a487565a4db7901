"""Centralised training: the server gathers everybody's data; what federated training aims at.

The reference of ADDS (Sec. 4.1.2): no privacy, and no clients whose data differ from the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedquilt.federation.client import EVERYONE, Client, Task, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.methods.affordability import describe_ignored_budgets
from fedquilt.methods.base import BaseMethod
from fedquilt.ranges import Fraction
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining


@dataclass(frozen=True)
class Centralised(BaseMethod):
    """The whole net, trained in every round on the training data of all clients, as one set.

    ``fraction`` means nothing here: whoever is sampled, all data are at the server. With one
    client it is FedAvg.

    Args:
        local_training: Settings of training.
        fraction: Not used: there is one client.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.Centralised()
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> len(run.client_records[0])  # the server trains on all data
    1
    """

    local_training: LocalTraining = field(
        default_factory=lambda: LocalTraining(epochs=1, max_grad_norm=None)
    )
    fraction: Fraction = 1.0

    @property
    def reveals_data(self) -> str:
        """The server has all data."""
        return "the server gathers the data of all clients"

    def __post_init__(self) -> None:
        """Refuses parts of an aggregation."""
        super().__post_init__()
        self.refuse_parts("centralised training merges no updates")

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """The whole net is trained, whatever clients can afford."""
        return describe_ignored_budgets(setup)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """One task, whatever the cohort."""
        labels = setup.registry.label_set
        recipe = LocalSGD(
            self.local_training,
            lr=self.local_training.lr_at(state.round, setup.rounds),
            labels=tuple(sorted(labels)),
        )
        seed = derive_seed(setup.seed, state.round, 0)  # as that of FedAvg's only client
        return [Task(EVERYONE, (Subnet(),), state.params, recipe, seed)]
