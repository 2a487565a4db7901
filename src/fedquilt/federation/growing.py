"""What the clients of a round did, in arrays that grow while the round runs.

A value that many clients have is there once, numbers are in arrays. So ten thousand clients of a
round are a few megabytes, where objects would be a hundred.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, ItemsView, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from fedquilt.federation.columns import Column

H = TypeVar("H", bound=Hashable)
V = TypeVar("V", bound=float | None)


class GrowingColumn(Column[H]):
    """A column that values are added to; each that differs is there once.

    >>> column = GrowingColumn()
    >>> for value in ("a", "b", "a"):
    ...     column.append(value)
    >>> list(column), column.values, column.counts
    (['a', 'b', 'a'], ['a', 'b'], {'a': 2, 'b': 1})
    """

    def __init__(self) -> None:
        self.values: list[H] = []  # in the order in which they first appear
        self.codes = array("q")  # for each row the number of its value
        self._numbers: dict[H, int] = {}

    def append(self, value: H) -> None:
        """Adds a row."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        self.codes.append(number)

    def __len__(self) -> int:
        return len(self.codes)

    def _get(self, row: int) -> H:
        return self.values[self.codes[row]]

    @property
    def counts(self) -> dict[H, int]:
        """How many rows have each value."""
        found = np.bincount(np.array(self.codes), minlength=len(self.values)).tolist()
        return dict(zip(self.values, found, strict=True))


class MetricsColumn(Column[dict[str, float] | None]):
    """A column of numbers by name, or of nothing, that is added to.

    >>> column = MetricsColumn()
    >>> for metrics in ({"loss": 0.5, "examples": 6.0}, None, {"loss": 0.25, "examples": 4.0}):
    ...     column.append(metrics)
    >>> column[2], column[1]
    ({'loss': 0.25, 'examples': 4.0}, None)
    """

    def __init__(self) -> None:
        self.names: GrowingColumn[tuple[str, ...] | None] = GrowingColumn()
        self._starts, self._numbers = array("q"), array("d")

    def append(self, metrics: Mapping[str, float] | None) -> None:
        """Adds a row."""
        self.names.append(None if metrics is None else tuple(metrics))
        self._starts.append(len(self._numbers))
        self._numbers.extend(() if metrics is None else metrics.values())

    def __len__(self) -> int:
        return len(self._starts)

    def _get(self, row: int) -> dict[str, float] | None:
        names, start = self.names[row], self._starts[row]
        if names is None:
            return None
        return dict(zip(names, self._numbers[start : start + len(names)], strict=True))

    def get(self, row: int, name: str) -> float:
        """One of the numbers of a row."""
        names = self.names[row]
        assert names is not None
        return self._numbers[self._starts[row] + names.index(name)]


class ClientValues(Mapping[int, V], Generic[V]):
    """A number for each of some clients, in two arrays; None where a client's is not known.

    Args:
        values: The numbers by client.
        kind: Of the array: ``d`` for numbers with a point, ``q`` for integers.

    >>> values = ClientValues({3: 0.5, 8: None})
    >>> values.add(9, 0.25)
    >>> dict(values)
    {3: 0.5, 8: None, 9: 0.25}
    """

    def __init__(
        self, values: Mapping[int, V] | None = None, *, kind: Literal["d", "q"] = "d"
    ) -> None:
        self._clients, self._numbers = array("q"), array(kind)
        self._rows: dict[int, int] = {}  # of clients, once one is asked for
        for client, value in (values or {}).items():
            self.add(client, value)

    def add(self, client: int, value: V) -> None:
        """Adds the number of a client that has none yet."""
        self._clients.append(client)
        self._numbers.append(math.nan if value is None else value)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __getitem__(self, client: int) -> V:
        if len(self._rows) < len(self):
            self._rows = {number: row for row, number in enumerate(self._clients)}
        value: V = _decode_value(self._numbers[self._rows[client]])
        return value

    def items(self) -> ItemsView[int, V]:
        """Clients and their numbers."""
        return _ClientItems(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"


class _ClientItems(ItemsView[int, V]):
    """Goes through two arrays, where a mapping would look each client up."""

    _mapping: ClientValues[V]

    def __iter__(self) -> Iterator[tuple[int, V]]:
        return zip(self._mapping._clients, map(_decode_value, self._mapping._numbers), strict=True)


def _decode_value(number: Any) -> Any:
    return None if number != number else number
