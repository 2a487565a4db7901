"""ADDS: clients choose the channels of their subnets by gradient, and train them at the same time.

Gong, Gao, Wu, Qin. "ADDS: Adaptive Differentiable Sampling for Robust Multi-Party Learning."

Symbols of the paper -> names here: w -> state.params, θ_i, I_i -> what client i sends: the tensors
of a subnet and the subnet, which is also state.chosen_subnets[i]; A = {α^k} -> the shares of each
client, which it keeps; ε -> softness, λ -> strength.

What the paper leaves open, and what was chosen, is in docs/methods/adds.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import Aggregate, AggregationPipeline, ServerUpdate, chain
from fedquilt.federation.client import PERSONAL, Client, Task
from fedquilt.federation.state import Setup, State, cache_per_setup
from fedquilt.methods.affordability import describe_ignored_budgets
from fedquilt.methods.base import BaseMethod, same_for_all
from fedquilt.ranges import Fraction
from fedquilt.structure.derive import restrict_structure
from fedquilt.structure.structure import TRACKED, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training import relevance
from fedquilt.training.bilevel import Bilevel, Importance, WeightStep
from fedquilt.training.gating import find_gateable_groups
from fedquilt.training.settings import LocalTraining
from fedquilt.training.tracking import without_running_stats


@dataclass(frozen=True)
class ADDS(BaseMethod):
    """Every client finds its own subnet of the whole net that it is sent.

    ``keep_fraction`` is where the fractions of channels start, ``min_fraction`` how far they may
    fall, ``keep_lr`` how fast. ``softness`` is that of the first round, and falls to ``sharpening``
    of it in every round. ``strength`` weighs the fractions against the loss; None: by each client's
    own labels. With ``persistent`` a client goes on from its own fractions, else it starts over in
    every round, as Algorithm 1, line 11 has it. With ``by_examples`` clients count by the size of
    their data, as in FedAvg, else alike, as in Eq. 19. Batches are normalized by themselves in
    training: the subnets of a client differ from step to step. At the end clients are asked for the
    statistics of the whole net, and keep those of the subnet that they chose last. ``importance``
    is what channels are chosen by: ``"slimming"``, scales of normalization and activations, or
    ``"lrp"``, relevance (extra ``fedquilt[lrp]``). Fractions are learned with subnets that are
    sampled. Weights are trained in the most important channels, which are those that are sent, or
    with ``weight_step="sampled"`` in sampled subnets, too.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        keep_fraction: Fraction of the channels that a client starts from.
        keep_lr: Learning rate of the fractions.
        min_fraction: Smallest fraction of channels.
        softness: ε of the first round: how soft the choice of channels is.
        sharpening: Factor of the softness from each round to the next.
        strength: λ, the weight of the fractions against the loss; None: by the labels of each
            client.
        validation: Fraction of the training data that fractions are learned from.
        persistent: Whether a client goes on from its own fractions.
        by_examples: Whether clients count by their examples, as in FedAvg.
        importance: What channels are chosen by: slimming or lrp.
        weight_step: What a step of the weights trains: top, the most important channels; or
            sampled, a subnet that is drawn for the step.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.ADDS(fraction=1.0, keep_fraction=0.5)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> sorted(run.state.chosen_subnets)  # the clients that chose a subnet
    [0, 1, 2, 3]
    """

    local_training: LocalTraining = field(
        default_factory=lambda: LocalTraining(lr=0.05, epochs=3, batch_size=10, max_grad_norm=None)
    )
    fraction: Fraction = 0.3
    keep_fraction: float = 0.9
    keep_lr: float = 0.01
    min_fraction: float = 0.1
    softness: float = 1.0
    sharpening: float = 0.98
    strength: float | None = None
    validation: float = 0.1
    persistent: bool = False
    by_examples: bool = False
    importance: Importance = "slimming"
    weight_step: WeightStep = "top"

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        if not 0 < self.min_fraction <= self.keep_fraction <= 1:
            raise ConfigError(
                "keep_fraction is in [min_fraction, 1] and min_fraction is above 0, got "
                f"keep_fraction {self.keep_fraction} and min_fraction {self.min_fraction}"
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

    @property
    def reveals_data(self) -> str:
        """Sec. 3: clients choose channels by their importance."""
        return "clients choose their channels by their data, and send the choice"

    def prepare_model(self, setup: Setup) -> Setup:
        """The model as it is; refused if no channel can be sampled, or seen."""
        if not _find_sampled_groups(setup):
            raise ConfigError(
                "no channels of this model can be sampled; ADDS needs linear layers or "
                "convolutions between which channels can be left out"
            )
        if self.importance == "lrp":
            setup.task.require_classes("importance = 'lrp' of ADDS")
            model, structure = _build_trained_net(setup)
            relevance.require_relevance(
                model, structure, _find_sampled_groups(setup), setup.example
            )
        return setup

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Subnets are chosen within the whole net, which every client is sent and trains."""
        return describe_ignored_budgets(setup)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Algorithm 1, line 3: the supernet for every client."""
        recipe = Bilevel(
            self.local_training,
            lr=self.local_training.lr_at(state.round, setup.rounds),
            groups=_find_sampled_groups(setup),
            keep_fraction=self.keep_fraction,
            keep_lr=self.keep_lr,
            min_fraction=self.min_fraction,
            softness=self.softness * self.sharpening**state.round,
            strength=self.strength,
            validation=self.validation,
            persistent=self.persistent,
            by_examples=self.by_examples,
            importance=self.importance,
            weight_step=self.weight_step,
        )
        return same_for_all(setup, state, cohort, recipe, self.without_untracked(Subnet()))

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Lines 5-7, Eq. 19: each cell is averaged over the clients that sent it."""
        return chain(self.server_optimizer, RememberSubnets())


@dataclass(frozen=True)
class RememberSubnets(ServerUpdate):
    """Notes the subnet that each client chose and sent, as that of its own net."""

    moves_params = False
    reveals_data = True

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Replaces the subnets of the clients that took part."""
        chosen = {
            reply.client: reply.subnets[0].shape.with_private(PERSONAL, TRACKED).excluding(TRACKED)
            for reply in aggregate.replies
        }
        return replace(state, chosen_subnets={**state.chosen_subnets, **chosen})


@cache_per_setup
def _find_sampled_groups(setup: Setup) -> tuple[str, ...]:
    """The groups whose channels are sampled."""
    return find_gateable_groups(*_build_trained_net(setup), setup.example)


def _build_trained_net(setup: Setup) -> tuple[nn.Module, Structure]:
    """The net that normalizes every batch by itself."""
    model = without_running_stats(setup.model)
    return model, restrict_structure(setup.structure, model)
