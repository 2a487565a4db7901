"""pFedMe: every client has a model of its own that stays near the one it shares.

Dinh, Tran, Nguyen. "Personalized Federated Learning with Moreau Envelopes." NeurIPS 2020. A
baseline of ADDS (Sec. 4.1.2, with K = 5).

Symbols of the paper -> names here: w -> state.params, θ_i -> what client i keeps, and
state.chosen_subnets[i] says so; K -> steps, λ -> attraction, η -> local_training.lr, β -> beta,
S -> fraction.

What the paper leaves open, and what was chosen, is in docs/methods/pfedme.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import AggregationPipeline, ServerSGD, chain
from fedquilt.federation.chosen import ChosenSubnets
from fedquilt.federation.client import Client, Task
from fedquilt.federation.state import Setup, State
from fedquilt.methods.affordability import describe_ignored_budgets
from fedquilt.methods.base import BaseMethod, initial_state, same_for_all
from fedquilt.ranges import Fraction
from fedquilt.structure.subnet import Subnet
from fedquilt.training.moreau import Moreau, personal_subnet
from fedquilt.training.settings import LocalTraining


@dataclass(frozen=True)
class PFedMe(BaseMethod):
    """The whole net for every client, trained through its Moreau envelope.

    ``steps`` and ``personal_lr`` are those of a client's own model on each batch; ``attraction``
    keeps it near the model that the client sends, which ``local_training`` moves. The server goes
    ``beta`` of the way to the clients' mean. Batches are normalized by themselves in training:
    running statistics would belong to neither of a client's two models. At the end clients are
    asked for those of the shared model, and keep those of their own.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        steps: K, the steps towards the personal model on each batch.
        attraction: λ, the pull of the personal model to the local one.
        personal_lr: Learning rate of the personal model.
        beta: β, how far the server moves to the mean.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.PFedMe(steps=2)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> 0 <= run.scores[0].personal_accuracy <= 1  # of the clients' own models
    True
    """

    local_training: LocalTraining = field(
        default_factory=lambda: LocalTraining(
            lr=0.03, momentum=0.0, weight_decay=0.0, epochs=1, max_grad_norm=None
        )
    )
    fraction: Fraction | None = None
    steps: int = 5
    attraction: float = 15.0
    personal_lr: float = 0.05
    beta: float = 1.0

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        if self.steps < 1:
            raise ConfigError(f"steps counts those of a client's own model, got {self.steps}")
        for name in ("attraction", "beta"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is above 0, got {getattr(self, name)}")
        if self.local_training.accumulate > 1:
            raise ConfigError(
                "pFedMe solves its inner problem on every batch, so there is nothing to accumulate "
                f"over batches, got accumulate = {self.local_training.accumulate}; raise batch_size"
            )
        if self.beta != 1:
            self.refuse_server_optimizer("beta is the server's learning rate of pFedMe")

    is_personal = True

    @property
    def tracks_statistics(self) -> bool:
        """A client's two models take turns in one net."""
        return False

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """The whole net is trained, whatever clients can afford."""
        return describe_ignored_budgets(setup)

    def start(self, setup: Setup) -> State:
        """w⁰; until it has trained, a client's own model is the server's."""
        whole = dict.fromkeys(setup.registry.budget_counts, personal_subnet(Subnet()))
        own = ChosenSubnets(setup.registry, whole)
        return replace(initial_state(setup), chosen_subnets=own)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """The server sends w; all clients count alike."""
        recipe = Moreau(
            self.local_training,
            lr=self.local_training.lr_at(state.round, setup.rounds),
            steps=self.steps,
            attraction=self.attraction,
            personal_lr=self.personal_lr,
        )
        return same_for_all(setup, state, cohort, recipe, self.without_untracked(Subnet()))

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """w <- (1 − β) w + β Σ_i w_i / S: the server's learning rate is β."""
        return (
            super().training_aggregation(setup, phase)
            if self.beta == 1
            else chain(ServerSGD(self.beta))
        )
