"""Split-Mix: a wide net is split into slim bases that every client can train, and mixed in use.

Hong, Wang, Wang, Zhou. "Efficient Split-Mix Federated Learning for On-Demand and In-Situ
Customization." ICLR 2022.

Symbols of the paper -> names here: r -> base, M = ⌊1/r⌋ -> num_bases, w_{i,r} -> tensors named
``name@i`` in state.params, R_k -> client.budget, P and p -> the deck and memory["visits"],
T, E, η_t -> setup.rounds, local_training.epochs, local_training.lr_at, λ -> robustness,
λ_n -> share.

Choices that the paper leaves open, and where the public code differs, are in
docs/methods/splitmix.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor, nn

from fedquilt.errors import BudgetError, ConfigError
from fedquilt.federation.aggregation import Aggregate, AggregationPipeline, ServerUpdate, chain
from fedquilt.federation.budgets import LEVELS
from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.federation.tasks import LazyTasks, plan_each
from fedquilt.methods.base import BaseMethod
from fedquilt.methods.method import PersonalStatistics, SizeKind
from fedquilt.ranges import Fraction
from fedquilt.structure.budget import Budget, count_multiples
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.cut import Params, build_module
from fedquilt.structure.derive import make_uncut_structure
from fedquilt.structure.structure import NORMS, STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.attack import PGD
from fedquilt.training.client_loss import Masked
from fedquilt.training.dualnorm import make_dual
from fedquilt.training.evaluate import Evaluate, sum_numbers
from fedquilt.training.initialization import reinitialize_copy, rescale_initial
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.objectives import Adversarial, Objective, PlainLoss
from fedquilt.training.settings import LocalTraining
from fedquilt.training.stack.program import can_stack
from fedquilt.training.statistics import QueryStatistics
from fedquilt.training.tracking import without_running_stats

STACKED_BASE = 0.25  # the widest base that trains quicker in one pass: benchmarks/bases.py
BNStatistics = Literal["batch", "post", "tracked", "local"]

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class SplitMix(BaseMethod):
    """Slim bases, dealt to clients by their budgets, averaged each on its own.

    ``base`` is the width r of a base. ``statistics`` is what batch normalization uses in training
    (Table 4): each batch's own (``batch``); the same, and then 20 passes over clients' data at the
    end (``post``); tracked and averaged (``tracked``), or tracked and kept on clients (``local``).
    By default ``batch``, and ``tracked`` for a robust model, whose two kinds of statistics must not
    mix. A model that is taken away always has statistics: unless they are tracked on the server,
    clients are asked for those of every base at the end. ``rescale_layer`` is on by default where
    it helps, with ``post``.

    ``robust`` trains every base with two kinds of normalization, for clean and for attacked
    inputs (Algorithm 4). Every base is drawn by its layers' ``reset_parameters``; values of the
    model that these would not draw are lost, with a warning. ``sort_bases`` orders the bases by
    the metric on validation data at the end.
    ``stacked`` trains a client's bases in one pass instead of one after another; None: bases of at
    most a quarter of the width, which train quicker so, if the model's layers allow it.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        base: Width of a base net.
        statistics: Of batch normalization: batch, post, tracked or local; None: batch, or tracked
            if robust.
        local_affine: Whether scales and shifts of normalization stay on clients, too, with local
            statistics.
        within_budgets: Whether there are no more base nets than the largest budget allows, as in
            the public code.
        rescale_init: Whether base nets are initialized like parts of the wide net.
        rescale_layer: Whether layers are rescaled by the width; "training": in training alone, as
            in the paper; None: with post statistics.
        masked: Whether the loss leaves out classes that a client does not have; "batch": those that
            a batch does not have, as in the public code.
        sort_bases: Whether base nets are ordered by the metric on validation data.
        robust: Whether clients also train under attack, with dual batch normalization.
        robust_fraction: Weight of the loss under attack.
        epsilon: Largest change of a pixel by the attack.
        steps: Steps of the attack.
        step_size: Size of a step, in pixel units; None: min(1.25 ε, ε + 4/255) / steps.
        stacked: Whether base nets train in one pass; None: up to a quarter of the width.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.SplitMix(base=0.5, stacked=False)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [(score.width, score.params) for score in run.scores]
    [(1.0, 70), (0.5, 35)]
    """

    local_training: LocalTraining = field(default_factory=lambda: LocalTraining(max_grad_norm=None))
    fraction: Fraction = 1.0
    base: float = 0.125
    statistics: BNStatistics | None = None
    local_affine: bool = False
    within_budgets: bool = False
    rescale_init: bool = True
    rescale_layer: bool | Literal["training"] | None = None
    masked: Masked = True
    sort_bases: bool = False
    robust: bool = False
    robust_fraction: float = 0.5
    epsilon: float = 8 / 255
    steps: int = 7
    step_size: float | None = None
    stacked: bool | None = None

    def __post_init__(self) -> None:
        """Refuses what makes no sense, and warns of what the paper shows to collapse."""
        super().__post_init__()
        if not 0 < self.base <= 1:
            raise ConfigError(f"the base is a width in (0, 1], got {self.base}; 1/8 is 0.125")
        if self.local_affine and self.statistics_kind != "local":
            raise ConfigError(
                "scales and shifts of normalization stay on clients with their statistics, and "
                f"these are '{self.statistics_kind}'; set statistics to 'local', or leave out "
                "local_affine"
            )
        if self.sort_bases and self.statistics_kind == "local":
            raise ConfigError(
                "sort_bases gives bases other numbers, but statistics that are 'local' stay on "
                "clients under the old ones; leave sort_bases off, or use statistics "
                "batch, post or tracked"
            )
        if self.rescale_layer and self.statistics_kind in ("tracked", "local"):
            warnings.warn(
                f"rescale_layer with statistics that are tracked ('{self.statistics_kind}') "
                "collapses to chance in the paper (Table 4); leave it off, or use statistics "
                "batch or post",
                stacklevel=3,
            )

    @property
    def reinitializes(self) -> bool:
        """Every base is drawn."""
        return True

    @property
    def statistics_kind(self) -> BNStatistics:
        """What batch normalization uses: as told, or as the paper advises."""
        return self.statistics or ("tracked" if self.robust else "batch")

    @property
    def scales_outputs(self) -> bool:
        """Whether layers' outputs are rescaled in use, too: as told, or as Table 4 advises."""
        if self.rescale_layer is None:
            return self.statistics_kind == "post"
        return self.rescale_layer is True

    @property
    def size_kind(self) -> SizeKind:
        """A size is a number of bases, as a fraction of all."""
        return "bases"

    def default_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """The whole, a half, and so on down to one base (Sec. 5)."""
        return tuple(width for width in LEVELS.values() if count_multiples(width, self.base)) or (
            1.0,
        )

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Nobody trains more bases than its budget allows."""
        return None

    @property
    def num_bases(self) -> int:
        """M = ⌊1/r⌋."""
        return count_multiples(1.0, self.base)

    def count_bases(self, setup: Setup) -> int:
        """How many bases there are: M, or as many as the largest budget allows."""
        if not self.within_budgets:
            return self.num_bases
        widest = max(budget.width for budget in setup.registry.budget_counts)
        return min(self.num_bases, count_multiples(widest, self.base))

    @property
    def local_params(self) -> tuple[str, ...]:
        """Statistics that are tracked locally stay on the client, or all of the normalization."""
        if self.statistics_kind != "local":
            return ()
        return (NORMS,) if self.local_affine else (STATISTICS,)

    @property
    def tracks_statistics(self) -> bool:
        """As the settings say."""
        return self.statistics_kind in ("tracked", "local")

    @property
    def statistics_recipe(self) -> QueryStatistics:
        """One pass; where the paper estimates statistics afterwards, 20 with training's batches."""
        recipe = super().statistics_recipe
        if self.statistics_kind != "post":
            return recipe
        return recipe.to_refresh(self.local_training.batch_size)

    @property
    def attack(self) -> PGD | None:
        """What a robust model is trained against."""
        if not self.robust:
            return None
        return PGD(epsilon=self.epsilon, steps=self.steps, step_size=self.step_size)

    @property
    def personal_statistics(self) -> PersonalStatistics | None:
        """Those of each batch, or of 20 passes over the client's training data (Appendix A.3)."""
        if self.statistics_kind == "batch":
            return "batch"
        return self.statistics_recipe if self.statistics_kind == "post" else None

    @property
    def objective(self) -> Objective:
        """Cross entropy, or Eq. 1 by Algorithm 4."""
        return (
            PlainLoss() if self.attack is None else Adversarial(self.attack, self.robust_fraction)
        )

    def make_private(self) -> Self:
        """Bases keep their order: their accuracies on clients' data are not asked for."""
        return replace(super().make_private(), sort_bases=False)

    def prepare_model(self, setup: Setup) -> Setup:
        """The net is one base; clients' budgets become the number of bases that they can train."""
        if self.robust:
            setup.task.require_classes("adversarial training (method.robust)")
        net = build_module(setup.model, setup.structure, setup.structure.subnet(self.base))
        net = make_dual(net) if self.robust else net
        slim = replace(setup, model=net, structure=make_uncut_structure(net, setup.structure))
        widths = {
            client.budget: self._width(self._affordable(slim, client))
            for client in setup.registry.one_per_budget
        }
        clients = setup.registry.map_budgets(lambda budget: Budget(widths[budget]))
        return replace(slim, clients=clients)

    def _affordable(self, slim: Setup, client: Client) -> int:
        """⌊R_k/r⌋, or as many bases as a budget's other limits allow, M at most."""
        budget = client.budget
        count = min(self.num_bases, count_multiples(budget.width, self.base))
        if not budget.is_width_alone:
            price = compute_cost(slim.model, slim.structure, Subnet(), slim.example)
            total = price
            for number in range(1, count + 1):
                if not budget.allows(total):
                    count = number - 1
                    break
                total = total + price
        if count < 1:
            raise BudgetError(
                f"client {client.id} cannot train even one base of width {self.base:g} within "
                f"{budget}; choose a smaller method.base"
            )
        return count

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """Rounds of training; then statistics and, if asked for, the order of the bases."""
        phases = super().phases(setup)
        return (*phases, Phase("sort", 1, 1.0, is_closing=True)) if self.sort_bases else phases

    def start(self, setup: Setup) -> State:
        """Algorithm 1, line 1: M bases that are initialized independently; the deck is new."""
        params: dict[str, Tensor] = {}
        for i in range(self.count_bases(setup)):
            net = reinitialize_copy(setup.model, derive_seed(setup.seed, 0, i, 1))
            if self.rescale_init:
                rescale_initial(net, setup.structure)
            params |= {f"{n}@{i}": t.detach().clone() for n, t in named_tensors(net).items()}
        memory = {"visits": 0, "together": self._together(setup)}
        return State(round=0, phase="", params=params, method_state=memory)

    def _together(self, setup: Setup) -> bool:
        count = self.count_bases(setup)
        if self.stacked is not None or count == 1:
            return bool(self.stacked)
        if self.base > STACKED_BASE or setup.task.loss.needs_batch:
            return False
        model = setup.model if self.tracks_statistics else without_running_stats(setup.model)
        return can_stack(model, setup.example, channels_last=setup.structure.channels_last)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Algorithm 1, lines 4 to 6: sample base models for each client, and what it does."""
        if state.phase == "train":
            return LazyTasks(len(cohort), lambda i: self._training(setup, state, cohort[i], i))
        every = tuple(self.base_subnets(range(self.count_bases(setup))))
        recipe = Evaluate(
            split="validation",
            local_params=self.local_params,
            scale=self.scales_outputs,
            metrics=setup.task.numbers,
        )

        def plan(client: Client) -> Task:
            seed = derive_seed(setup.seed, state.round, client.id)
            return Task(client.id, every, state.params, recipe, seed)

        return plan_each(cohort, plan)

    def _training(self, setup: Setup, state: State, client: Client, position: int) -> Task:
        chosen = self.sample_bases(setup, state, client, state.method_state["visits"] + position)
        subnets = [
            self.without_untracked(subnet.excluding(*self.local_params))
            for subnet in self.base_subnets(chosen)
        ]
        recipe = LocalSGD(
            self.local_training,
            lr=self.local_training.lr_at(state.round, setup.rounds),
            labels=client.labels,
            masked=self.masked,
            scale=self.scales_outputs or self.rescale_layer == "training",
            local_params=self.local_params,
            weight=client.num_examples,
            objective=self.objective,
            stacked=state.method_state["together"],
        )
        seed = derive_seed(setup.seed, state.round, client.id)
        return Task(client.id, tuple(subnets), state.params, recipe, seed)

    def sample_bases(self, setup: Setup, state: State, client: Client, visit: int) -> list[int]:
        """Algorithm 2: the deck's next base, and others drawn without replacement."""
        count, size = count_multiples(client.budget.width, self.base), self.count_bases(setup)
        first = shuffle_deck(setup.seed, visit // size, size)[visit % size]
        others = [i for i in range(size) if i != first]
        draw = np.random.default_rng(derive_seed(setup.seed, state.round, client.id, 2))
        return sorted([first, *draw.permutation(others)[: count - 1].tolist()])

    def base_subnets(self, numbers: Iterable[int]) -> list[Subnet]:
        """Bases as subnets all of whose tensors are their own."""
        return [Subnet().with_private(str(i), "*") for i in numbers]

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Algorithm 1, lines 7 and 8: each base is averaged over its clients, by their data."""
        if phase == "sort":
            return chain(SortBases(self.count_bases(setup)))
        asked = self.phases(setup)[0].cohort_size(len(setup.clients))
        return chain(self.server_optimizer, CountVisits(asked))

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """Every number of bases is a size, the largest first."""
        return tuple(self._width(k) for k in range(self.count_bases(setup), 0, -1))

    def _width(self, count: int) -> float:
        return min(1.0, count * self.base)  # six bases of 0.16666666667 are the whole

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """Algorithm 1, line 11: the mean of the logits of the first ⌊R/r⌋ bases."""
        count = min(self.count_bases(setup), count_multiples(width, self.base))
        if count < 1:
            raise ConfigError(
                f"the narrowest net is one base of width {self.base:g}, got width {width:g}"
            )
        return tuple(self.base_subnets(range(count)))


@dataclass(frozen=True)
class CountVisits(ServerUpdate):
    """Counts the clients that were dealt bases, so that the deck goes on in the next round."""

    asked: int
    moves_params = False

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """All clients that were asked count, also those that failed."""
        visits = state.method_state["visits"] + self.asked
        return replace(state, method_state={**state.method_state, "visits": visits})


@dataclass(frozen=True)
class SortBases(ServerUpdate):
    """Algorithm 1, line 9: bases in the order of the metric on validation data, best first."""

    num_bases: int
    moves_params = False
    needs_metrics = True

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Renumbers the bases, and with them what the server keeps of each."""
        replies = [reply.metrics for reply in aggregate.replies]
        values = [
            setup.task.compute(sum_numbers(setup.task, replies, number))[setup.task.metric.name]
            for number in range(self.num_bases)
        ]
        sign = -1.0 if setup.task.metric.higher_is_better else 1.0
        ranks = [math.inf if value is None else sign * value for value in values]
        order = sorted(range(self.num_bases), key=lambda number: ranks[number])
        numbers = {str(old): new for new, old in enumerate(order)}

        def rename(tensors: Params) -> dict[str, Tensor]:
            parts = ((name.rpartition("@"), tensor) for name, tensor in tensors.items())
            return {f"{plain}@{numbers[owner]}": tensor for (plain, _, owner), tensor in parts}

        return replace(
            state, params=rename(state.params), server_tensors=rename(state.server_tensors)
        )


def shuffle_deck(seed: int, number: int, size: int) -> list[int]:
    """The bases in the order of the deck's next shuffle (Algorithm 2, line 1)."""
    shuffled = np.random.default_rng(derive_seed(seed, number, size, 3)).permutation(size)
    return [int(i) for i in shuffled]
