"""What a method is: choices over the same machinery, as pure functions of the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from torch import nn

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import AggregationPipeline
from fedquilt.federation.client import Client, Task, Update
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.structure.subnet import Subnet
from fedquilt.training.attack import PGD
from fedquilt.training.statistics import QueryStatistics

SizeKind = Literal["width", "parameters", "exits", "bases"]  # what a size is a fraction of
PersonalStatistics = QueryStatistics | Literal["batch"]
PersonalChoice = bool | Literal["batch", "refreshed"]  # True: as the method's paper scores
SIZE_NAMES = {"width": "width", "parameters": "γ", "exits": "depth", "bases": "width"}


def check_personal_choice(choice: object) -> None:
    """Checks that a choice of statistics for the personal value is one.

    >>> check_personal_choice("refreshed")
    """
    if not isinstance(choice, bool) and choice not in ("batch", "refreshed"):
        raise ConfigError(
            f"personal_statistics must be true, false, 'batch' or 'refreshed', got {choice!r}"
        )


class Method(Protocol):
    """Which part of the model a client gets, what it does with it, how parts come together.

    A method is a frozen value without memory: what survives a round is in the ``State``. Most
    methods inherit ``BaseMethod``, which has defaults for all of this but the plan.

    The argument ``setup`` of its functions is what stays the same during a run. Before
    ``prepare_model`` it has the user's ``model``, afterwards the one that is trained.

    A method may change a part of another one, here how many clients take part in a round:

    >>> from dataclasses import dataclass
    >>> import fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class SmallCohorts(fq.HeteroFL):
    ...     def phases(self, setup):
    ...         return (fq.Phase("train", setup.rounds, fraction=0.01), *self.closing_phases(setup))
    >>> method: fq.Method = SmallCohorts()
    >>> method.size_kind
    'width'
    """

    @property
    def local_params(self) -> tuple[str, ...]:
        """Tensors that stay on the client, as patterns."""
        ...

    @property
    def reinitializes(self) -> bool:
        """Whether it draws initial values of its own, so that those of the model do not matter."""
        ...

    @property
    def size_kind(self) -> SizeKind:
        """What its sizes are fractions of: channels (``width``), parameters, exits, or bases."""
        ...

    @property
    def reveals_data(self) -> str | None:
        """A sentence, if subnets or replies depend on clients' data in a way that cannot be off."""
        ...

    @property
    def plans_by_budget(self) -> bool:
        """Whether all clients of one budget train the same subnets in a round, whoever takes part.

        Then a round that tells what registered clients hold need not plan for all of them.
        """
        ...

    def make_private(self) -> Method:
        """Returns the method with all off that clients would tell of their data.

        Raises:
            ConfigError: That cannot be; the sentence is ``reveals_data``.
        """
        ...

    def default_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """Sizes that clients can afford, largest first, where the settings name no budgets."""
        ...

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """A sentence, if clients of a prepared setup train more than they can afford."""
        ...

    @property
    def scales_outputs(self) -> bool:
        """Whether outputs of cut layers are divided by the share of their channels (Scaler)."""
        ...

    @property
    def attack(self) -> PGD | None:
        """What the model is trained against; None: clients train on their examples alone."""
        ...

    @property
    def personal_statistics(self) -> PersonalStatistics | None:
        """What the paper normalizes a client's test data by, if not by the model's statistics.

        That is each ``batch`` itself, or statistics that are first taken from the client's training
        data. None: the statistics of the model.
        """
        ...

    @property
    def refreshed_statistics(self) -> QueryStatistics:
        """How a client that refreshes the model's statistics before it tests takes them."""
        ...

    def has_statistics(self, setup: Setup) -> bool:
        """Whether the finished model has all running statistics that it normalizes by.

        Otherwise it normalizes every batch by itself, and its answer to an example depends on the
        others in the batch.
        """
        ...

    def prepare_model(self, setup: Setup) -> Setup:
        """Returns the setup with the net that is trained, which may be made from the user's.

        Raises:
            FedquiltError: The method cannot work with this model or these clients. This comes
                before anything is written.
        """
        ...

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """The stretches of a run."""
        ...

    def start(self, setup: Setup) -> State:
        """The state before the first round."""
        ...

    def plan(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Plans a round of the state's phase.

        Args:
            setup: What stays the same during the run.
            state: The state at the start of the round.
            cohort: The clients of the round, in the order of their numbers.

        Returns:
            One task for each client of the cohort, in order: a list, or ``LazyTasks``, of which
            each is made when it is asked for.
        """
        ...

    def aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Composes, once per run, how the replies of a round of a phase become the next state.

        Args:
            setup: What stays the same during the run.
            phase: The name of one of the method's phases.
        """
        ...

    def merge(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Merges decoded updates by the aggregation of the state's phase.

        Args:
            setup: What stays the same during the run.
            state: The state that the clients of this round were sent.
            updates: The accepted updates, which are read once.
        """
        ...

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """Sizes that the method trains, largest first; ``size_kind`` says what they are."""
        ...

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """The model of a width in a finished state: a subnet, or several whose logits are averaged.

        Args:
            setup: What stays the same during the run.
            state: The state after the last round.
            width: One of the method's sizes.
        """
        ...


def shares_weights(setup: Setup, method: Method) -> bool:
    """Whether all weights are shared: what stays with clients is no more than statistics."""
    at_home = setup.structure.match_names(method.local_params)
    return not any(name in at_home for name, _ in setup.model.named_parameters())
