"""The data of very many clients: each client's examples are made when they are asked for.

``ClientSets`` are the sets of all clients of one kind, such as their training sets: a function that
makes the set of a client, and columns of what is known of all of them without making any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fedquilt.data.examples import ClientData, count_targets
from fedquilt.data.partition import count_fraction, split_holdout_rows
from fedquilt.data.pipeline import Pipeline
from fedquilt.data.transformed import transform_examples
from fedquilt.data.windows import Windows
from fedquilt.errors import DataError, describe_exception
from fedquilt.federation.client import SERVER
from fedquilt.federation.columns import (
    ClientNumbers,
    CodedColumn,
    ComputedColumn,
    Integers,
    LabelColumn,
    RaggedColumn,
    select_rows,
)

MAX_READY = 256  # clients whose examples stay ready, in each process

MakeData = Callable[[int], ClientData]  # of a client's number


class LazyData(Mapping[int, ClientData]):
    """The data of clients by their numbers, made when they are asked for.

    Those that were asked for last stay ready.

    Args:
        make: Makes the examples of a client.
        clients: The numbers of all clients that have some; whether one is among them must be known
            at once, as with ``ClientNumbers``.
        server: What the server has, as client ``SERVER``; None: nothing.
        samples: Sets that all others are like, such as the one that is divided.
    """

    def __init__(
        self,
        make: MakeData,
        clients: Sequence[int],
        server: ClientData | None = None,
        samples: Sequence[ClientData] = (),
    ) -> None:
        self.clients, self.server = clients, server
        self._make, self._samples = make, samples
        self._ready: OrderedDict[int, ClientData] = OrderedDict()

    def __len__(self) -> int:
        return len(self.clients) + (self.server is not None)

    def __iter__(self) -> Iterator[int]:
        yield from self.clients
        if self.server is not None:
            yield SERVER

    def __contains__(self, client: object) -> bool:
        return client in self.clients or (client == SERVER and self.server is not None)

    def __getitem__(self, client: int) -> ClientData:
        if client == SERVER and self.server is not None:
            return self.server
        if client not in self._ready:
            if client not in self.clients:
                raise KeyError(client)
            self._ready[client] = self._make(client)
            if len(self._ready) > MAX_READY:
                self._ready.popitem(last=False)
        self._ready.move_to_end(client)
        return self._ready[client]

    def __getstate__(self) -> dict[str, object]:
        """All but examples that are ready, which are cheaper to make again than to send."""
        return {**vars(self), "_ready": OrderedDict()}

    @property
    def is_made_by_function(self) -> bool:
        """Whether nothing is known of the examples but what makes them."""
        return not self._samples

    @property
    def samples(self) -> tuple[ClientData, ...]:
        """Sets that tell what all are like."""
        own = [*self._samples] or [self[client] for client in self.clients[:1]]
        return (*own, *([] if self.server is None else [self.server]))


def list_samples(data: Mapping[int, ClientData]) -> tuple[ClientData, ...]:
    """Sets that tell what those of all clients are like: all of them, or some if they are lazy."""
    return data.samples if isinstance(data, LazyData) else tuple(data.values())


def list_owners(data: Mapping[int, ClientData]) -> Sequence[int]:
    """The numbers of clients that have examples."""
    if isinstance(data, LazyData):
        return data.clients
    return tuple(client for client, own in data.items() if client != SERVER and len(own))


@dataclass(frozen=True, eq=False)
class ClientSets:
    """A set of examples for each client.

    Args:
        make: Makes the set of a client.
        sizes: How many examples each client has.
        labels: The labels of each client.
        num_targets: How many targets each client has; None: not known.
        samples: Sets that all others are like.
    """

    make: MakeData
    sizes: Sequence[int]
    labels: Sequence[tuple[int, ...]]
    num_targets: Sequence[int | None]
    samples: Sequence[ClientData] = field(default=())

    @classmethod
    def of_list(cls, sets: Sequence[ClientData]) -> ClientSets:
        """Sets that are all there."""
        return cls(
            sets.__getitem__,
            np.array([len(own) for own in sets], np.int64),  # type: ignore[arg-type]
            [own.label_set for own in sets],
            ComputedColumn(partial(_count_own_targets, sets.__getitem__), len(sets)),
            sets,
        )

    @classmethod
    def of_rows(cls, examples: ClientData, rows: RaggedColumn) -> ClientSets:
        """Some rows of one set for each client."""
        make = SelectRows(examples, rows)
        targets_each = count_targets(examples.select(np.zeros(1, np.int64))) if len(examples) else 1
        return cls(
            make,
            rows.sizes,  # type: ignore[arg-type]
            _find_labels(make),
            rows.sizes * targets_each,  # type: ignore[arg-type]
            (examples,),
        )

    @classmethod
    def of_function(
        cls,
        make: CallFunction | TransformEach,
        count: int,
        num_examples: Sequence[int] | None = None,
        labels: Sequence[tuple[int, ...]] | None = None,
    ) -> ClientSets:
        """What a function of the user makes for each client; sizes and labels, if they are known.

        Those that are not known are found by calling the function.
        """
        source = make.name
        return cls(
            make,
            ComputedColumn(partial(_count_own, make), count, source)
            if num_examples is None
            else num_examples,
            ComputedColumn(partial(_list_own_labels, make), count, source)
            if labels is None
            else labels,
            CodedColumn.repeat(None, count),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: int) -> ClientData:
        return self.make(client)

    @property
    def owners(self) -> ClientNumbers:
        """The clients that have examples, as far as sizes are known."""
        count = len(self.sizes)
        if isinstance(self.sizes, ComputedColumn):
            return ClientNumbers(range(count))
        found = np.flatnonzero(np.asarray(self.sizes) > 0)
        return ClientNumbers(range(count) if len(found) == count else found)

    def to_mapping(self, server: ClientData | None = None) -> LazyData:
        """The sets by client, and the server's."""
        return LazyData(self.make, self.owners, server, self.samples)

    def split(self, fraction: float, divide: Divide) -> tuple[ClientSets, ClientSets]:
        """Divides the examples of each client in two, the second with a fraction of them."""
        if isinstance(self.sizes, ComputedColumn):
            raise DataError(
                "a part of each client's examples is held back where their number is known, and "
                "these are made by a function; give num_examples, or let the function leave them "
                "out"
            )
        sizes, each = np.unique(np.asarray(self.sizes), return_inverse=True)
        counts = np.array([count_fraction(size, fraction) for size in sizes.tolist()], np.int64)
        second = counts[each]
        first = np.asarray(self.sizes) - second
        return self._part(divide, 0, first), self._part(divide, 1, second)

    def _part(self, divide: Divide, part: int, sizes: Integers) -> ClientSets:
        make = KeepPart(self.make, divide, part)
        return replace(
            self,
            make=make,
            sizes=sizes,  # type: ignore[arg-type]
            labels=ComputedColumn(
                partial(_list_own_labels, make),
                len(self),
                getattr(self.labels, "source", "") or getattr(self.make, "name", ""),
            ),
            num_targets=ComputedColumn(partial(_count_own_targets, make), len(self)),
        )

    def take(self, clients: Integers) -> ClientSets:
        """The sets of some clients, numbered anew."""
        return replace(
            self,
            make=Renumber(self.make, clients),
            sizes=select_rows(self.sizes, clients),
            labels=select_rows(self.labels, clients),
            num_targets=select_rows(self.num_targets, clients),
        )


@dataclass(frozen=True, eq=False)
class SelectRows:
    """Selects each client's rows of one set."""

    examples: ClientData
    rows: RaggedColumn

    def __call__(self, client: int) -> ClientData:
        """Makes the examples of a client."""
        return self.examples.select(self.rows[client].astype(np.int64, copy=False))


@dataclass(frozen=True, eq=False)
class CallFunction:
    """Calls a function of the user, and converts what it returns."""

    function: Callable[[int], Any]
    convert: Callable[[Any], ClientData]

    def __call__(self, client: int) -> ClientData:
        """Makes the examples of a client."""
        try:
            made = self.function(client)
        except Exception as problem:
            raise DataError(
                f"the data of client {client} could not be made: {describe_exception(problem)}"
            ) from problem
        examples = self.convert(made)
        if not len(examples):
            raise DataError(f"client {client} has no data; let the function return some")
        return examples

    @property
    def name(self) -> str:
        """The name of the function."""
        named = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{getattr(self.function, '__module__', '')}.{named}"


@dataclass(frozen=True, eq=False)
class TransformEach:
    """Puts the examples that a function makes through a pipeline."""

    make: CallFunction
    pipeline: Pipeline

    def __call__(self, client: int) -> ClientData:
        """Makes the examples of a client."""
        return transform_examples(self.make(client), self.pipeline)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.make.name


@dataclass(frozen=True, eq=False)
class Renumber:
    """The sets of some clients, whose numbers are counted anew."""

    make: MakeData
    clients: Integers

    def __call__(self, client: int) -> ClientData:
        """Makes the examples of a client."""
        return self.make(int(self.clients[client]))


@dataclass(frozen=True, eq=False)
class KeepPart:
    """The first or the second part of each client's examples."""

    make: MakeData
    divide: Divide
    part: int

    def __call__(self, client: int) -> ClientData:
        """Makes the examples of a client."""
        examples = self.make(client)
        return examples.select(self.divide(examples, client)[self.part])


Divide = Callable[[ClientData, int], tuple[Integers, Integers]]  # the rows of both parts


@dataclass(frozen=True)
class HoldLast:
    """Divides off the last ⌊fraction · n⌋ examples."""

    fraction: float

    def __call__(self, examples: ClientData, client: int) -> tuple[Integers, Integers]:
        """The rows of both parts."""
        rows = np.arange(len(examples))
        start = len(rows) - count_fraction(len(rows), self.fraction)
        return rows[:start], rows[start:]


@dataclass(frozen=True)
class HoldDrawn:
    """Divides off ⌊fraction · n⌋ examples that are drawn; of windows the last, as they overlap."""

    fraction: float
    seed: int

    def __call__(self, examples: ClientData, client: int) -> tuple[Integers, Integers]:
        """The rows of both parts."""
        if isinstance(examples, Windows):
            return HoldLast(self.fraction)(examples, client)
        return split_holdout_rows(len(examples), self.fraction, self.seed, client)


def split_last(examples: ClientData, fraction: float) -> tuple[ClientData, ClientData]:
    """Splits off the last ⌊fraction · n⌋ examples."""
    first, last = HoldLast(fraction)(examples, 0)
    return examples.select(first), examples.select(last)


def _find_labels(make: SelectRows) -> Sequence[tuple[int, ...]]:
    """The labels of each client: counted at once, where an example has one label."""
    count, labels = len(make.rows), make.examples.labels
    if labels is None:
        return CodedColumn.repeat((), count)
    if labels.ndim != 1:
        return ComputedColumn(partial(_list_own_labels, make), count)
    found = LabelColumn.count_in(make.rows, np.asarray(labels))
    if set(np.unique(np.asarray(labels)).tolist()) <= set(make.examples.label_set):
        return found
    return ComputedColumn(partial(_list_own_labels, make), count)  # some labels count for nothing


def _list_own_labels(make: MakeData, client: int) -> tuple[int, ...]:
    return make(client).label_set


def _count_own(make: MakeData, client: int) -> int:
    return len(make(client))


def _count_own_targets(make: MakeData, client: int) -> int:
    return count_targets(make(client))
