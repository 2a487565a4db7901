"""DepthFL: every client trains the first layers that it can afford, with all exits on the way.

Kim, Yu, Kim, Moon. "DepthFL: Depthwise Federated Learning for Heterogeneous Clients." ICLR 2023.

The classifiers of the paper are exits here: a local model of depth d has the first d of N. What
the authors' code does differently is in docs/methods/depthfl.md.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import Aggregate, AggregationPipeline, ServerUpdate, chain
from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.affordability import filter_affordable
from fedquilt.methods.base import BaseMethod
from fedquilt.ranges import Fraction
from fedquilt.structure.budget import count_multiples
from fedquilt.structure.derive import make_uncut_structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.exits import ExitLosses, MultiExit, find_natural_exits
from fedquilt.training.feddyn import (
    FedDynTraining,
    compute_server_model,
    compute_trained_fractions,
    update_drift,
)
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.optimizers import trainable_weights
from fedquilt.training.settings import LocalTraining


@dataclass(frozen=True)
class DepthFL(BaseMethod):
    """Nested depths, the losses of all exits summed, exits that learn from each other.

    ``exit_modules`` names the modules that exits are behind; by default the stages of the net but
    the last.
    ``distil`` is mutual self-distillation, with a weight that grows for ``ramp_rounds``. With
    ``only_last`` a client trains its last exit alone (InclusiveFL), so nothing is distilled.
    ``feddyn_alpha`` is α of dynamic regularization; 0 is plain averaging.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        exit_modules: Modules behind which there is an exit; None: all stages but the last.
        distil: Whether the exits learn from each other.
        ramp_rounds: Rounds over which that loss grows to its full weight.
        only_last: Whether a client trains its last exit alone, as InclusiveFL does.
        feddyn_alpha: α of FedDyn; 0: without it.
    """

    local_training: LocalTraining = field(
        default_factory=lambda: LocalTraining(
            lr=0.1,
            round_decay=0.998,
            momentum=0.0,
            weight_decay=1e-3,
            batch_size=50,
            max_grad_norm=None,
        )
    )
    fraction: Fraction | None = None
    exit_modules: tuple[str, ...] | None = None
    distil: bool = True
    ramp_rounds: int = 300
    only_last: bool = False
    feddyn_alpha: float = 0.0
    size_kind = "exits"

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        if self.ramp_rounds < 0:
            raise ConfigError(f"ramp_rounds is a number of rounds, got {self.ramp_rounds}")
        if not 0 <= self.feddyn_alpha < math.inf:
            raise ConfigError(
                f"feddyn_alpha is α of FedDyn, such as 0.1, or 0, got {self.feddyn_alpha}"
            )

        if self.feddyn_alpha:
            self.refuse_server_optimizer("FedDyn has a server's step of its own")

    @property
    def reveals_data(self) -> str | None:
        """FedDyn's server has to know which clients answered."""
        return "FedDyn corrects the model by who answered" if self.feddyn_alpha else None

    def default_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """As many clients of each depth, as in the paper."""
        return depths(len(self._places(model)) + 1)

    def _places(self, model: nn.Module) -> tuple[str, ...]:
        """The modules that exits are behind."""
        return find_natural_exits(model) if self.exit_modules is None else self.exit_modules

    def prepare_model(self, setup: Setup) -> Setup:
        """The user's model with exits; an exit is what may be skipped, and no width is cut."""
        setup.task.require_outputs("DepthFL, in which every exit has a loss,")
        net = copy.deepcopy(setup.model)
        at = self._places(net)
        with torch.random.fork_rng(devices=[]):  # its heads are the same if it is resumed
            torch.default_generator.manual_seed(derive_seed(setup.seed, 0, 0, 1))
            model = MultiExit(net, at, setup.example)
        structure = replace(make_uncut_structure(model, setup.structure), blocks=model.blocks())
        deep = replace(setup, model=model, structure=structure)
        for client in deep.registry.one_per_budget:
            self.trained_subnet(deep, client)  # refuses whoever cannot afford one exit
        return deep

    plans_by_budget = True

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """The deepest local model of each client."""
        params, recipe = self._sent(state), self._recipe(setup, state.round)

        def plan(client: Client) -> Task:
            return Task(
                client.id,
                (self.trained_subnet(setup, client),),
                params,
                recipe,
                derive_seed(setup.seed, state.round, client.id),
            )

        return plan_each(cohort, plan)

    def _recipe(self, setup: Setup, round: int) -> LocalSGD | FedDynTraining:
        distil = self.consistency_weight(round) if self.distil else 0.0
        sgd = LocalSGD(
            self.local_training,
            lr=self.local_training.lr_at(round, setup.rounds),
            objective=ExitLosses(distil, self.only_last),
        )
        return FedDynTraining(sgd, self.feddyn_alpha) if self.feddyn_alpha else sgd

    def consistency_weight(self, round: int) -> float:
        """The weight of self-distillation: exp(−5 (1 − min(r, R)/R)²) in round r of R.

        >>> [round(DepthFL().consistency_weight(r), 4) for r in (0, 150, 300, 900)]
        [0.0067, 0.2865, 1.0, 1.0]
        """
        left = 1 - min(round, self.ramp_rounds) / self.ramp_rounds if self.ramp_rounds else 0.0
        return math.exp(-5 * left**2)

    def _sent(self, state: State) -> Mapping[str, Tensor]:
        return (
            compute_server_model(state.params, state.server_tensors, self.feddyn_alpha)
            if self.feddyn_alpha
            else state.params
        )

    def trained_subnet(self, setup: Setup, client: Client) -> Subnet:
        """The deepest local model that a client can afford, without heads that rest."""
        sizes = {size: self.subnet(setup, size) for size in self.sizes(setup)}
        subnet = sizes[max(filter_affordable(setup, client, sizes))]
        depth = len(sizes) - len(subnet.skipped)
        untrained = range(1, depth) if self.only_last else ()
        return subnet.excluding(*(f"heads.exit{number}.*" for number in untrained))

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Each tensor is averaged over the clients that hold it, each counting once."""
        if not self.feddyn_alpha:
            return super().training_aggregation(setup, phase)
        held: Counter[Subnet] = Counter()
        for client in setup.registry.one_per_budget:
            held[self.trained_subnet(setup, client)] += setup.registry.count_with([client.budget])
        return chain(FedDynUpdate(self.feddyn_alpha, tuple(held.items())))

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """Depths as fractions of the number of exits, the whole first."""
        return depths(len(setup.structure.blocks) + 1)

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """One subnet, which answers with the mean of its exits."""
        return (self.subnet(setup, width),)

    def subnet(self, setup: Setup, size: float) -> Subnet:
        """The first exits, as many as go into a fraction of the model."""
        exits = tuple(setup.structure.blocks)  # the last one first
        count = len(exits) + 1
        depth = min(count, count_multiples(size, 1 / count))
        if depth < 1:
            raise ConfigError(
                f"the smallest model has one of {count} exits, {1 / count:g} of the whole, got "
                f"{size:g}"
            )
        return Subnet().without_blocks(*exits[: count - depth])


@dataclass(frozen=True)
class FedDynUpdate(ServerUpdate):
    """FedDyn's server: the mean is kept as it is, and h, which clients start from, is corrected.

    Args:
        alpha: α of FedDyn.
        held: The subnets of all registered clients, and how many clients have each.
    """

    alpha: float
    held: tuple[tuple[Subnet, int], ...]
    keeps_aggregate = True

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """h <- h − α (1/m) Σ_k (θ_k − θ), tensor by tensor, over the clients that hold it."""
        trained = Counter(subnet for reply in aggregate.replies for subnet in reply.subnets)
        shares = compute_trained_fractions(
            trainable_weights(setup.model), setup.structure, trained, dict(self.held)
        )
        start = compute_server_model(state.params, state.server_tensors, self.alpha)
        drift = update_drift(state.server_tensors, start, aggregate.params, shares, self.alpha)
        return replace(state, params=aggregate.params, server_tensors=drift)


def depths(count: int) -> tuple[float, ...]:
    """The sizes of a net with so many exits, its own among them.

    >>> depths(4)
    (1.0, 0.75, 0.5, 0.25)
    """
    return tuple(depth / count for depth in range(count, 0, -1))
