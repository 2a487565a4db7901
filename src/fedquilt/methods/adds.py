"""ADDS: clients choose the channels of their subnets by gradient, and train them at the same time.

Gong, Gao, Wu, Qin. "ADDS: Adaptive Differentiable Sampling for Robust Multi-Party Learning."

Symbols of the paper -> names here: w -> state.params, θ_i, I_i -> what client i sends: the tensors
of a subnet and the subnet, which is also state.chosen[i]; A = {α^k} -> the shares of each client,
which it keeps; ε -> softness, λ -> strength.

What the paper leaves open, and what was chosen, is in docs/methods/adds.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import nn

from fedquilt.errors import ConfigError
from fedquilt.federation.client import PERSONAL, Client, Task, Update
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Rounds, alike, ignored_budgets, merged
from fedquilt.ranges import Fraction
from fedquilt.structure.groups import TRACKED, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training import relevance
from fedquilt.training.bilevel import Bilevel, Importance
from fedquilt.training.descent import Optimiser
from fedquilt.training.gating import gateable
from fedquilt.training.tracking import untracked


@dataclass(frozen=True)
class ADDS(Rounds):
    """Every client finds its own subnet of the whole net that it is sent.

    ``share`` is where the shares of channels start, ``least`` how far they may fall, ``share_lr``
    how fast. ``softness`` is that of the first round, and falls to ``sharpening`` of it in every
    round. ``strength`` weighs the shares against the loss; None: each client by its own labels.
    With ``persistent`` a client goes on from its own shares, else it starts anew in every round,
    as Algorithm 1, line 11 has it. With ``by_examples`` clients count by the size of their data, as
    in FedAvg, else alike, as in Eq. 19.
    Batches are normalised by themselves in training: the subnets of a client differ from step to
    step. At the end clients are asked for the statistics of the whole net, and keep those of the
    subnet that they chose last.
    ``importance`` is what channels are chosen by: ``"slimming"``, scales of normalisation and
    activations, or ``"lrp"``, relevance (extra ``fedquilt[lrp]``).
    """

    optimiser: Optimiser = field(
        default_factory=lambda: Optimiser(lr=0.05, epochs=3, batch_size=10, clip=None)
    )
    fraction: Fraction = 0.3
    share: float = 0.9
    share_lr: float = 0.01
    least: float = 0.1
    softness: float = 1.0
    sharpening: float = 0.98
    strength: float | None = None
    validation: float = 0.1
    persistent: bool = False
    by_examples: bool = False
    importance: Importance = "slimming"

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        if not 0 < self.least <= self.share <= 1:
            raise ConfigError(
                "shares start within [least, 1], and least is above 0, got share "
                f"{self.share} and least {self.least}"
            )
        if not (self.softness > 0 and 0 < self.sharpening <= 1):
            raise ConfigError(
                "softness is above 0 and sharpening in (0, 1], got "
                f"{self.softness} and {self.sharpening}"
            )
        if not 0 < self.validation < 1:
            raise ConfigError(f"validation is a part of the data, got {self.validation}")

    is_personal = True

    @property
    def tracks_statistics(self) -> bool:
        """Those of nets that differ from step to step would mean nothing."""
        return False

    def prepared(self, setup: Setup) -> Setup:
        """The model as it is; refused if no channel can be sampled, or seen."""
        if not _sampled(setup):
            raise ConfigError(
                "no channels of this model can be sampled; ADDS needs linear layers or "
                "convolutions between which channels can be left out"
            )
        if self.importance == "lrp":
            model, structure = _as_trained(setup)
            relevance.refuse(model, structure, _sampled(setup), setup.example)
        return setup

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Subnets are chosen within the whole net, which every client is sent and trains."""
        return ignored_budgets(setup)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """Algorithm 1, line 3: the supernet for every client."""
        recipe = Bilevel(
            self.optimiser,
            lr=self.optimiser.rate(state.round, setup.rounds),
            groups=_sampled(setup),
            share=self.share,
            share_lr=self.share_lr,
            least=self.least,
            softness=self.softness * self.sharpening**state.round,
            strength=self.strength,
            validation=self.validation,
            persistent=self.persistent,
            by_examples=self.by_examples,
            importance=self.importance,
        )
        return alike(setup, state, cohort, recipe, self.to_train(Subnet()))

    def merge_training(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Lines 5-7, Eq. 19: each cell is averaged over the clients that sent it."""
        chosen = dict(state.chosen)

        def noted() -> Iterator[Update]:
            for update in updates:
                own = update.subnets[0].shape.owning(PERSONAL, TRACKED)
                chosen[update.client] = own.leaving(TRACKED)
                yield update

        return replace(merged(setup, state, noted()), chosen=chosen)


@lru_cache(maxsize=16)
def _sampled(setup: Setup) -> tuple[str, ...]:
    """The groups whose channels are sampled."""
    return gateable(*_as_trained(setup), setup.example)


def _as_trained(setup: Setup) -> tuple[nn.Module, Structure]:
    """The net that normalises every batch by itself."""
    model = untracked(setup.model)
    return model, setup.structure.among(model)
