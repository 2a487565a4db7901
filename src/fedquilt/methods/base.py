"""What most methods inherit: rounds of training, the mean, and a closing query for statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import (
    TAKE_MEAN,
    AggregationPipeline,
    Aggregator,
    Median,
    RobustAggregator,
    ServerOptimizer,
    UpdateTransform,
    chain,
)
from fedquilt.federation.budgets import LEVELS
from fedquilt.federation.client import Client, Recipe, Task, Update, derive_seed
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.method import PersonalStatistics, SizeKind, shares_weights
from fedquilt.methods.queries import (
    QUERY,
    describe_exceeding_query,
    plan_query,
    query_phase,
)
from fedquilt.ranges import Count, Fraction, check_fields
from fedquilt.structure.structure import TRACKED
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.attack import PGD
from fedquilt.training.settings import LocalTraining
from fedquilt.training.statistics import QueryStatistics

if TYPE_CHECKING:
    from typing_extensions import Self


class MethodTraits:
    """What a method is unless it says otherwise; no settings, so that a method may compute them."""

    local_training: LocalTraining
    fraction: Fraction | None  # of the clients, in each round; None: see ``Phase``
    is_personal: bool = False  # whether clients choose, or have, nets of their own

    @property
    def local_params(self) -> tuple[str, ...]:
        """Nothing stays on clients."""
        return ()

    @property
    def reinitializes(self) -> bool:
        """The model's own values are where training starts."""
        return False

    @property
    def reveals_data(self) -> str | None:
        """Subnets are chosen by the server."""
        return None

    @property
    def size_kind(self) -> SizeKind:
        """Sizes are widths."""
        return "width"

    @property
    def scales_outputs(self) -> bool:
        """Outputs are as they are."""
        return False

    @property
    def tracks_statistics(self) -> bool:
        """Running statistics are a part of what clients train, like weights."""
        return True

    @property
    def attack(self) -> PGD | None:
        """Nothing is trained against."""
        return None

    @property
    def personal_statistics(self) -> PersonalStatistics | None:
        """Clients answer with the model's statistics."""
        return None

    @property
    def plans_by_budget(self) -> bool:
        """A client's subnets may depend on its number, and on who else takes part."""
        return False

    @property
    def queries_within_budgets(self) -> bool:
        """Every client is asked for the statistics of all sizes."""
        return False


@dataclass(frozen=True, kw_only=True)
class BaseMethod(MethodTraits):
    """What most methods have in common; a method's own file says where it differs.

    By default there are ``setup.rounds`` rounds of training. Clients start from the model's own
    tensors, nothing stays on them, and every cell is averaged over the clients that hold it. A
    subclass has to say what clients do (``plan_training``) and has fields ``local_training`` and
    ``fraction``, of the clients that take part in a round.

    Args:
        query_statistics: Whether clients are asked, at the end, for the statistics of batch
            normalization. None: if training leaves none on the server.
        statistics_batch: The size of the batches that these statistics are taken from.
        query_fraction: The fraction of the clients that are asked for them. None: a hundred
            clients, or all if there are fewer; all where each has a net of its own.
        server_optimizer: What the server makes of the mean, such as ``FedAdam(lr=0.01)``. By
            default it takes the mean itself.
        aggregator: What takes the place of the mean, such as ``TrimmedMean(hostile=2)``. A robust
            rule also has clients' statistics of a closing query merged by their median.
        transforms: What is done to each update before, such as ``ClipNorm(1.0)``.

    >>> from dataclasses import dataclass, field
    >>> import fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class HalfWidth(BaseMethod):
    ...     local_training: fq.LocalTraining = field(default_factory=fq.LocalTraining)
    ...     fraction: float | None = None
    ...
    ...     def plan_training(self, setup, state, cohort):
    ...         recipe = fq.LocalSGD(self.local_training, lr=self.local_training.lr)
    ...         return same_for_all(setup, state, cohort, recipe, setup.structure.subnet(0.5))
    >>> HalfWidth(server_optimizer=fq.FedAvgM()).server_optimizer
    FedAvgM(lr=1.0, momentum=0.9)
    """

    query_statistics: bool | None = None
    statistics_batch: Count = 50
    query_fraction: Fraction | None = None
    server_optimizer: ServerOptimizer = TAKE_MEAN
    aggregator: Aggregator | None = None
    transforms: tuple[UpdateTransform, ...] = ()

    def __post_init__(self) -> None:
        """Refuses settings that are not of their types, or out of range."""
        check_fields(self)

    def make_private(self) -> Self:
        """Clients are not asked for statistics; what else a method leaves out it says itself."""
        if self.reveals_data is not None:
            raise ConfigError(
                f"{type(self).__name__} cannot be private: {self.reveals_data}; choose a method "
                "whose subnets the server chooses, such as heterofl"
            )
        return replace(self, query_statistics=False)

    def default_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """HeteroFL's levels: the whole, a half, and so on to a sixteenth."""
        return tuple(LEVELS.values())

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Clients train what their budgets allow, but the closing query may ask for more."""
        return describe_exceeding_query(setup, self) if self.closing_phases(setup) else None

    def prepare_model(self, setup: Setup) -> Setup:
        """The user's model as it is."""
        return setup

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """Rounds of training, and the closing query."""
        return (Phase("train", setup.rounds, self.fraction), *self.closing_phases(setup))

    def closing_phases(self, setup: Setup) -> tuple[Phase, ...]:
        """The query for statistics, if there is one."""
        is_wanted = self.query_statistics
        if is_wanted is None:
            is_wanted = self._lacks_statistics(setup)
        can_be_asked = setup.structure.statistics and shares_weights(setup, self)
        if not (is_wanted and can_be_asked):
            return ()
        return (query_phase(setup, self.query_fraction, everyone=self.is_personal),)

    def has_statistics(self, setup: Setup) -> bool:
        """Whether training or the closing query gives the model its statistics."""
        return not self._lacks_statistics(setup) or bool(self.closing_phases(setup))

    def _lacks_statistics(self, setup: Setup) -> bool:
        """Whether statistics of a model that is shared are not on the server after training."""
        statistics = setup.structure.statistics
        at_home = statistics & setup.structure.match_names(self.local_params)
        is_without = not self.tracks_statistics or bool(at_home)
        return bool(statistics) and is_without and shares_weights(setup, self)

    def start(self, setup: Setup) -> State:
        """The model's own tensors."""
        return initial_state(setup)

    def plan(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """The closing query, or a round of training."""
        if state.phase == QUERY:
            return plan_query(setup, state, cohort, self)
        return self.plan_training(setup, state, cohort)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Plans a round of training: which client gets which subnets, and what it does with them.

        Args:
            setup: What stays the same during the run.
            state: The state at the start of the round; its phase is not the closing query.
            cohort: The clients of the round, in the order of their numbers.

        Returns:
            The tasks, in the order of the clients: a list, or ``LazyTasks`` for large cohorts.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its clients train")

    def without_untracked(self, subnet: Subnet) -> Subnet:
        """A subnet as clients train it: without statistics that are not tracked."""
        return subnet if self.tracks_statistics else subnet.excluding(TRACKED)

    @property
    def statistics_recipe(self) -> QueryStatistics:
        """How clients find statistics."""
        return QueryStatistics(self.statistics_batch, scale=self.scales_outputs, attack=self.attack)

    @property
    def refreshed_statistics(self) -> QueryStatistics:
        """Twenty passes, in batches as in training."""
        return self.statistics_recipe.to_refresh(self.local_training.batch_size)

    def refuse_server_optimizer(self, reason: str) -> None:
        """Raises a ConfigError if there is a server optimizer, which a method cannot use."""
        if self.server_optimizer != TAKE_MEAN:
            raise ConfigError(f"{reason}; leave out server_optimizer, got {self.server_optimizer}")

    def refuse_parts(self, reason: str) -> None:
        """Raises a ConfigError if there is an aggregator or a transform, which have no place."""
        if self.aggregator is not None or self.transforms:
            given = ", ".join(map(str, filter(None, (self.aggregator, *self.transforms))))
            raise ConfigError(f"{reason}; leave out aggregator and transforms, got {given}")

    def aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Statistics are averaged, each batch counting once; what was trained, as a method does."""
        is_robust = isinstance(self.aggregator, RobustAggregator)
        if phase == QUERY:  # where no value of the server would do: so any number of clients must
            return chain(Median(hostile=0)) if is_robust else chain()
        own = self.training_aggregation(setup, phase)
        if self.aggregator is None and not self.transforms:
            return own
        if setup.structure.match_names(self.local_params) >= setup.structure.shapes.keys():
            self.refuse_parts("all tensors stay on the clients, and nothing is merged")
        if is_robust:
            self._require_enough_clients(setup, phase)
        return own.with_parts(self.aggregator, self.transforms)

    def _require_enough_clients(self, setup: Setup, phase: str) -> None:
        assert isinstance(self.aggregator, RobustAggregator)
        for asked in self.phases(setup):
            count = asked.count_needed(setup.registry)
            if asked.name == phase and not self.aggregator.is_enough(count):
                needed = self.aggregator.count_needed(len(setup.clients))
                remedy = "lower hostile"
                if needed is not None:
                    remedy += f", or ask at least {needed} of {len(setup.clients)} (fraction)"
                raise ConfigError(
                    f"{self.aggregator} withstands hostile={self.aggregator.hostile:g} only among "
                    f"more clients than the {count} of a round; {remedy}"
                )

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Composes the aggregation of a phase that is not the closing query.

        Args:
            setup: What stays the same during the run.
            phase: The name of one of the method's phases.

        Returns:
            The mean of each cell over the clients that hold it, and the server optimizer.
        """
        return chain(self.server_optimizer)

    def merge(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Runs the aggregation of the state's phase."""
        return self.aggregation(setup, state.phase).merge(setup, state, updates)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The whole model; there is no smaller one that was trained as such."""
        return (1.0,)

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """The leading channels."""
        return (setup.structure.subnet(width),)


def initial_state(setup: Setup) -> State:
    """Round 0 with the model's own tensors."""
    params = {n: t.detach().clone() for n, t in named_tensors(setup.model).items()}
    return State(round=0, phase="", params=params)


def same_for_all(
    setup: Setup, state: State, cohort: Sequence[Client], recipe: Recipe, subnet: Subnet
) -> Sequence[Task]:
    """The same subnet and the same recipe for every client."""

    def plan(client: Client) -> Task:
        seed = derive_seed(setup.seed, state.round, client.id)
        return Task(client.id, (subnet,), state.params, recipe, seed)

    return plan_each(cohort, plan)
