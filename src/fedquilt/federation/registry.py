"""The registered clients, as columns: a client is made when it is asked for.

A million clients are a few arrays. What a run asks of all of them at once, such as their budgets,
is found once for each value that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedquilt.federation.client import Client
from fedquilt.federation.columns import (
    BlockColumn,
    ClientNumbers,
    CodedColumn,
    Column,
    ComputedColumn,
    Integers,
    LabelColumn,
    select_rows,
)
from fedquilt.structure.budget import Budget

MANY_CLIENTS = 100_000  # above this number nothing lists all clients one by one


@dataclass(frozen=True, eq=False, repr=False)
class ClientRegistry(Column[Client]):
    """What the server knows about all participants: a sequence of ``Client``, kept as columns.

    ``fq.make_clients`` makes one. It may also be made of clients, with ``ClientRegistry.of``.

    Args:
        ids: The clients' numbers, in rising order.
        num_examples: How many training examples each has.
        labels: The classes of each.
        budgets: What each can afford.
        groups: Where the data of each come from.
        num_tests: How many targets each is tested on; None: not known.

    >>> import fedquilt as fq
    >>> clients = fq.make_clients(print, count=1_000_000, num_examples=20, labels=(0, 1)).clients
    >>> len(clients), clients[999_999].num_examples
    (1000000, 20)
    """

    ids: Sequence[int]
    num_examples: Sequence[int]
    labels: Sequence[tuple[int, ...]]
    budgets: CodedColumn[Budget]
    groups: CodedColumn[str]
    num_tests: Sequence[int | None]

    @classmethod
    def of(cls, clients: Sequence[Client]) -> ClientRegistry:
        """The registry of some clients, which may be one already."""
        if isinstance(clients, ClientRegistry):
            return clients
        return cls(
            [client.id for client in clients],
            [client.num_examples for client in clients],
            [client.labels for client in clients],
            CodedColumn.of(client.budget for client in clients),
            CodedColumn.of(client.group for client in clients),
            [client.num_tests for client in clients],
        )

    @classmethod
    def of_numbers(cls, ids: Sequence[int]) -> ClientRegistry:
        """The registry of clients of which nothing but their numbers is known."""
        count = len(ids)
        nothing = CodedColumn.repeat("", count)
        whole = CodedColumn.repeat(Budget(), count)
        return cls(ids, (), (), whole, nothing, ()).without_data()

    def __len__(self) -> int:
        return len(self.ids)

    def _get(self, row: int) -> Client:
        tests = self.num_tests[row]
        return Client(
            int(self.ids[row]),
            int(self.num_examples[row]),
            self.labels[row],
            self.budgets[row],
            self.groups[row],
            None if tests is None else int(tests),
        )

    @cached_property
    def by_id(self) -> ClientsById:
        """The clients by their numbers."""
        return ClientsById(self)

    @cached_property
    def numbers(self) -> ClientNumbers:
        """The clients' numbers; whether one is among them is known at once."""
        return ClientNumbers(self.ids if isinstance(self.ids, range) else np.sort(self.ids))

    @cached_property
    def budget_counts(self) -> Mapping[Budget, int]:
        """How many clients have each budget."""
        return self.budgets.counts

    @cached_property
    def one_per_budget(self) -> tuple[Client, ...]:
        """The first client of each budget: what depends on budgets alone is found for these."""
        return tuple(self._get(row) for row in self.budgets.first_rows)

    def count_with(self, budgets: Iterable[Budget]) -> int:
        """How many clients have one of some budgets."""
        return sum(self.budget_counts.get(budget, 0) for budget in set(budgets))

    def find_with(self, wanted: Callable[[Budget], bool]) -> ClientNumbers:
        """The numbers of the clients whose budget is wanted."""
        rows = self.budgets.find(wanted)
        return ClientNumbers(np.asarray(select_rows(self.ids, rows)))

    @cached_property
    def total_examples(self) -> int:
        """The training examples of all clients."""
        return int(np.sum(np.fromiter(self.num_examples, np.int64)))

    @property
    def known_sizes(self) -> Integers | None:
        """How many examples each client has; None: a function of the user would have to say."""
        sizes = self.num_examples
        is_unknown = isinstance(sizes, ComputedColumn) and bool(sizes.source)
        return None if is_unknown else np.asarray(sizes)

    @cached_property
    def label_set(self) -> frozenset[int]:
        """All classes of all clients."""
        if isinstance(self.labels, LabelColumn):
            return frozenset(np.unique(self.labels.rows.flat).tolist())
        distinct = self.labels.counts if isinstance(self.labels, CodedColumn) else self.labels
        return frozenset().union(*distinct)

    @property
    def known_labels(self) -> frozenset[int]:
        """All classes of all clients, if that does not take long to find; else none."""
        is_slow = isinstance(self.labels, ComputedColumn) and not self.can_be_listed
        return frozenset() if is_slow else self.label_set

    @property
    def can_be_listed(self) -> bool:
        """Whether clients are so few, and so quickly made, that all may be looked at."""
        columns = (self.num_examples, self.labels)
        is_costly = any(isinstance(c, ComputedColumn) and c.source for c in columns)
        return len(self) <= MANY_CLIENTS and not is_costly

    def select(self, numbers: Sequence[int] | None) -> ClientRegistry:
        """The clients of some numbers; None: all."""
        if numbers is None or numbers is self.ids:
            return self
        known = self._selections.get(id(numbers))
        if known is None:
            rows = np.flatnonzero(np.isin(np.asarray(self.ids), np.asarray(numbers)))
            known = numbers, self.take(rows)
            self._selections.clear()
            self._selections[id(numbers)] = known  # a phase asks in every round
        return known[1]

    @cached_property
    def _selections(self) -> dict[int, tuple[Sequence[int], ClientRegistry]]:
        return {}

    def find_rows(self, numbers: Iterable[int]) -> Integers:
        """The rows of clients of these numbers, in order; numbers of nobody are passed over."""
        known = self.by_id
        return np.sort(np.array([known.row(n) for n in numbers if n in known], np.int64))

    def take(self, rows: Integers) -> ClientRegistry:
        """The clients in some rows."""
        return ClientRegistry(
            select_rows(self.ids, rows),
            select_rows(self.num_examples, rows),
            select_rows(self.labels, rows),
            self.budgets.select(rows),
            self.groups.select(rows),
            select_rows(self.num_tests, rows),
        )

    def map_budgets(self, function: Callable[[Budget], Budget]) -> ClientRegistry:
        """The same clients with other budgets, which depend on the present ones only."""
        return replace(self, budgets=self.budgets.map(function))

    def without_labels(self) -> ClientRegistry:
        """The same clients, of which nobody knows the labels."""
        return replace(self, labels=CodedColumn.repeat((), len(self)))

    def without_data(self) -> ClientRegistry:
        """The same clients as private runs know them: by their numbers and budgets alone."""
        count = len(self)
        return replace(
            self.without_labels(),
            num_examples=CodedColumn.repeat(1, count),
            groups=CodedColumn.repeat("", count),
            num_tests=CodedColumn.repeat(None, count),
        )

    def hash_columns(self) -> str:
        """The SHA-256 of numbers, examples, labels and budgets.

        A column that is computed counts by the name of its function.
        """
        digest = hashlib.sha256()
        for column in (self.ids, self.num_examples, self.labels, self.budgets):
            for part in _list_parts(column):
                digest.update(part)
        return digest.hexdigest()


def _list_parts(column: Sequence[object]) -> Iterator[bytes]:
    """What a column is made of, as bytes."""
    if isinstance(column, BlockColumn):
        yield repr((column.values, column.block_codes.tolist(), column.starts.tolist())).encode()
    elif isinstance(column, CodedColumn):
        yield repr(column.values).encode()
        yield from _pack_integers(column.codes)
    elif isinstance(column, LabelColumn):
        yield from _pack_integers(column.rows.flat)
        yield from _pack_integers(column.rows.sizes)
    elif isinstance(column, ComputedColumn):
        yield f"{len(column)} of {column.source}".encode()
    elif isinstance(column, np.ndarray) and column.strides == (0,):  # one number for all
        yield repr((len(column), column[:1].tolist())).encode()
    elif isinstance(column, np.ndarray):
        yield from _pack_integers(column)
    else:
        yield repr(column if isinstance(column, range) else list(column)).encode()


def _pack_integers(numbers: Integers) -> Iterator[bytes]:
    """Integers in the smallest type that holds them, which takes less time to hash."""
    ends = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    kind = np.result_type(*map(np.min_scalar_type, ends))
    yield f"{len(numbers)} {kind}".encode()
    yield numbers.astype(kind).tobytes()


class ClientsById(Mapping[int, Client]):
    """The clients of a registry by their numbers."""

    def __init__(self, registry: ClientRegistry) -> None:
        self._registry = registry
        ids = registry.ids
        self._rows = (
            None if isinstance(ids, range) else {int(id): row for row, id in enumerate(ids)}
        )

    def __len__(self) -> int:
        return len(self._registry)

    def __iter__(self) -> Iterator[int]:
        return map(int, self._registry.ids)

    def __contains__(self, number: object) -> bool:
        return number in (self._registry.ids if self._rows is None else self._rows)

    def __getitem__(self, number: int) -> Client:
        if number not in self:
            raise KeyError(number)
        return self._registry[self.row(number)]

    def row(self, number: int) -> int:
        """The row of a client that there is."""
        return self._registry.ids.index(number) if self._rows is None else self._rows[number]
