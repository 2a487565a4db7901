"""FedAvg: every client trains the same net; the server takes the mean.

McMahan et al. "Communication-Efficient Learning of Deep Networks from Decentralized Data."
AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.methods.method import initial, merged
from fedquilt.structure.subnet import Subnet
from fedquilt.training.sgd import SGD, Optimiser


@dataclass(frozen=True)
class FedAvg:
    """One width for all; running statistics of batch normalisation are averaged like weights."""

    optimiser: Optimiser = field(default_factory=lambda: Optimiser(clip=None))
    fraction: float = 0.1
    width: float = 1.0
    home: tuple[str, ...] = ()

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """Rounds of training."""
        return (Phase("train", setup.rounds, self.fraction),)

    def start(self, setup: Setup) -> State:
        """The model's own tensors."""
        for pattern in self.home:
            word = pattern.removeprefix("!")
            if not setup.structure.matching((word,)):
                what = "stays at home" if word == pattern else "is shared"
                raise ConfigError(
                    f"'{word}' {what} but names no tensor of the model; its tensors are: "
                    f"{', '.join(setup.structure.shapes)}"
                )
        return initial(setup)

    def plan(self, setup: Setup, state: State, client: Client) -> list[Task]:
        """The whole net for every client, or the same part of it; weighted by examples."""
        recipe = SGD(
            self.optimiser,
            lr=self.optimiser.rate(state.round),
            labels=client.labels,
            home=self.home,
            weight=client.num_examples,
        )
        subnet = setup.structure.subnet(self.width).leaving(*self.home)
        seed = seed_of(setup.seed, state.round, client.id)
        return [Task(client.id, (subnet,), state.params, recipe, seed)]

    def merge(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """The mean, weighted by examples."""
        return merged(setup, state, updates)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The one width."""
        return (self.width,)

    def subnet(self, setup: Setup, width: float) -> Subnet:
        """The leading channels."""
        return setup.structure.subnet(width)
