"""Divides one set among clients, and says which clients take part and which never train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedquilt.data.client_sets import ClientSets
from fedquilt.data.examples import ClientData, ConcatExamples
from fedquilt.data.partition import (
    Numbers,
    choose_natural_clients,
    draw_holdout_clients,
    from_flwr,
    parse_partition,
)
from fedquilt.errors import DataError
from fedquilt.federation.columns import CodedColumn, Integers, RaggedColumn

Groups = tuple[Sequence[int] | Numbers | None, Sequence[int] | Numbers | None]


@dataclass(frozen=True, eq=False)
class DividedData:
    """A training set and its rows for each client, and the same for a test set, if there is one."""

    train: ClientData
    test: ClientData | None
    train_rows: RaggedColumn
    test_rows: RaggedColumn

    def take(self, clients: Integers) -> DividedData:
        """The same sets with the rows of some clients."""
        return replace(
            self,
            train_rows=self.train_rows.select(clients),
            test_rows=self.test_rows.select(clients),
        )

    @property
    def train_sets(self) -> ClientSets:
        """The training examples of each client."""
        return ClientSets.of_rows(self.train, self.train_rows)

    @property
    def test_sets(self) -> ClientSets | None:
        """The test examples of each client; None: nobody has any."""
        return None if self.test is None else ClientSets.of_rows(self.test, self.test_rows)

    def name_groups(
        self, groups: Sequence[int] | Numbers | None, names: Sequence[str]
    ) -> CodedColumn[str]:
        """The group that all examples of a client come from; empty if they differ."""
        count, rows = len(self.train_rows), self.train_rows
        if groups is None:
            return CodedColumn.repeat("", count)
        numbers = np.asarray(groups)[rows.flat]
        low, high = (
            function.reduceat(numbers, rows.starts[:-1]) for function in (np.minimum, np.maximum)
        )
        known, codes = np.unique(np.where(low == high, low, -1), return_inverse=True)
        named = [
            "" if number < 0 else names[number] if number < len(names) else str(number)
            for number in known.tolist()
        ]
        return CodedColumn(("",), np.zeros(count, np.int64)) if not named else _code(named, codes)


def _code(names: Sequence[str], codes: Integers) -> CodedColumn[str]:
    """A column of names, some of which may be the same."""
    column = CodedColumn.of(names)
    return CodedColumn(column.values, column.codes[codes])


def divide_data(
    train: ClientData,
    shared: ClientData | None,
    partition: Any,
    count: int | None,
    min_examples: int,
    seed: int,
    groups: Groups,
) -> DividedData:
    """Divides the data among clients; of natural clients it keeps those that take part."""
    shared = shared if shared is not None and len(shared) else None
    is_natural = partition == "natural"
    if min_examples > 1 and not is_natural:
        raise DataError(
            f"min_examples is for natural clients, got {min_examples} with partition "
            f"'{partition}'; leave it out, or use 'natural'"
        )
    num_clients = None if is_natural else count
    train_rows, test_rows = _split_rows(train, shared, partition, num_clients, seed, groups)
    if test_rows is None:
        starts = np.zeros(len(train_rows) + 1, np.int64)
        test_rows = RaggedColumn(np.zeros(0, np.int64), starts)
    divided = DividedData(train, shared, train_rows, test_rows)
    if not is_natural or (count is None and min_examples <= 1):
        return divided
    chosen = choose_natural_clients(train_rows.sizes, count, min_examples, seed)
    divided = divided.take(np.array(chosen, np.int64))
    if shared is None or not len(test_rows.flat):
        return divided
    # the server tests on the examples of clients that take part
    rows = np.sort(divided.test_rows.flat)
    own = RaggedColumn(np.searchsorted(rows, divided.test_rows.flat), divided.test_rows.starts)
    return replace(divided, test=shared.select(rows) if len(rows) else None, test_rows=own)


def hold_out_clients(
    divided: DividedData, fraction: float, seed: int
) -> tuple[DividedData, ClientData | None]:
    """Draws clients that never train; returns the others, and what the server tests on."""
    if not fraction:
        return divided, divided.test
    if divided.test is not None and not len(divided.test_rows.flat):
        raise DataError(
            "these data have a test set that is no client's, on which the model is measured, so "
            "no clients need to be held out; leave out holdout_clients"
        )
    count = len(divided.train_rows)
    holdout = np.array(draw_holdout_clients(count, fraction, seed), np.int64)
    held = divided.take(holdout)
    held_out = divided.train.select(held.train_rows.flat)
    if divided.test is not None and len(held.test_rows.flat):
        held_out = ConcatExamples((held_out, divided.test.select(held.test_rows.flat)))
    return divided.take(np.setdiff1d(np.arange(count), holdout)), held_out


def _split_rows(
    train: ClientData,
    test: ClientData | None,
    partition: Any,
    count: int | None,
    seed: int,
    groups: Groups,
) -> tuple[RaggedColumn, RaggedColumn | None]:
    """Splits the rows of the training and of the test set among clients."""
    has_classes = train.labels is not None
    if not has_classes and str(partition).startswith(("classes", "dirichlet")):
        raise DataError(
            f"partition '{partition}' goes by class numbers, and these targets are none; use "
            "'iid', 'domain' or 'natural'"
        )
    labels = _get_labels(train)
    test_groups = None if groups[1] is None else np.asarray(groups[1])
    if groups[0] is not None and (test is None or groups[1] is None):
        test_groups = np.zeros(0, np.int64)
    if not isinstance(partition, str):
        return RaggedColumn.of(from_flwr(partition, labels)), None
    return parse_partition(partition).split(
        labels,
        None if groups[0] is None else np.asarray(groups[0]),
        np.zeros(0, np.int64) if test is None else _get_labels(test),
        test_groups,
        count,
        seed,
    )


def _get_labels(examples: ClientData) -> Numbers:
    """The class of every example; zeros where there are no classes."""
    labels = examples.labels
    return np.zeros(len(examples), np.int64) if labels is None else np.asarray(labels)
