"""Federated dropout: in every round clients train a part of the channels, drawn at random.

Caldas, Konečný, McMahan, Talwalkar. "Expanding the Reach of Federated Learning by Reducing Client
Resource Requirements." 2018. As a baseline of ADDS (Sec. 4.1.2) it is called FedDrop: the same
channels for all clients of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedquilt.federation.aggregation import AggregationPipeline, LabelAwareMean, Mean, chain
from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.affordability import find_affordable_width, validate_widths
from fedquilt.methods.base import BaseMethod
from fedquilt.ranges import Fraction
from fedquilt.structure.groups import Group, count_leading
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class FedDrop(BaseMethod):
    """A fraction ``width`` of the channels of every layer, drawn in every round.

    All clients of a round train the same channels, or with ``per_client`` every one its own. A
    client that cannot afford them trains as many as it can: the first in the order that was
    drawn, so that parts of one draw are nested. Batches are normalized by themselves in training:
    channels meet others in every round, and the whole net only in the end, when its statistics are
    asked for. With ``scaler`` outputs are divided by the share of channels that is kept, as dropout
    does, so that sums are as large in the whole net.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        width: Fraction of the channels that clients train, as far as they can afford it.
        per_client: Whether every client draws its own channels.
        scaler: Whether activations are scaled by the inverse width in training.
        masked: Whether the loss leaves out classes that a client does not have.
        own_rows: Whether a client moves only the output rows of its own classes.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.FedDrop(width=0.5, per_client=True)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [record.bytes_sent for record in run.client_records[0]]  # half of the channels
    [140, 140, 140, 140]
    """

    local_training: LocalTraining = field(default_factory=lambda: LocalTraining(max_grad_norm=None))
    fraction: Fraction | None = None
    width: float = 0.75
    per_client: bool = False
    scaler: bool = True
    masked: bool = False
    own_rows: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        validate_widths((self.width,))

    @property
    def tracks_statistics(self) -> bool:
        """Those of parts that change in every round would mean nothing."""
        return False

    @property
    def scales_outputs(self) -> bool:
        """As dropout does."""
        return self.scaler

    queries_within_budgets = True  # the whole net is asked of those that can afford it

    @property
    def plans_by_budget(self) -> bool:
        """Unless every client draws its own channels."""
        return not self.per_client

    def make_private(self) -> Self:
        """All rows are sent; the loss is still over a client's own classes, which it knows."""
        return replace(super().make_private(), own_rows=False)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """A part for every client; weighted by examples."""

        def plan(client: Client) -> Task:
            return Task(
                client.id,
                (self.without_untracked(self.draw_subnet(setup, state.round, client)),),
                state.params,
                LocalSGD(
                    self.local_training,
                    lr=self.local_training.lr_at(state.round, setup.rounds),
                    labels=client.labels,
                    masked=self.masked,
                    own_rows=self.own_rows,
                    scale=self.scaler,
                    weight=client.num_examples,
                ),
                derive_seed(setup.seed, state.round, client.id),
            )

        return plan_each(cohort, plan)

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Each cell is averaged over the clients that hold it, by their examples."""
        return chain(LabelAwareMean() if self.own_rows else Mean(), self.server_optimizer)

    def draw_subnet(self, setup: Setup, round: int, client: Client) -> Subnet:
        """The channels that a client trains in a round: the first, in the order of the round."""
        width = min(self.width, find_affordable_width(setup, client))
        groups = (setup.structure.groups[name] for name in setup.structure.cut_groups())
        return Subnet.from_channels(
            {
                group.name: self.order(setup, round, client, group)[
                    : count_leading(group.size, width)
                ]
                for group in groups
                if count_leading(group.size, width) < group.size
            }
        )

    def order(
        self, setup: Setup, round: int, client: Client, group: Group
    ) -> npt.NDArray[np.int64]:
        """The channels of a group in the order in which they are taken."""
        whose = (client.id,) if self.per_client else ()
        number = setup.structure.cut_groups().index(group.name)
        draw = np.random.default_rng(derive_seed(setup.seed, round, number, 2, *whose))
        return draw.permutation(group.size)
