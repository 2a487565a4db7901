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

from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.affordability import (
    list_affordable_widths,
    list_trained_sizes,
    nested_subnet,
    validate_widths,
)
from fedquilt.methods.base import BaseMethod
from fedquilt.ranges import Fraction
from fedquilt.structure.structure import NORMS, STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.training.ordered import OrderedDropout
from fedquilt.training.settings import LocalTraining

FIFTHS = (1.0, 0.8, 0.6, 0.4, 0.2)
PRIVATE_PARAMS = {"statistics": STATISTICS, "norms": NORMS}


@dataclass(frozen=True)
class FjORD(BaseMethod):
    """Nested widths, ordered dropout, self-distillation, statistics of every width tracked.

    With ``distil`` the widest of a client's nets learns from the labels of every batch and the
    drawn one from its answers. ``private_params`` is what of batch normalization every width has
    for itself: its ``statistics`` (the weights are shared, as other weights are), or the whole
    ``norms``.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        widths: Widths that are drawn; None: those of the budgets.
        distil: Whether a narrow net learns from the widest one of its client.
        private_params: What each width has for itself: statistics, or all of the normalization.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.FjORD(distil=False)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [(score.width, score.params) for score in run.scores]
    [(1.0, 67), (0.5, 35)]
    """

    local_training: LocalTraining = field(
        default_factory=lambda: LocalTraining(
            lr=0.1, momentum=0.0, weight_decay=1e-4, epochs=1, batch_size=32, max_grad_norm=None
        )
    )
    fraction: Fraction | None = None
    widths: tuple[float, ...] | None = None
    distil: bool = True
    private_params: Literal["statistics", "norms"] = "statistics"

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        validate_widths(self.widths)

    def default_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """P of the authors' port: fifths."""
        return FIFTHS

    def prepare_model(self, setup: Setup) -> Setup:
        """The user's model as it is."""
        if self.distil:
            setup.task.require_outputs("FjORD's self-distillation (distil)")
        return super().prepare_model(setup)

    plans_by_budget = True

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Every width p ≤ p_max of a client, the widest with all that they share."""

        def plan(client: Client) -> Task:
            return Task(
                client.id,
                self._nested(setup, client),
                state.params,
                OrderedDropout(
                    self.local_training,
                    lr=self.local_training.lr_at(state.round, setup.rounds),
                    distil=self.distil,
                    weight=client.num_examples,
                ),
                derive_seed(setup.seed, state.round, client.id),
            )

        return plan_each(cohort, plan)

    def _nested(self, setup: Setup, client: Client) -> tuple[Subnet, ...]:
        widths = list_affordable_widths(setup, client, self.sizes(setup))
        widest, *narrow = (self.subnet(setup, width) for width in widths)
        return (
            widest,
            *(s.excluding("*", *(f"!{pattern}" for pattern in s.private)) for s in narrow),
        )

    def subnet(self, setup: Setup, width: float) -> Subnet:
        """The leading channels, with what that width owns, or else the next larger one."""
        return nested_subnet(setup, width, self.sizes(setup), PRIVATE_PARAMS[self.private_params])

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The trained widths, largest first."""
        return list_trained_sizes(setup, self.widths)

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """One subnet."""
        return (self.subnet(setup, width),)
