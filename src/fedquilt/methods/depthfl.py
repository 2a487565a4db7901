"""DepthFL: every client trains the first layers that it can afford, with all exits on the way.

Kim, Yu, Kim, Moon. "DepthFL: Depthwise Federated Learning for Heterogeneous Clients." ICLR 2023.

The classifiers of the paper are exits here: a local model of depth d has the first d of N. What
the authors' code does differently is in docs/methods/depthfl.md.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Rounds, merged, within
from fedquilt.ranges import Fraction
from fedquilt.structure.budget import times
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser
from fedquilt.training.dynamic import (
    Dynamic,
    counted,
    drifted,
    learned,
    server_model,
    shares_of,
)
from fedquilt.training.exits import ExitLosses, MultiExit, natural_exits
from fedquilt.training.sgd import SGD


@dataclass(frozen=True)
class DepthFL(Rounds):
    """Nested depths, the losses of all exits summed, exits that learn from each other.

    ``at`` names the modules that exits are behind; by default the stages of the net but the last.
    ``distil`` is mutual self-distillation, with a weight that grows for ``ramp_rounds``. With
    ``only_last`` a client trains its last exit alone (InclusiveFL), so nothing is distilled.
    ``feddyn`` is α of dynamic regularization; 0 is plain averaging.
    """

    optimiser: Optimiser = field(
        default_factory=lambda: Optimiser(
            lr=0.1, falling=0.998, momentum=0.0, weight_decay=1e-3, batch_size=50, clip=None
        )
    )
    fraction: Fraction | None = None
    at: tuple[str, ...] | None = None
    distil: bool = True
    ramp_rounds: int = 300
    only_last: bool = False
    feddyn: float = 0.0
    size_kind = "exits"

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        if self.ramp_rounds < 0:
            raise ConfigError(f"ramp_rounds is a number of rounds, got {self.ramp_rounds}")
        if not 0 <= self.feddyn < math.inf:
            raise ConfigError(f"feddyn is α of FedDyn, such as 0.1, or 0, got {self.feddyn}")

    def usual_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """As many clients of each depth, as in the paper."""
        return depths(len(self._places(model)) + 1)

    def _places(self, model: nn.Module) -> tuple[str, ...]:
        """The modules that exits are behind."""
        return natural_exits(model) if self.at is None else self.at

    def prepared(self, setup: Setup) -> Setup:
        """The user's model with exits; an exit is what may be skipped, and no width is cut."""
        net = copy.deepcopy(setup.model)
        at = self._places(net)
        with torch.random.fork_rng(devices=[]):  # its heads are the same if it is resumed
            torch.default_generator.manual_seed(seed_of(setup.seed, 0, 0, 1))
            model = MultiExit(net, at, setup.example)
        structure = replace(setup.structure.uncut(model), blocks=model.blocks())
        deep = replace(setup, model=model, structure=structure)
        for client in deep.clients:
            self.trained(deep, client)  # refuses whoever cannot afford one exit
        return deep

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """The deepest local model of each client."""
        params, recipe = self._sent(state), self._recipe(setup, state.round)
        return [
            Task(
                client.id,
                (self.trained(setup, client),),
                params,
                recipe,
                seed_of(setup.seed, state.round, client.id),
            )
            for client in cohort
        ]

    def _recipe(self, setup: Setup, round: int) -> SGD | Dynamic:
        distil = self.consistency(round) if self.distil else 0.0
        sgd = SGD(
            self.optimiser,
            lr=self.optimiser.rate(round, setup.rounds),
            objective=ExitLosses(distil, self.only_last),
        )
        return Dynamic(sgd, self.feddyn) if self.feddyn else sgd

    def consistency(self, round: int) -> float:
        """The weight of self-distillation: exp(−5 (1 − min(r, R)/R)²) in round r of R.

        >>> [round(DepthFL().consistency(r), 4) for r in (0, 150, 300, 900)]
        [0.0067, 0.2865, 1.0, 1.0]
        """
        left = 1 - min(round, self.ramp_rounds) / self.ramp_rounds if self.ramp_rounds else 0.0
        return math.exp(-5 * left**2)

    def _sent(self, state: State) -> Mapping[str, Tensor]:
        return (
            server_model(state.params, state.server, self.feddyn) if self.feddyn else state.params
        )

    def trained(self, setup: Setup, client: Client) -> Subnet:
        """The deepest local model that a client can afford, without heads that rest."""
        sizes = {size: self.subnet(setup, size) for size in self.sizes(setup)}
        subnet = sizes[max(within(setup, client, sizes))]
        depth = len(sizes) - len(subnet.skipped)
        untrained = range(1, depth) if self.only_last else ()
        return subnet.leaving(*(f"heads.exit{number}.*" for number in untrained))

    def merge_training(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Each tensor is averaged over the clients that hold it, each counting once."""
        trained: Counter[Subnet] = Counter()
        after = merged(setup, state, counted(updates, trained))
        if not self.feddyn:
            return after
        held = Counter(self.trained(setup, client) for client in setup.clients)
        shares = shares_of(learned(setup.model), setup.structure, trained, held)
        start = self._sent(state)
        drift = drifted(state.server, start, after.params, shares, self.feddyn)
        return replace(after, server=drift)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """Depths as fractions of the number of exits, the whole first."""
        return depths(len(setup.structure.blocks) + 1)

    def mix(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """One subnet, which answers with the mean of its exits."""
        return (self.subnet(setup, width),)

    def subnet(self, setup: Setup, size: float) -> Subnet:
        """The first exits, as many as go into a fraction of the model."""
        exits = tuple(setup.structure.blocks)  # the last one first
        count = len(exits) + 1
        depth = min(count, times(size, 1 / count))
        if depth < 1:
            raise ConfigError(
                f"the smallest model has one of {count} exits, {1 / count:g} of the whole, got "
                f"{size:g}"
            )
        return Subnet().skipping(*exits[: count - depth])


def depths(count: int) -> tuple[float, ...]:
    """The sizes of a net with so many exits, its own among them.

    >>> depths(4)
    (1.0, 0.75, 0.5, 0.25)
    """
    return tuple(depth / count for depth in range(count, 0, -1))
