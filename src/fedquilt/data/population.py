"""Clients with their data: who takes part, what each holds and can afford."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedquilt.data.examples import ClientData, as_examples
from fedquilt.data.partition import from_flwr, parse, part_of
from fedquilt.errors import DataError
from fedquilt.federation.client import SERVER, Client
from fedquilt.federation.mix import Mix, deal


@dataclass(frozen=True, eq=False)
class Population:
    """All clients of a run, and the data that stays with each of them.

    The server's own held-out data, if it has any, is the test data of client ``SERVER``.
    ``validation`` is what clients hold back from training to choose by; it may be empty.
    """

    clients: tuple[Client, ...]
    train: Mapping[int, ClientData]
    test: Mapping[int, ClientData]
    validation: Mapping[int, ClientData] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Mapping[int, ClientData]]:
        """By split, as engines take it."""
        splits = {"train": self.train, "test": self.test}
        return {**splits, "validation": self.validation} if self.validation else splits

    @property
    def held_out(self) -> bool:
        """Whether the server has test data."""
        return SERVER in self.test

    @property
    def testers(self) -> tuple[int, ...]:
        """Clients with test data of their own."""
        return tuple(c.id for c in self.clients if len(self.test.get(c.id, ())))


def clients(
    train: Any,
    *,
    test: Any = None,
    partition: Any = "iid",
    count: int | None = None,
    budgets: Mix = (1.0,),
    seed: int = 0,
    validation: float = 0.0,
    groups: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    group_names: Sequence[str] = (),
) -> Population:
    """Clients for a run.

    ``train`` is one set that is divided by ``partition`` among ``count`` clients, or a list with
    one set per client. A set is a ``torch.utils.data.Dataset`` of (input, label), or a pair of
    arrays. ``test`` is one set, which the server holds and which is divided like the training set,
    or a list per client. ``partition`` is text (``iid``, ``classes:2``, ``dirichlet:0.5``,
    ``domain``, ``domain:blocks``, ``natural``) or a partitioner of flwr-datasets. ``budgets`` says
    what clients can afford, see ``fedquilt.federation.mix``. ``validation`` is the share of every
    client's examples, the last in their order, that it does not train on. ``groups`` are ids or
    domains of the training and of the test examples, by number; ``group_names`` their names.
    """
    if not 0 <= validation < 1:
        raise DataError(
            "validation is the share of a client's examples that is held back, in [0, 1), got "
            f"{validation}; write 0.1 for a tenth"
        )
    if _is_per_client(train):
        own = [_examples(number, data) for number, data in enumerate(train)]
        tests = [as_examples(d) for d in test] if _is_per_client(test) else []
        if tests and len(tests) != len(own):
            raise DataError(
                f"there are {len(own)} clients but {len(tests)} test sets; give one each"
            )
        shared = None if test is None or tests else as_examples(test)
        return _population(own, tests, shared, budgets, validation, [""] * len(own))
    whole = as_examples(train)
    shared = None if test is None else as_examples(test)
    parts, test_parts = _indices(whole, shared, partition, count, seed, groups)
    return _population(
        [whole.select(rows) for rows in parts],
        [shared.select(rows) for rows in test_parts] if shared is not None else [],
        shared,
        budgets,
        validation,
        [_group(rows, groups[0], group_names) for rows in parts],
    )


def _group(rows: npt.NDArray[np.int64], groups: Sequence[int] | None, names: Sequence[str]) -> str:
    """The group that all of a client's examples come from; empty if there is no such."""
    found = set() if groups is None else set(np.asarray(groups)[rows].tolist())
    if len(found) != 1:
        return ""
    (number,) = found
    return names[number] if number < len(names) else str(number)


def _examples(number: int, data: Any) -> ClientData:
    rows = data[0] if isinstance(data, tuple) and data else data
    if hasattr(rows, "__len__") and len(rows) == 0:
        raise DataError(f"client {number} has no data; give it some, or leave the client out")
    return as_examples(data)


def _is_per_client(data: Any) -> bool:
    if not isinstance(data, (list, tuple)):
        return False
    is_pair = len(data) == 2 and all(hasattr(d, "dtype") for d in data)
    return not is_pair


def _indices(
    whole: ClientData,
    shared: ClientData | None,
    partition: Any,
    count: int | None,
    seed: int,
    groups: tuple[Sequence[int] | None, Sequence[int] | None],
) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]]:
    labels = np.asarray(whole.labels)
    test_groups = None if groups[1] is None else np.asarray(groups[1])
    if shared is None and groups[0] is not None:
        test_groups = np.zeros(0, np.int64)
    if not isinstance(partition, str):
        return from_flwr(partition, labels), []
    return parse(partition).split(
        labels,
        None if groups[0] is None else np.asarray(groups[0]),
        np.zeros(0, np.int64) if shared is None else np.asarray(shared.labels),
        test_groups,
        count,
        seed,
    )


def _population(
    train: Sequence[ClientData],
    tests: Sequence[ClientData],
    shared: ClientData | None,
    budgets: Mix,
    validation: float,
    groups: Sequence[str],
) -> Population:
    dealt = deal(budgets, len(train))
    held_back: dict[int, ClientData] = {}
    if validation:
        parted = [_parted(examples, validation) for examples in train]
        train = [first for first, _ in parted]
        held_back = {i: last for i, (_, last) in enumerate(parted) if len(last)}
    found = tuple(
        Client(i, len(examples), examples.label_set, budget, group)
        for i, (examples, budget, group) in enumerate(zip(train, dealt, groups, strict=True))
    )
    test = {i: examples for i, examples in enumerate(tests) if len(examples)}
    if shared is not None:
        test[SERVER] = shared
    return Population(found, dict(enumerate(train)), test, held_back)


def _parted(examples: ClientData, share: float) -> tuple[ClientData, ClientData]:
    """The examples without the last ⌊share · n⌋, and those."""
    rows = np.arange(len(examples))
    start = len(rows) - part_of(len(rows), share)
    return examples.select(rows[:start]), examples.select(rows[start:])
