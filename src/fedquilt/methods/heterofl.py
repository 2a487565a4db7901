"""HeteroFL: every client trains the leading channels that it can afford.

Diao, Ding, Tarokh. "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients." ICLR 2021.

Symbols of the paper -> names here: W_g -> state.params, r_m = r^(p-1) -> width,
L_m -> client.budget, C -> fraction, E, B, η -> local_training.epochs, .batch_size, .lr,
{1 ... P} -> widths.

Differences from the public code, where it departs from the paper, are in docs/methods/heterofl.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import AggregationPipeline, LabelAwareMean, Mean, chain
from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.affordability import (
    count_unable_clients,
    find_affordable_width,
    list_trained_sizes,
    nested_subnet,
    validate_widths,
)
from fedquilt.methods.base import BaseMethod
from fedquilt.ranges import Fraction
from fedquilt.structure.structure import STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class HeteroFL(BaseMethod):
    """Nested widths, Scaler, static batch normalization, masked loss, label-aware averaging.

    ``assignment`` is ``fixed`` (a client's budget decides its width) or ``dynamic`` (redrawn
    uniformly from ``widths`` for every active client in every round). ``widths`` also names the
    sizes whose statistics are asked for at the end; by default those that the budgets allow. A
    client is asked only for sizes that it can afford, unless ``query_everyone`` (as in the paper).

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        assignment: fixed: the budget decides the width; dynamic: drawn from widths in every round.
        widths: Sizes; None: those that the budgets allow.
        scaler: Whether activations are scaled by the inverse width in training.
        masked: Whether the loss leaves out classes that a client does not have.
        own_rows: Whether a client moves only the output rows of its own classes.
        query_everyone: Whether clients are asked for statistics of sizes beyond their budgets.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.HeteroFL(assignment="dynamic", widths=(1.0, 0.5))
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [(score.width, score.params) for score in run.scores]
    [(1.0, 67), (0.5, 35)]
    """

    local_training: LocalTraining = field(default_factory=LocalTraining)
    fraction: Fraction | None = None
    assignment: Literal["fixed", "dynamic"] = "fixed"
    widths: tuple[float, ...] | None = None
    scaler: bool = True
    masked: bool = True
    own_rows: bool = True
    query_everyone: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that contradict each other."""
        super().__post_init__()
        if self.assignment == "dynamic" and not self.widths:
            raise ConfigError("dynamic assignment draws from a list of widths; give method.widths")
        validate_widths(self.widths)

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Widths that are drawn, and the query of everyone, do not ask for budgets."""
        largest = self.sizes(setup)[0]
        poor = count_unable_clients(setup, largest, setup.structure.subnet(largest))
        if self.assignment == "fixed" or not poor:
            return super().exceeds_budgets(setup)
        return (
            f"exceeds budgets: widths are drawn up to {largest:g}, and {poor} of "
            f"{len(setup.clients)} clients can afford less"
        )

    @property
    def tracks_statistics(self) -> bool:
        """Sec. 3.2: no statistics are tracked in training; they are queried when it is over."""
        return False

    @property
    def scales_outputs(self) -> bool:
        """Sec. 3.3."""
        return self.scaler

    def make_private(self) -> Self:
        """All rows are sent; the loss is still over a client's own classes, which it knows."""
        return replace(super().make_private(), own_rows=False)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Algorithm 1: determine each client's level p, W_m <- W_g[: d_m, : k_m], and its work."""
        return plan_each(cohort, lambda client: self._task(setup, state, client))

    def _task(self, setup: Setup, state: State, client: Client) -> Task:
        seed = derive_seed(setup.seed, state.round, client.id)
        width = self.choose_width(setup, state.round, client)
        subnet = self.without_untracked(setup.structure.subnet(width))
        recipe = LocalSGD(
            self.local_training,
            lr=self.local_training.lr_at(state.round, setup.rounds),
            labels=client.labels,
            masked=self.masked,
            own_rows=self.own_rows,
            scale=self.scaler,
        )
        return Task(client.id, (subnet,), state.params, recipe, seed)

    def choose_width(self, setup: Setup, round: int, client: Client) -> float:
        """r_m: what the budget allows, or a draw for this round."""
        if self.assignment == "fixed":
            return find_affordable_width(setup, client)
        assert self.widths is not None
        draw = np.random.default_rng(derive_seed(setup.seed, round, client.id, 1))
        return float(self.widths[draw.integers(len(self.widths))])

    @property
    def plans_by_budget(self) -> bool:
        """Unless widths are drawn."""
        return self.assignment == "fixed"

    @property
    def queries_within_budgets(self) -> bool:
        """Unless the settings say otherwise; where widths are drawn, clients train all of them."""
        return not self.query_everyone and self.assignment == "fixed"

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Eqs. 1-3: each cell is averaged over the clients that hold it, each counting once."""
        return chain(LabelAwareMean() if self.own_rows else Mean(), self.server_optimizer)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """Widths that are trained, largest first."""
        return list_trained_sizes(setup, self.widths)

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """One subnet."""
        return (self.subnet(setup, width),)

    def subnet(self, setup: Setup, width: float) -> Subnet:
        """The leading channels, with the statistics of that size, or of the next larger one."""
        return nested_subnet(setup, width, self.sizes(setup), STATISTICS)
