"""Clients with their data: who takes part, what each holds and can afford."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from fedquilt.data.examples import ClientData, Joined, as_examples, num_targets
from fedquilt.data.partition import (
    Indices,
    Numbers,
    draw_unseen,
    from_flwr,
    held_back,
    parse,
    part_of,
    taking_part,
)
from fedquilt.data.windows import Windows
from fedquilt.errors import DataError
from fedquilt.federation.client import SERVER, Client
from fedquilt.federation.mix import Mix, deal
from fedquilt.ranges import Count, Number, check_value

Groups = tuple[Sequence[int] | Numbers | None, Sequence[int] | Numbers | None]


@dataclass(frozen=True, eq=False)
class Population:
    """All clients of a run, and the data that stays with each of them.

    The server's own held-out data, if it has any, is the test data of client ``SERVER``.
    ``validation`` is what clients hold back from training to choose by; it may be empty. Clients
    that are ``away`` have test data too, but not here.
    """

    clients: tuple[Client, ...]
    train: Mapping[int, ClientData]
    test: Mapping[int, ClientData]
    validation: Mapping[int, ClientData] = field(default_factory=dict)
    away: frozenset[int] = frozenset()

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
        return tuple(
            c.id for c in self.clients if c.id in self.away or len(self.test.get(c.id, ()))
        )


def clients(
    train: Any,
    *,
    test: Any = None,
    partition: Any = "iid",
    count: int | None = None,
    budgets: Mix = (1.0,),
    seed: int = 0,
    validation: float = 0.0,
    test_share: float = 0.0,
    unseen: float = 0.0,
    least: int = 1,
    groups: Groups = (None, None),
    group_names: Sequence[str] = (),
) -> Population:
    """Clients for a run.

    ``train`` is one set that is divided by ``partition`` among ``count`` clients, or a list with
    one set per client. A set is a ``torch.utils.data.Dataset`` of (input, label), or a pair of
    arrays. ``test`` is one set, which the server holds and which is divided like the training set,
    or a list per client. ``partition`` is text (``iid``, ``classes:2``, ``dirichlet:0.5``,
    ``domain``, ``domain:blocks``, ``natural``) or a partitioner of flwr-datasets. ``budgets`` says
    what clients can afford, see ``fedquilt.federation.mix``. ``groups`` are ids or domains of the
    training and of the test examples, by number; None for the latter: they are the server's only.
    ``group_names`` are their names.

    Of natural clients those with ``least`` training examples take part, or ``count`` of them,
    drawn by the seed. ``unseen`` is the share of all clients, drawn too, that never train: their
    data, all of it, is what the server holds. ``test_share`` is the part of every client's examples
    that it is tested on, if it has no test data: drawn, since files may be sorted by class, but of
    ``Windows`` the last, as those in between overlap. ``validation`` is the share of the others,
    the last in their order, that it does not train on either.
    """
    for name, share in (("validation", validation), ("test_share", test_share), ("unseen", unseen)):
        if not (isinstance(share, Real) and 0 <= share < 1):
            raise DataError(f"{name} is a share in [0, 1), got {share!r}; write 0.1 for a tenth")
    check_value("count", count, int | None)
    check_value("least", least, Count)
    check_value("seed", seed, Number)
    if _is_per_client(train):
        own = [_examples(number, data) for number, data in enumerate(train)]
        tests = [as_examples(d) for d in test] if _is_per_client(test) else []
        if tests and len(tests) != len(own):
            raise DataError(
                f"there are {len(own)} clients but {len(tests)} test sets; give one each"
            )
        if unseen:
            raise DataError(
                "unseen clients are drawn where one set is divided, got one set per client; leave "
                "some out, and give their data as test"
            )
        shared = None if test is None or tests else as_examples(test)
        parted = _tested(own, tests, test_share, seed)
        return _population(*parted, shared, budgets, validation, [""] * len(own))
    world = _divided(as_examples(train), test, partition, count, least, seed, groups)
    seen, held_out = _without_unseen(world, unseen, seed)
    parted = _tested(
        [world.whole.select(world.parts[i]) for i in seen],
        [] if world.shared is None else [world.shared.select(world.tests[i]) for i in seen],
        test_share,
        seed,
    )
    names = [_group(world.parts[i], groups[0], group_names) for i in seen]
    return _population(*parted, held_out, budgets, validation, names)


@dataclass(frozen=True, eq=False)
class _World:
    """One set and its rows for each client; of the test set too, if there is one."""

    whole: ClientData
    shared: ClientData | None
    parts: list[Indices]
    tests: list[Indices]


def _divided(
    whole: ClientData,
    test: Any,
    partition: Any,
    count: int | None,
    least: int,
    seed: int,
    groups: Groups,
) -> _World:
    shared = None if test is None else as_examples(test)
    shared = shared if shared is not None and len(shared) else None
    is_natural = partition == "natural"
    if least > 1 and not is_natural:
        raise DataError(
            f"least is for natural clients, got {least} with partition '{partition}'; leave it "
            "out, or use 'natural'"
        )
    asked = None if is_natural else count
    parts, tests = _indices(whole, shared, partition, asked, seed, groups)
    tests = tests or [np.zeros(0, np.int64)] * len(parts)
    if not is_natural or (count is None and least <= 1):
        return _World(whole, shared, parts, tests)
    taken = taking_part([len(rows) for rows in parts], count, least, seed)
    tests_taken = [tests[i] for i in taken]
    if shared is not None and any(map(len, tests)):  # those of clients that take part
        rows = np.sort(np.concatenate(tests_taken))
        tests_taken = [np.searchsorted(rows, own) for own in tests_taken]
        shared = shared.select(rows) if len(rows) else None
    return _World(whole, shared, [parts[i] for i in taken], tests_taken)


def _without_unseen(world: _World, share: float, seed: int) -> tuple[list[int], ClientData | None]:
    """Clients that train, and what the server holds: the test set, or all of the others' data."""
    if not share:
        return list(range(len(world.parts))), world.shared
    if world.shared is not None and not any(map(len, world.tests)):
        raise DataError(
            "these data have a test set that is no client's, on which the model is measured, so "
            "nobody need be unseen; leave out unseen"
        )
    away = draw_unseen(len(world.parts), share, seed)
    held_out = world.whole.select(np.concatenate([world.parts[i] for i in away]))
    rows = np.concatenate([world.tests[i] for i in away])
    if world.shared is not None and len(rows):
        held_out = Joined((held_out, world.shared.select(rows)))
    return [i for i in range(len(world.parts)) if i not in set(away)], held_out


def _tested(
    train: Sequence[ClientData], tests: Sequence[ClientData], share: float, seed: int
) -> tuple[Sequence[ClientData], Sequence[ClientData]]:
    """What clients train on, and are tested on: a share of their examples, if there is one."""
    if not share:
        return train, tests
    if any(map(len, tests)):
        raise DataError(
            "test_share is for clients without test data, and these have some; leave it out"
        )
    rest, held = [], []
    for client, examples in enumerate(train):
        if isinstance(examples, Windows):
            first, last = _parted(examples, share)
        else:
            rows = held_back(len(examples), share, seed, client)
            first, last = (examples.select(some) for some in rows)
        rest.append(first)
        held.append(last)
    return rest, held


def _group(rows: Indices, groups: Sequence[int] | Numbers | None, names: Sequence[str]) -> str:
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
    groups: Groups,
) -> tuple[list[Indices], list[Indices]]:
    labels = np.asarray(whole.labels)
    test_groups = None if groups[1] is None else np.asarray(groups[1])
    if groups[0] is not None and (shared is None or groups[1] is None):
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
    test = {i: examples for i, examples in enumerate(tests) if len(examples)}
    targets = [num_targets(test[i]) if i in test else 0 for i in range(len(train))]
    found = tuple(
        Client(i, len(examples), examples.label_set, budget, group, targets[i])
        for i, (examples, budget, group) in enumerate(zip(train, dealt, groups, strict=True))
    )
    if shared is not None:
        test[SERVER] = shared
    return Population(found, dict(enumerate(train)), test, held_back)


def _parted(examples: ClientData, share: float) -> tuple[ClientData, ClientData]:
    """The examples without the last ⌊share · n⌋, and those."""
    rows = np.arange(len(examples))
    start = len(rows) - part_of(len(rows), share)
    return examples.select(rows[:start]), examples.select(rows[start:])
