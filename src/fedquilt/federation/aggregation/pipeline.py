"""Aggregation as a pipeline: decode, validate, transform, aggregate, update the server.

A method composes one pipeline for each of its phases, once per run. The parts are in ``parts.py``;
what they state about themselves decides which of them go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation.mean import Mean
from fedquilt.federation.aggregation.parts import (
    Aggregate,
    Aggregator,
    Decoder,
    Part,
    Replies,
    ServerUpdate,
    UpdateTransform,
    Validator,
)
from fedquilt.federation.aggregation.server_optimizers import ServerSGD
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.state import Setup, State
from fedquilt.federation.validation import validate_reply

KINDS: tuple[type[Part], ...] = (Decoder, Validator, UpdateTransform, Aggregator, ServerUpdate)
AnyPart = TypeVar("AnyPart", bound=Part)


@dataclass(frozen=True)
class PlainDecoder(Decoder):
    """Takes an update as it is."""

    def decode(self, setup: Setup, state: State, update: Update) -> Update:
        """Returns the update itself."""
        return update


@dataclass(frozen=True, eq=False)
class MergedRound:
    """What came of the updates of a round.

    Args:
        state: The next state.
        metrics: Numbers about the aggregation, such as how many cells kept the server's values.
    """

    state: State
    metrics: Mapping[str, float]


def _note_replies(updates: Iterable[Update], replies: Replies) -> Iterator[Update]:
    for update in updates:
        replies.append(update)
        yield update


@dataclass(frozen=True)
class AggregationPipeline:
    """How the replies of a round become the next state; by default the mean of every cell.

    Args:
        decoder: Opens what clients send.
        validators: Refuse updates, beyond the checks that every update has to pass.
        transforms: Change each update, one after another.
        aggregator: Makes one aggregate of all updates.
        server_updates: Make the next state of it, one after another; the first moves the tensors.

    >>> import fedquilt as fq
    >>> pipeline = fq.AggregationPipeline(server_updates=(fq.FedAvgM(),))
    >>> pipeline.is_linear, pipeline.keeps_aggregate
    (True, False)
    """

    decoder: Decoder = field(default_factory=PlainDecoder)
    validators: tuple[Validator, ...] = ()
    transforms: tuple[UpdateTransform, ...] = ()
    aggregator: Aggregator = field(default_factory=Mean)
    server_updates: tuple[ServerUpdate, ...] = (ServerSGD(),)

    def __post_init__(self) -> None:
        """Refuses parts that do not go together."""
        self._check_meaning()
        self._check_linear()
        self._check_public()
        movers = [part for part in self.server_updates if part.moves_params]
        if len(movers) != 1:
            given = ", ".join(map(str, movers)) or "none"
            raise ConfigError(f"one server update moves the global tensors, got {given}")

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order in which they work."""
        before = (self.decoder, *self.validators, *self.transforms)
        return (*before, self.aggregator, *self.server_updates)

    @property
    def is_linear(self) -> bool:
        """Whether the aggregate is a weighted sum of what clients sent."""
        return all(part.is_linear for part in (self.decoder, *self.transforms, self.aggregator))

    @property
    def keeps_aggregate(self) -> bool:
        """Whether the next tensors are the aggregate itself."""
        return all(part.keeps_aggregate for part in self.server_updates if part.moves_params)

    def with_parts(
        self, aggregator: Aggregator | None, transforms: Sequence[UpdateTransform] = ()
    ) -> AggregationPipeline:
        """The same pipeline with another aggregator than the mean, and with more transforms.

        Raises:
            ConfigError: The aggregator is not a mean, or the parts do not go together.
        """
        own = self.aggregator
        return replace(
            self,
            aggregator=own if aggregator is None else own.replaced_by(aggregator),
            transforms=(*self.transforms, *transforms),
        )

    def accept(
        self, setup: Setup, state: State, task: Task, result: Update | Failure
    ) -> Update | Failure:
        """Decodes and validates the reply to a task.

        Returns:
            The update as it can be merged, or a failure that says why it cannot.
        """

        def check(update: Update) -> None:
            for part in self.validators:
                part.validate(setup, state, update)

        return validate_reply(
            setup,
            task,
            result,
            state.params,
            decode=lambda update: self.decoder.decode(setup, state, update),
            check=check,
        )

    def merge(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Merges accepted updates into the next state; they are read once, one at a time."""
        return self.merge_round(setup, state, updates).state

    def merge_round(self, setup: Setup, state: State, updates: Iterable[Update]) -> MergedRound:
        """The same as ``merge``, with what there is to record about it."""
        replies = Replies()
        stream = _note_replies(updates, replies)
        for transform in self.transforms:
            stream = transform.transform_all(setup, state, stream)
        aggregate = self.aggregator.aggregate(setup, state, stream)
        after = self.finish(setup, state, replace(aggregate, replies=replies))
        return MergedRound(after, aggregate.metrics)

    def finish(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Makes the next state of an aggregate."""
        for part in self.server_updates:
            state = part.apply(setup, state, aggregate)
        return state

    def _check_meaning(self) -> None:
        if self.decoder.gives_changes != self.aggregator.takes_changes:
            kinds = ("values", "changes")
            raise ConfigError(
                f"{self.decoder} gives {kinds[self.decoder.gives_changes]}, and {self.aggregator} "
                f"merges {kinds[self.aggregator.takes_changes]}; choose two that fit"
            )

        for part in self.transforms:
            if part.needs_values and self.decoder.gives_changes:
                raise ConfigError(
                    f"{part} compares values with the server's, and {self.decoder} gives changes; "
                    "leave it out"
                )

    def _check_linear(self) -> None:
        if not self.aggregator.needs_linear_parts:
            return
        before = (self.decoder, *self.validators, *self.transforms)
        for part in (*before, *self.server_updates):
            is_before = part in before and not isinstance(part, PlainDecoder)
            if is_before or part.needs_metrics:
                raise ConfigError(
                    f"{self.aggregator} sees nothing but sums of updates, and {part} has to see "
                    "each of them; leave one of the two out"
                )

    def _check_public(self) -> None:
        for transform in self.transforms:
            if transform.needs_all_updates and self.aggregator.has_public_denominator:
                raise ConfigError(
                    f"{type(self.aggregator).__name__} bounds what one client does to a sum, and "
                    f"{transform} lets an update depend on all others; leave it out"
                )
        for part in self.parts:
            if not part.needs_public_denominator:
                continue
            if not self.aggregator.has_public_denominator:
                raise ConfigError(
                    f"{part} needs sums that are divided by public numbers, and {self.aggregator} "
                    "divides by what clients sent; choose an aggregator with public denominators"
                )
            if telling := next((other for other in self.parts if other.reveals_data), None):
                raise ConfigError(
                    f"{part} protects clients' data, and with {telling} the cells that they send "
                    "tell of it; leave one of the two out"
                )


def chain(*parts: Part) -> AggregationPipeline:
    """Composes parts into a pipeline; what is left out is the default.

    Args:
        parts: In the order in which they work: a decoder, validators, transforms, an aggregator,
            server updates.

    Raises:
        ConfigError: The order is another, a kind that may come once comes twice, or two parts do
            not go together.

    >>> from fedquilt.federation.aggregation import FedAdam
    >>> chain(FedAdam(lr=0.02)).server_updates
    (FedAdam(lr=0.02, beta1=0.9, tau=0.001, beta2=0.99),)
    >>> chain() == AggregationPipeline()
    True
    """
    kinds = [_find_kind(part) for part in parts]
    if kinds != sorted(kinds, key=KINDS.index):
        raise ConfigError(
            f"the parts of a pipeline work in the order {_join(KINDS)}, got {_join(kinds)}"
        )
    updates = tuple(part for part in parts if isinstance(part, ServerUpdate))
    if not any(part.moves_params for part in updates):
        updates = (ServerSGD(), *updates)
    return AggregationPipeline(
        _get_one([part for part in parts if isinstance(part, Decoder)], PlainDecoder()),
        tuple(part for part in parts if isinstance(part, Validator)),
        tuple(part for part in parts if isinstance(part, UpdateTransform)),
        _get_one([part for part in parts if isinstance(part, Aggregator)], Mean()),
        updates,
    )


def _find_kind(part: Part) -> type[Part]:
    for kind in KINDS:
        if isinstance(part, kind):
            return kind
    raise ConfigError(f"a part of a pipeline is one of {_join(KINDS)}, got {part!r}")


def _join(kinds: Iterable[type[Part]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _get_one(given: Sequence[AnyPart], default: AnyPart) -> AnyPart:
    if len(given) > 1:
        raise ConfigError(f"a pipeline has one part of a kind, got {', '.join(map(str, given))}")
    return given[0] if given else default
