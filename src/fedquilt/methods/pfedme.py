"""pFedMe: every client has a model of its own that stays near the one it shares.

Dinh, Tran, Nguyen. "Personalized Federated Learning with Moreau Envelopes." NeurIPS 2020. A
baseline of ADDS (Sec. 4.1.2, with K = 5).

Symbols of the paper -> names here: w -> state.params, θ_i -> what client i keeps, and
state.chosen[i] says so; K -> steps, λ -> attraction, η -> optimiser.lr, β -> beta, S -> fraction.

What the paper leaves open, and what was chosen, is in docs/methods/pfedme.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, Task, Update
from fedquilt.federation.constants import keep_constants
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Rounds, alike, ignored_budgets, initial, merged
from fedquilt.ranges import Fraction
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser
from fedquilt.training.moreau import Moreau, personal


@dataclass(frozen=True)
class PFedMe(Rounds):
    """The whole net for every client, trained through its Moreau envelope.

    ``steps`` and ``personal_lr`` are those of a client's own model on each batch; ``attraction``
    keeps it near the model that the client sends, which ``optimiser`` moves. The server goes
    ``beta`` of the way to the clients' mean. Batches are normalised by themselves in training:
    running statistics would belong to neither of a client's two models. At the end clients are
    asked for those of the shared model, and keep those of their own.
    """

    optimiser: Optimiser = field(
        default_factory=lambda: Optimiser(
            lr=0.03, momentum=0.0, weight_decay=0.0, epochs=1, clip=None
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

    is_personal = True

    @property
    def tracks_statistics(self) -> bool:
        """A client's two models take turns in one net."""
        return False

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """The whole net is trained, whatever clients can afford."""
        return ignored_budgets(setup)

    def start(self, setup: Setup) -> State:
        """w⁰; until it has trained, a client's own model is the server's."""
        own = {client.id: personal(Subnet()) for client in setup.clients}
        return replace(initial(setup), chosen=own)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """The server sends w; all clients count alike."""
        recipe = Moreau(
            self.optimiser,
            lr=self.optimiser.rate(state.round, setup.rounds),
            steps=self.steps,
            attraction=self.attraction,
            personal_lr=self.personal_lr,
        )
        return alike(setup, state, cohort, recipe, self.to_train(Subnet()))

    def merge_training(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """w <- (1 − β) w + β Σ_i w_i / S."""
        mean = merged(setup, state, updates).params
        return replace(state, params=part_way(state.params, mean, self.beta))


def part_way(old: Params, new: Params, beta: float) -> dict[str, Tensor]:
    """(1 − β) old + β new; numbers that are never averaged are the new.

    >>> part_way({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.25)
    {'w': tensor([1.5000])}
    """
    return {
        name: keep_constants(torch.lerp(old[name], tensor, beta), old[name])
        if tensor.is_floating_point()
        else tensor
        for name, tensor in new.items()
    }
