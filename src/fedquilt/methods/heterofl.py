"""HeteroFL: every client trains the leading channels that it can afford.

Diao, Ding, Tarokh. "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients." ICLR 2021.

Symbols of the paper -> names here: W_g -> state.params, r_m = r^(p-1) -> width,
L_m -> client.budget, C -> fraction, E, B, η -> optimiser.epochs, .batch_size, .lr,
{1 ... P} -> widths.

Differences from the public code, where it departs from the paper, are in docs/methods/heterofl.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import (
    Rounds,
    affordable,
    merged,
    nested,
    refuse_no_widths,
    sizes_within_budget,
    trained_sizes,
    unable,
)
from fedquilt.ranges import Fraction
from fedquilt.structure.groups import STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser
from fedquilt.training.sgd import SGD


@dataclass(frozen=True)
class HeteroFL(Rounds):
    """Nested widths, Scaler, static batch normalisation, masked loss, label-aware averaging.

    ``assignment`` is ``fixed`` (a client's budget decides its width) or ``dynamic`` (redrawn
    uniformly from ``widths`` for every active client in every round). ``widths`` also names the
    sizes whose statistics are asked for at the end; by default those that the budgets allow. A
    client is asked only for sizes that it can afford, unless ``query_everyone`` (as in the paper).
    """

    optimiser: Optimiser = field(default_factory=Optimiser)
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
        refuse_no_widths(self.widths)

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Widths that are drawn, and the query of everyone, do not ask for budgets."""
        largest = self.sizes(setup)[0]
        poor = unable(setup, largest, setup.structure.subnet(largest))
        if self.assignment == "fixed" or not poor:
            return super().exceeds_budgets(setup)
        return (
            f"exceeds budgets: widths are drawn up to {largest:g}, and {len(poor)} of "
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

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """Algorithm 1: determine each client's level p, W_m <- W_g[: d_m, : k_m], and its work."""
        return [self._task(setup, state, client) for client in cohort]

    def _task(self, setup: Setup, state: State, client: Client) -> Task:
        seed = seed_of(setup.seed, state.round, client.id)
        width = self.width_of(setup, state.round, client)
        subnet = self.to_train(setup.structure.subnet(width))
        recipe = SGD(
            self.optimiser,
            lr=self.optimiser.rate(state.round, setup.rounds),
            labels=client.labels,
            masked=self.masked,
            own_rows=self.own_rows,
            scale=self.scaler,
        )
        return Task(client.id, (subnet,), state.params, recipe, seed)

    def width_of(self, setup: Setup, round: int, client: Client) -> float:
        """r_m: what the budget allows, or a draw for this round."""
        if self.assignment == "fixed":
            return affordable(setup, client)
        assert self.widths is not None
        draw = np.random.default_rng(seed_of(setup.seed, round, client.id, 1))
        return float(self.widths[draw.integers(len(self.widths))])

    def asked_of(self, setup: Setup, client: Client, sizes: tuple[float, ...]) -> tuple[float, ...]:
        """The sizes whose statistics a client is asked for: those that it can afford, or all."""
        if self.query_everyone or self.assignment == "dynamic":
            return sizes
        return sizes_within_budget(setup, client, sizes)

    def merge_training(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Eqs. 1-3: each cell is averaged over the clients that hold it, each counting once."""
        return merged(setup, state, updates)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """Widths that are trained, largest first."""
        return trained_sizes(setup, self.widths)

    def mix(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """One subnet."""
        return (self.subnet(setup, width),)

    def subnet(self, setup: Setup, width: float) -> Subnet:
        """The leading channels, with the statistics of that size, or of the next larger one."""
        return nested(setup, width, self.sizes(setup), STATISTICS)
