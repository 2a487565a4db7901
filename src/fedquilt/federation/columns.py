"""Columns of a table of clients: a value for each of very many rows, in little memory.

A column is a sequence. Most are arrays. Where values are objects, each one that differs is there
once, and rows refer to it by its number. Where values cost something to find, such as the labels
of a client, they are found when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

BLOCK = 50_000  # rows that are looked at in one go
Integers = npt.NDArray[np.int64]
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)
Other = TypeVar("Other", bound=Hashable)


class Column(Sequence[T], Generic[T]):
    """A sequence whose slices are tuples; subclasses say what stands in a row."""

    def _get(self, row: int) -> T:
        raise NotImplementedError

    @overload
    def __getitem__(self, row: int) -> T: ...

    @overload
    def __getitem__(self, row: slice) -> tuple[T, ...]: ...

    def __getitem__(self, row: int | slice) -> T | tuple[T, ...]:
        if isinstance(row, slice):
            return tuple(self._get(i) for i in range(*row.indices(len(self))))
        number = int(row) + (len(self) if row < 0 else 0)
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} rows, counted from 0, asked was {row}")
        return self._get(number)

    def __iter__(self) -> Iterator[T]:
        return map(self._get, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # a sequence that is compared by its values

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"


class CodedColumn(Column[H]):
    """A column with few distinct values: each is there once, and rows refer to it.

    Args:
        values: The distinct values.
        codes: For each row the number of its value.

    >>> column = CodedColumn.of(["a", "b", "a"])
    >>> column[2], column.counts
    ('a', {'a': 2, 'b': 1})
    """

    def __init__(self, values: Sequence[H], codes: Integers) -> None:
        self.values, self.codes = tuple(values), codes

    @classmethod
    def of(cls, values: Iterable[H]) -> CodedColumn[H]:
        """The column of some values, in the order in which they first appear."""
        numbers: dict[H, int] = {}
        codes = np.fromiter((numbers.setdefault(v, len(numbers)) for v in values), np.int64)
        return cls(tuple(numbers), codes)

    @classmethod
    def repeat(cls, value: H, count: int) -> CodedColumn[H]:
        """The column with one value in every row."""
        return BlockColumn((value,), np.zeros(1, np.int64), np.array([0, count]))

    @classmethod
    def blocks(cls, pairs: Iterable[tuple[H, int]]) -> CodedColumn[H]:
        """The column of values that are repeated, each as often as it says."""
        values, counts = zip(*pairs, strict=True)
        whole = cls.of(values)
        return BlockColumn(whole.values, whole.codes, np.cumsum([0, *counts]))

    def __len__(self) -> int:
        return len(self.codes)

    def _get(self, row: int) -> H:
        return self.values[int(self.codes[row])]

    @property
    def counts(self) -> dict[H, int]:
        """How many rows have each value, for those that any has; in the order of ``values``."""
        found = np.bincount(self.codes, minlength=len(self.values)).tolist()
        return {value: count for value, count in zip(self.values, found, strict=True) if count}

    @property
    def first_rows(self) -> list[int]:
        """The first row of each value that there is, in order."""
        _, rows = np.unique(self.codes, return_index=True)
        return sorted(rows.tolist())

    def map(self, function: Callable[[H], Other]) -> CodedColumn[Other]:
        """The column with other values, which depend on the present ones only."""
        mapped = self._map_values(function)
        return CodedColumn(mapped.values, mapped.codes[self.codes])

    def _map_values(self, function: Callable[[H], Other]) -> CodedColumn[Other]:
        """What values become; in place of one that no row has stands another."""
        known = {value: function(value) for value in self.counts}
        filler = next(iter(known.values()), None)
        return CodedColumn.of([known.get(v, filler) for v in self.values])  # type: ignore[misc]

    def find(self, wanted: Callable[[H], bool]) -> Integers:
        """The rows whose value is wanted."""
        used = self.counts
        flags = np.array([v in used and wanted(v) for v in self.values], dtype=bool)
        return np.flatnonzero(flags[self.codes])

    def select(self, rows: Integers) -> CodedColumn[H]:
        """Some of the rows."""
        return CodedColumn(self.values, self.codes[rows])


class BlockColumn(CodedColumn[H]):
    """A coded column whose rows come in blocks of one value: nothing is kept for each row.

    Args:
        values: The distinct values.
        block_codes: For each block the number of its value.
        starts: Where each block starts, and where the last one ends.

    >>> column = CodedColumn.blocks([("a", 2), ("b", 3)])
    >>> list(column), column.counts
    (['a', 'a', 'b', 'b', 'b'], {'a': 2, 'b': 3})
    """

    def __init__(self, values: Sequence[H], block_codes: Integers, starts: Integers) -> None:
        self.values, self.block_codes, self.starts = tuple(values), block_codes, starts

    @cached_property
    def codes(self) -> Integers:  # type: ignore[override]
        """For each row the number of its value."""
        return np.repeat(self.block_codes, np.diff(self.starts))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _get(self, row: int) -> H:
        block = int(self.starts.searchsorted(row, side="right")) - 1
        return self.values[int(self.block_codes[block])]

    @property
    def counts(self) -> dict[H, int]:
        """How many rows have each value, for those that any has; in the order of ``values``."""
        sizes = np.diff(self.starts)
        found = np.bincount(self.block_codes, weights=sizes, minlength=len(self.values))
        pairs = zip(self.values, found.astype(np.int64).tolist(), strict=True)
        return {value: count for value, count in pairs if count}

    @property
    def first_rows(self) -> list[int]:
        """The first row of each value that there is, in order."""
        filled = np.flatnonzero(np.diff(self.starts) > 0)
        _, blocks = np.unique(self.block_codes[filled], return_index=True)
        return sorted(self.starts[filled[blocks]].tolist())

    def map(self, function: Callable[[H], Other]) -> CodedColumn[Other]:
        """The column with other values, which depend on the present ones only."""
        mapped = self._map_values(function)
        return BlockColumn(
            mapped.values,
            mapped.codes[self.block_codes],
            self.starts,
        )


class RaggedColumn(Column[Integers]):
    """A column of arrays: the integers of all rows in one array, and where each row starts.

    Args:
        flat: The integers of all rows, one row after another.
        starts: Where each row starts, and where the last one ends.

    >>> column = RaggedColumn(np.array([3, 5, 4]), np.array([0, 2, 2, 3]))
    >>> [row.tolist() for row in column], column.sizes.tolist()
    ([[3, 5], [], [4]], [2, 0, 1])
    """

    def __init__(self, flat: Integers, starts: Integers) -> None:
        self.flat, self.starts = flat, starts

    @classmethod
    def of(cls, rows: Iterable[Integers]) -> RaggedColumn:
        """The column of some arrays."""
        listed = list(rows)
        starts = np.cumsum([0, *map(len, listed)], dtype=np.int64)
        flat = np.concatenate(listed) if listed else np.zeros(0, np.int64)
        return cls(flat.astype(np.int64, copy=False), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def _get(self, row: int) -> Integers:
        return self.flat[self.starts[row] : self.starts[row + 1]]

    @property
    def sizes(self) -> Integers:
        """How many integers each row has."""
        return np.diff(self.starts)

    def select(self, rows: Integers) -> RaggedColumn:
        """Some of the rows."""
        sizes = self.sizes[rows]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        shift = np.repeat(self.starts[rows] - starts[:-1], sizes)
        return RaggedColumn(self.flat[np.arange(starts[-1]) + shift], starts)


class LabelColumn(Column[tuple[int, ...]]):
    """A column of label sets.

    Args:
        rows: The labels of each row, in order.

    >>> LabelColumn(RaggedColumn(np.array([3, 5, 4]), np.array([0, 2, 2, 3])))[0]
    (3, 5)
    """

    def __init__(self, rows: RaggedColumn) -> None:
        self.rows = rows

    @classmethod
    def count_in(cls, rows: RaggedColumn, labels: Integers) -> LabelColumn:
        """The labels that occur in each row, where a row has the numbers of labelled examples."""
        low = int(labels.min(initial=0))
        span = int(labels.max(initial=0)) - low + 1
        parts, sizes = [], []
        for first in range(0, len(rows), BLOCK):  # not all at once, for the sake of memory
            last = min(first + BLOCK, len(rows))
            flat = rows.flat[rows.starts[first] : rows.starts[last]]
            owners = np.repeat(np.arange(last - first), np.diff(rows.starts[first : last + 1]))
            pairs = np.unique(owners * span + (labels[flat] - low))
            parts.append(pairs % span + low)
            sizes.append(np.bincount(pairs // span, minlength=last - first))
        none = np.zeros(0, np.int64)
        starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        return cls(RaggedColumn(np.concatenate([none, *parts]), starts))

    def __len__(self) -> int:
        return len(self.rows)

    def _get(self, row: int) -> tuple[int, ...]:
        return tuple(self.rows[row].tolist())

    def select(self, rows: Integers) -> LabelColumn:
        """Some of the rows."""
        return LabelColumn(self.rows.select(rows))


class ComputedColumn(Column[T]):
    """A column whose values are computed when they are asked for.

    Args:
        function: The value of a row.
        count: The number of rows.
        source: The name of a function of the user, which is not to be called for every row; empty:
            values are cheap.
    """

    def __init__(self, function: Callable[[int], T], count: int, source: str = "") -> None:
        self.function, self._count, self.source = function, count, source

    def __len__(self) -> int:
        return self._count

    def _get(self, row: int) -> T:
        return self.function(row)


class ClientNumbers(Column[int]):
    """Numbers of clients in rising order; whether one is among them is known at once.

    Args:
        numbers: The numbers, in rising order; a range, if none is missing.

    >>> numbers = ClientNumbers(np.array([2, 5, 9]))
    >>> 5 in numbers, 6 in numbers, list(numbers)
    (True, False, [2, 5, 9])
    """

    def __init__(self, numbers: range | Integers) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def is_same_range(self, other: ClientNumbers) -> bool:
        """Whether both are one range: then nothing needs to be compared."""
        numbers = (self.numbers, other.numbers)
        return all(isinstance(one, range) for one in numbers) and numbers[0] == numbers[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Integers:
        return np.asarray(self.numbers, dtype=dtype)

    def _get(self, row: int) -> int:
        return int(self.numbers[row])

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int | np.integer):
            return False
        if isinstance(self.numbers, range):
            return int(number) in self.numbers  # a range looks at all its numbers for other types
        row = int(np.searchsorted(self.numbers, number))
        return row < len(self.numbers) and bool(self.numbers[row] == number)


def select_rows(column: Sequence[T], rows: Integers) -> Sequence[T]:
    """Some rows of any column."""
    if isinstance(column, range):
        return column.start + column.step * rows  # type: ignore[return-value]
    if isinstance(column, np.ndarray):
        return column[rows]
    if isinstance(column, CodedColumn | RaggedColumn | LabelColumn):
        return column.select(rows)
    if isinstance(column, ComputedColumn):
        return ComputedColumn(partial(_get_selected, column, rows), len(rows), column.source)
    return [column[row] for row in rows.tolist()]


def _get_selected(column: Sequence[T], rows: Integers, row: int) -> T:
    return column[int(rows[row])]
