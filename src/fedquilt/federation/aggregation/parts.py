"""The kinds of parts that a pipeline of aggregation is composed of.

A part is a frozen value: its settings are its fields, and it keeps nothing between calls. What must
survive a round goes into the ``State``, so that it is in checkpoints. To add a part, subclass one
of the kinds below, set the flags that hold for it, and name it in a method's
``training_aggregation``; ``pipeline.py`` does not change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Update
from fedquilt.federation.columns import Column
from fedquilt.federation.growing import GrowingColumn, MetricsColumn
from fedquilt.federation.rings import Rings
from fedquilt.federation.state import Setup, State
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet


class Part:
    """What every part states about itself; the values here hold unless a part says otherwise.

    >>> import fedquilt as fq
    >>> fq.Mean().is_linear, fq.Mean().reveals_data
    (True, False)
    """

    is_linear: bool = True
    """Whether it does the same to a sum of updates as to each of them, as a secure sum needs."""

    needs_public_denominator: bool = False
    """Whether it needs sums divided by numbers that do not depend on clients' data."""

    reveals_data: bool = False
    """Whether it rests on clients choosing, by their data, which cells they send."""

    needs_metrics: bool = False
    """Whether it reads what single clients report beside their tensors."""

    needs_all_updates: bool = False
    """Whether it needs all updates at once, as a median does; otherwise they are streamed."""


class Decoder(Part, ABC):
    """Turns what a client sent into tensors that can be merged.

    >>> from dataclasses import dataclass, replace
    >>> import fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class FromHalf(fq.Decoder):  # clients send 16 bits a value
    ...     def decode(self, setup, state, update):
    ...         single = tuple({n: t.float() for n, t in sent.items()} for sent in update.params)
    ...         return replace(update, params=single)
    >>> fq.chain(FromHalf()).decoder
    FromHalf()
    """

    gives_changes: bool = False
    """Whether the tensors are changes of the server's values, not values."""

    @abstractmethod
    def decode(self, setup: Setup, state: State, update: Update) -> Update:
        """Decodes one update.

        Args:
            setup: What stays the same during the run.
            state: The state that the clients of this round were sent.
            update: What came from a client.

        Raises:
            UpdateError: The update is not a code of this kind.
        """


class Validator(Part, ABC):
    """Rejects updates that a method cannot use, beyond names, shapes and values.

    >>> from dataclasses import dataclass
    >>> import fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class MaxWeight(fq.Validator):
    ...     limit: float
    ...
    ...     def validate(self, setup, state, update):
    ...         if update.weight > self.limit:
    ...             raise fq.UpdateError(f"client {update.client} has a weight above {self.limit}")
    >>> fq.chain(MaxWeight(1000.0)).validators
    (MaxWeight(limit=1000.0),)
    """

    @abstractmethod
    def validate(self, setup: Setup, state: State, update: Update) -> None:
        """Raises an UpdateError that names the client if its update must not be merged.

        Args:
            setup: What stays the same during the run.
            state: The state that the clients of this round were sent.
            update: What came from a client, decoded.
        """


class UpdateTransform(Part, ABC):
    """Changes one update at a time before it is merged: clips it, caps its weight, drops rows.

    >>> from dataclasses import dataclass, replace
    >>> import fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class CapWeight(fq.UpdateTransform):
    ...     limit: float
    ...
    ...     def transform(self, setup, state, update):
    ...         return replace(update, weight=min(update.weight, self.limit))
    >>> fq.chain(CapWeight(100.0), fq.FedAvgM()).transforms
    (CapWeight(limit=100.0),)
    """

    needs_values: bool = False
    """Whether it compares an update with the server's values; some decoders give changes."""

    @abstractmethod
    def transform(self, setup: Setup, state: State, update: Update) -> Update:
        """Transforms one update.

        Args:
            setup: What stays the same during the run.
            state: The state that the clients of this round were sent.
            update: A decoded and validated update, which is not written to.

        Returns:
            The update that is merged instead.
        """

    def transform_all(
        self, setup: Setup, state: State, updates: Iterable[Update]
    ) -> Iterator[Update]:
        """Transforms the updates of a round as they come.

        A part that has to see all of them first (``needs_all_updates``) overrides this.

        Args:
            setup: What stays the same during the run.
            state: The state that the clients of this round were sent.
            updates: Decoded and validated updates, which are read once.
        """
        for update in updates:
            yield self.transform(setup, state, update)


@dataclass(frozen=True, eq=False)
class RingSums:
    """Sums over all clients of a round, for some of the rings.

    Args:
        rings: What the cells are divided into.
        changes: Σ a_u Δ_u in double precision by the number of the ring: the changes of the
            server's values, each times the client's weight.
        weights: Σ a_u by the number of the ring.
    """

    rings: Rings
    changes: Mapping[int, Tensor]
    weights: Mapping[int, float]


class Replies(Column[Update]):
    """Updates without their tensors, as columns that grow while a round runs."""

    def __init__(self) -> None:
        self._clients, self._weights = array("q"), array("d")
        self._subnets: GrowingColumn[tuple[Subnet, ...]] = GrowingColumn()
        self._metrics = MetricsColumn()

    def append(self, update: Update) -> None:
        """Adds an update."""
        self._clients.append(update.client)
        self._weights.append(update.weight)
        self._subnets.append(update.subnets)
        self._metrics.append(update.metrics)

    def __len__(self) -> int:
        return len(self._clients)

    def _get(self, row: int) -> Update:
        metrics = self._metrics[row] or {}
        return Update(self._clients[row], self._subnets[row], (), self._weights[row], metrics)


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What all updates of a round say together.

    Args:
        params: Global tensors by name; where no update moved a cell, the server's value.
        trained: For a global name, a mask of the cells that an update with a weight above 0 held.
        replies: The updates that took part, without their tensors.
        metrics: Numbers about the aggregation, for the record of the round.

    >>> import torch
    >>> params, held = {"weight": torch.ones(2)}, torch.tensor([True, False])
    >>> Aggregate(params, trained=lambda name: held).trained("weight")
    tensor([ True, False])
    """

    params: Params
    trained: Callable[[str], Tensor]
    replies: Sequence[Update] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Aggregator(Part, ABC):
    """Makes one aggregate of all updates of a round.

    >>> from dataclasses import dataclass
    >>> import torch, fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class Median(fq.Aggregator):  # for clients that all train the whole model
    ...     is_linear = False
    ...     needs_all_updates = True
    ...
    ...     def aggregate(self, setup, state, updates):
    ...         sent = [update.params[0] for update in updates]
    ...         params = {n: torch.stack([p[n] for p in sent]).median(0).values for n in sent[0]}
    ...         return fq.Aggregate(params, lambda name: torch.ones_like(params[name], dtype=bool))
    >>> fq.chain(Median(), fq.ServerSGD(lr=0.5)).is_linear
    False
    """

    takes_changes: bool = False
    """Whether it merges changes of the server's values, as some decoders give, not values."""

    needs_linear_parts: bool = False
    """Whether it sees nothing but sums of updates, as a secure sum does."""

    has_public_denominator: bool = False
    """Whether sums are divided by numbers that do not depend on clients' data."""

    def replaced_by(self, rule: Aggregator) -> Aggregator:
        """The aggregator of a method's pipeline if a user names a rule to merge by.

        Args:
            rule: Takes the place of the mean.

        Raises:
            ConfigError: This aggregator is no mean, and cannot be replaced.
        """
        raise ConfigError(
            f"{rule} takes the place of a mean, and this method merges by {self}; leave it out"
        )

    @abstractmethod
    def aggregate(self, setup: Setup, state: State, updates: Iterable[Update]) -> Aggregate:
        """Aggregates the updates, which come one at a time.

        Args:
            setup: What stays the same during the run.
            state: The state that the clients of this round were sent.
            updates: Decoded, validated and transformed updates; each may be dropped once read.
        """

    def aggregate_sums(self, setup: Setup, state: State, sums: RingSums) -> Aggregate:
        """Aggregates updates of which only sums are known, as a secure sum opens them.

        Args:
            setup: What stays the same during the run.
            state: The state that the clients of this round were sent.
            sums: The sums of the rings that were opened; cells of other rings keep their values.

        Raises:
            ConfigError: It has to see single updates.
        """
        raise ConfigError(f"{self} has to see single updates, and a secure sum hides them")


class ServerUpdate(Part, ABC):
    """Makes the next state of the aggregate.

    >>> from dataclasses import dataclass, replace
    >>> import fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class CountReplies(fq.ServerUpdate):
    ...     moves_params = False
    ...
    ...     def apply(self, setup, state, aggregate):
    ...         count = state.method_state.get("replies", 0) + len(aggregate.replies)
    ...         return replace(state, method_state={**state.method_state, "replies": count})
    >>> fq.chain(CountReplies()).server_updates
    (ServerSGD(lr=1.0), CountReplies())
    """

    moves_params: bool = True
    """Whether it decides the new global tensors; a pipeline has one such part."""

    @property
    def keeps_aggregate(self) -> bool:
        """Whether the new global tensors are those of the aggregate, to the last bit."""
        return False

    @abstractmethod
    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Returns the state after the round; the number of the round is not its concern.

        Args:
            setup: What stays the same during the run.
            state: The state before; for a part that is not the first, as the one before left it.
            aggregate: What the updates of the round say together.
        """
