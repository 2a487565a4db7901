"""SHeteroFL: HeteroFL in which a client trains every width it can afford, on every batch.

Hong, Wang, Wang, Zhou. "Efficient Split-Mix Federated Learning for On-Demand and In-Situ
Customization." ICLR 2022, Sec. 4.1: HeteroFL with slimmable training (Yu et al., 2018).
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
from fedquilt.methods.method import PersonalStatistics
from fedquilt.ranges import Fraction
from fedquilt.structure.structure import NORMS, STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.training.client_loss import Masked
from fedquilt.training.settings import LocalTraining
from fedquilt.training.slimmable import Slimmable


@dataclass(frozen=True)
class SHeteroFL(BaseMethod):
    """Nested widths, the gradients of all that a client can afford summed.

    With ``statistics="tracked"`` every width has normalization of its own; with ``"batch"`` they
    share it, each batch is normalized by itself in training, and the statistics of every width are
    asked for at the end. Clients count by their data; ``count_widths`` counts a client once for
    each width it trains, as the public code does.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        widths: Sizes; None: those that the budgets allow.
        statistics: Of batch normalization: those of each batch, or tracked.
        scaler: Whether activations are scaled by the inverse width in training.
        masked: Whether the loss leaves out classes that a client does not have; "batch": those that
            a batch does not have, as in the public code.
        count_widths: Whether a client counts once for each width that it trained.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.SHeteroFL(widths=(1.0, 0.5))
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [(score.width, score.params) for score in run.scores]
    [(1.0, 67), (0.5, 35)]
    """

    local_training: LocalTraining = field(default_factory=lambda: LocalTraining(max_grad_norm=None))
    fraction: Fraction = 1.0
    widths: tuple[float, ...] | None = None
    statistics: Literal["batch", "tracked"] = "batch"
    scaler: bool = False
    masked: Masked = True
    count_widths: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        validate_widths(self.widths)

    def default_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """Those of Split-Mix, which it is compared with: down to an eighth."""
        return tuple(width for width in super().default_budgets(model) if width >= 0.125)

    @property
    def tracks_statistics(self) -> bool:
        """As the settings say."""
        return self.statistics == "tracked"

    @property
    def scales_outputs(self) -> bool:
        """As the settings say."""
        return self.scaler

    @property
    def personal_statistics(self) -> PersonalStatistics | None:
        """Those of each batch, if none are tracked (Split-Mix, Appendix A.2)."""
        return None if self.tracks_statistics else "batch"

    queries_within_budgets = True
    plans_by_budget = True

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Every width that a client can afford, the widest with all that they share."""

        def plan(client: Client) -> Task:
            return Task(
                client.id,
                self._nested(setup, client),
                state.params,
                Slimmable(
                    self.local_training,
                    lr=self.local_training.lr_at(state.round, setup.rounds),
                    labels=client.labels,
                    masked=self.masked,
                    scale=self.scaler,
                    weight=client.num_examples,
                ),
                derive_seed(setup.seed, state.round, client.id),
            )

        return plan_each(cohort, plan)

    def _nested(self, setup: Setup, client: Client) -> tuple[Subnet, ...]:
        widths = list_affordable_widths(setup, client, self.sizes(setup))
        widest, *narrow = (self._trained_width(setup, width) for width in widths)
        if not self.count_widths:  # the rest is part of the widest
            narrow = [s.excluding("*", *(f"!{pattern}" for pattern in s.private)) for s in narrow]
        return (widest, *narrow)

    def _trained_width(self, setup: Setup, width: float) -> Subnet:
        if self.tracks_statistics:
            return self.subnet(setup, width)
        return self.without_untracked(setup.structure.subnet(width))

    def subnet(self, setup: Setup, width: float) -> Subnet:
        """The leading channels; what is a width's own is that of the next larger one, if need be.

        That is all of its normalization where it was tracked in training, else its statistics.
        """
        own = NORMS if self.tracks_statistics else STATISTICS
        return nested_subnet(setup, width, self.sizes(setup), own)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The trained widths, largest first."""
        return list_trained_sizes(setup, self.widths)

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """One subnet."""
        return (self.subnet(setup, width),)
