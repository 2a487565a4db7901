"""Clients with their data: who takes part, what each holds and can afford."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from fedquilt.data.conversion import CollateFn, to_examples
from fedquilt.data.examples import ClientData, ConcatExamples, count_targets
from fedquilt.data.partition import (
    Indices,
    Numbers,
    choose_natural_clients,
    count_fraction,
    draw_holdout_clients,
    from_flwr,
    parse_partition,
    split_holdout_rows,
)
from fedquilt.data.pipeline import (
    AnyTransform,
    Chain,
    Pipeline,
    make_pipeline,
)
from fedquilt.data.transformed import check_sizes, find_common_transforms, transform_examples
from fedquilt.data.windows import Windows
from fedquilt.errors import DataError
from fedquilt.federation.budgets import BudgetDistribution, assign_budgets
from fedquilt.federation.client import SERVER, Client
from fedquilt.formatting import format_count
from fedquilt.ranges import Count, Number, check_value

Groups = tuple[Sequence[int] | Numbers | None, Sequence[int] | Numbers | None]


@dataclass(frozen=True, repr=False, eq=False)
class Population:
    """All clients of a run, and the data that stays with each of them.

    Made by ``make_clients``.

    Args:
        clients: The clients, as the server knows them.
        train: The training data of each client.
        test: The test data of each client; the server's own is that of client ``SERVER``.
        validation: What clients hold back from training to select a model; may be empty.
        remote_testers: The numbers of clients whose test data are on their own machines.
        remote_validators: The numbers of clients whose validation data are on their own machines.

    >>> import torch, fedquilt as fq
    >>> clients = fq.make_clients((torch.rand(12, 4), torch.arange(12) % 3), count=3)
    >>> [client.num_examples for client in clients.clients], len(clients.train[0])
    ([4, 4, 4], 4)
    """

    clients: tuple[Client, ...]
    train: Mapping[int, ClientData]
    test: Mapping[int, ClientData]
    validation: Mapping[int, ClientData] = field(default_factory=dict)
    remote_testers: frozenset[int] = frozenset()
    remote_validators: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        budgets = dict.fromkeys(client.budget for client in self.clients)
        names = [f"{b.width:g}" if b.is_width_alone else str(b) for b in budgets]
        listed = ", ".join([*names[:5], "..."] if len(names) > 5 else names)
        sizes = [client.num_examples for client in self.clients] or [0]
        examples = format_count(max(sizes), "example")
        examples = f"{examples} each" if min(sizes) == max(sizes) else f"{min(sizes)} to {examples}"
        return f"{format_count(len(self), 'client')}, budgets {listed}; {examples}"

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def data(self) -> dict[str, Mapping[int, ClientData]]:
        """The data by split, as engines take it."""
        splits = {"train": self.train, "test": self.test}
        return {**splits, "validation": self.validation} if self.validation else splits

    def without_labels(self) -> Population:
        """The same clients for a task without classes: nobody knows their labels."""
        clients = tuple(replace(client, labels=()) for client in self.clients)
        return replace(self, clients=clients)

    @property
    def evaluation_transforms(self) -> Chain:
        """What all inputs go through in evaluation; empty if clients differ."""
        return find_common_transforms((*self.train.values(), *self.test.values()))

    @property
    def has_server_test(self) -> bool:
        """Whether the server has test data."""
        return SERVER in self.test

    @property
    def testers(self) -> tuple[int, ...]:
        """Clients with test data of their own."""
        return tuple(
            c.id
            for c in self.clients
            if c.id in self.remote_testers or len(self.test.get(c.id, ()))
        )

    @property
    def validators(self) -> tuple[int, ...]:
        """Clients with validation data."""
        known = self.remote_validators | self.validation.keys()
        return tuple(client.id for client in self.clients if client.id in known)


def make_clients(
    train: Any,
    *,
    test: Any = None,
    partition: Any = "iid",
    count: int | None = None,
    budgets: BudgetDistribution = (1.0,),
    seed: int = 0,
    validation: float = 0.0,
    test_fraction: float = 0.0,
    holdout_clients: float = 0.0,
    min_examples: int = 1,
    groups: Groups = (None, None),
    group_names: Sequence[str] = (),
    transforms: Iterable[AnyTransform] | None = None,
    test_transforms: Iterable[AnyTransform] | None = None,
    transform_targets: bool = False,
    collate_fn: CollateFn | None = None,
    target: str | None = None,
) -> Population:
    """Makes the clients of a run: divides data among them, and gives them budgets.

    Args:
        train: One set that is divided among the clients, or a list with one set per client. A set
            is a ``torch.utils.data.Dataset`` of (input, target) or of dicts, or a pair of arrays,
            tuples or dicts of arrays.
        test: One set, which the server holds and which is divided like the training set, or a list
            with one set per client.
        partition: How the set is divided: text (``iid``, ``classes:2``, ``dirichlet:0.5``,
            ``domain``, ``domain:blocks``, ``natural``) or a partitioner of flwr-datasets.
        count: The number of clients. Of natural clients as many are drawn; None: all.
        budgets: What clients can afford, see ``fedquilt.federation.budgets``.
        seed: The seed of everything that is drawn.
        validation: The fraction of each client's training examples, the last in their order, that
            it holds back from training.
        test_fraction: The fraction of each client's examples that it is tested on, if it has no
            test data. They are drawn, since files may be sorted by class; of ``Windows`` they are
            the last, since those in between overlap.
        holdout_clients: The fraction of all clients, drawn too, that never train. The server holds
            all of their data.
        min_examples: The training examples that a natural client needs in order to take part.
        groups: For the training and for the test examples the number of each one's natural client
            or domain; None for the latter: they are the server's only.
        group_names: The names of the natural clients or domains.
        transforms: What images go through when a batch is asked for, in this order. Each is a value
            of ``fedquilt.transforms``, its text such as ``"Resize(32)"``, or a function of one
            image. They replace those that the data have; None: these stay.
        test_transforms: The same for evaluation; None: those of ``transforms`` that are not random.
        transform_targets: Whether targets are images that move with the inputs.
        collate_fn: Makes a batch of a list of a dataset's items, as for a ``DataLoader``.
        target: The entry of an example that is a dict which is the target; None: the first of
            ``labels``, ``label``, ``targets``, ``target`` and ``y``.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> clients
    4 clients, budgets 1, 0.5; 3 examples each
    >>> [client.budget.width for client in clients.clients]
    [1.0, 1.0, 0.5, 0.5]
    """
    fractions = {
        "validation": validation,
        "test_fraction": test_fraction,
        "holdout_clients": holdout_clients,
    }
    for name, fraction in fractions.items():
        if not (isinstance(fraction, Real) and 0 <= fraction < 1):
            raise DataError(
                f"{name} must be a fraction in [0, 1), got {fraction!r}; write 0.1 for a tenth"
            )
    check_value("count", count, int | None)
    check_value("min_examples", min_examples, Count)
    check_value("seed", seed, Number)
    convert = partial(to_examples, collate_fn=collate_fn, target=target)
    if transforms is not None or test_transforms is not None or transform_targets:
        pipeline = make_pipeline(
            transforms or (), test_transforms, transform_targets=transform_targets
        )
        train, test = (_transform(data, pipeline, convert) for data in (train, test))
    if _is_per_client(train):
        if holdout_clients:
            raise DataError(
                "holdout_clients are drawn where one set is divided, got one set per client; leave "
                "some out, and give their data as test"
            )
        own, tests, server_test = _take_per_client(train, test, convert)
        names = [""] * len(own)
    else:
        train, shared = convert(train), None if test is None else convert(test)
        check_sizes(train)
        divided = _divide(train, shared, partition, count, min_examples, seed, groups)
        trainers, server_test = _hold_out_clients(divided, holdout_clients, seed)
        own, tests = divided.select(trainers)
        names = [_find_group(divided.train_rows[i], groups[0], group_names) for i in trainers]
    own, tests = _hold_out_tests(own, tests, test_fraction, seed)
    return _make_population(own, tests, server_test, budgets, validation, names)


def _transform(data: Any, pipeline: Pipeline, convert: Callable[[Any], ClientData]) -> Any:
    """Puts a set, or the set of each client, through a pipeline."""
    if _is_per_client(data):
        return [transform_examples(convert(own), pipeline) for own in data]
    return None if data is None else transform_examples(convert(data), pipeline)


def _take_per_client(
    train: Sequence[Any], test: Any, convert: Callable[[Any], ClientData]
) -> tuple[Sequence[ClientData], Sequence[ClientData], ClientData | None]:
    """Converts data that come per client: training sets, test sets, and the server's test set."""
    own = [_make_examples(number, data, convert) for number, data in enumerate(train)]
    if not _is_per_client(test):
        return own, [], None if test is None else convert(test)
    tests = [convert(data) for data in test]
    if tests and len(tests) != len(own):
        raise DataError(f"there are {len(own)} clients but {len(tests)} test sets; give one each")
    return own, tests, None if tests else convert(test)


@dataclass(frozen=True, eq=False)
class _DividedData:
    """A training set and its rows for each client, and the same for a test set, if there is one."""

    train: ClientData
    test: ClientData | None
    train_rows: list[Indices]
    test_rows: list[Indices]

    def select(self, clients: Sequence[int]) -> tuple[list[ClientData], list[ClientData]]:
        """Selects the training and the test examples of some clients."""
        train = [self.train.select(self.train_rows[i]) for i in clients]
        if self.test is None:
            return train, []
        return train, [self.test.select(self.test_rows[i]) for i in clients]


def _divide(
    train: ClientData,
    shared: ClientData | None,
    partition: Any,
    count: int | None,
    min_examples: int,
    seed: int,
    groups: Groups,
) -> _DividedData:
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
    test_rows = test_rows or [np.zeros(0, np.int64)] * len(train_rows)
    if not is_natural or (count is None and min_examples <= 1):
        return _DividedData(train, shared, train_rows, test_rows)
    sizes = [len(rows) for rows in train_rows]
    chosen = choose_natural_clients(sizes, count, min_examples, seed)
    chosen_tests = [test_rows[i] for i in chosen]
    if shared is not None and any(map(len, test_rows)):
        # the server tests on the examples of clients that take part
        rows = np.sort(np.concatenate(chosen_tests))
        chosen_tests = [np.searchsorted(rows, own) for own in chosen_tests]
        shared = shared.select(rows) if len(rows) else None
    return _DividedData(train, shared, [train_rows[i] for i in chosen], chosen_tests)


def _hold_out_clients(
    divided: _DividedData, fraction: float, seed: int
) -> tuple[list[int], ClientData | None]:
    """Draws clients that never train; returns the others, and what the server tests on."""
    if not fraction:
        return list(range(len(divided.train_rows))), divided.test
    if divided.test is not None and not any(map(len, divided.test_rows)):
        raise DataError(
            "these data have a test set that is no client's, on which the model is measured, so "
            "no clients need to be held out; leave out holdout_clients"
        )
    holdout = draw_holdout_clients(len(divided.train_rows), fraction, seed)
    held_out = divided.train.select(np.concatenate([divided.train_rows[i] for i in holdout]))
    rows = np.concatenate([divided.test_rows[i] for i in holdout])
    if divided.test is not None and len(rows):
        held_out = ConcatExamples((held_out, divided.test.select(rows)))
    return [i for i in range(len(divided.train_rows)) if i not in set(holdout)], held_out


def _hold_out_tests(
    train: Sequence[ClientData], tests: Sequence[ClientData], fraction: float, seed: int
) -> tuple[Sequence[ClientData], Sequence[ClientData]]:
    """Divides each client's examples into training and test data, if ``fraction`` asks for it."""
    if not fraction:
        return train, tests
    if any(map(len, tests)):
        raise DataError(
            "test_fraction is for clients without test data, and these have some; leave it out"
        )
    rest, held = [], []
    for client, examples in enumerate(train):
        if isinstance(examples, Windows):
            first, last = split_last(examples, fraction)
        else:
            rows = split_holdout_rows(len(examples), fraction, seed, client)
            first, last = (examples.select(part) for part in rows)
        rest.append(first)
        held.append(last)
    return rest, held


def _find_group(rows: Indices, groups: Sequence[int] | Numbers | None, names: Sequence[str]) -> str:
    """Finds the name of the group that all examples of a client come from; empty if they differ."""
    numbers = set() if groups is None else set(np.asarray(groups)[rows].tolist())
    if len(numbers) != 1:
        return ""
    (number,) = numbers
    return names[number] if number < len(names) else str(number)


def _make_examples(number: int, data: Any, convert: Callable[[Any], ClientData]) -> ClientData:
    rows = data[0] if isinstance(data, tuple) and data else data
    if hasattr(rows, "__len__") and len(rows) == 0:
        raise DataError(f"client {number} has no data; give it some, or leave the client out")
    return convert(data)


def _is_per_client(data: Any) -> bool:
    if not isinstance(data, (list, tuple)):
        return False
    is_pair = len(data) == 2 and hasattr(data[1], "dtype")
    is_dicts = isinstance(data, tuple) and len(data) == 2 and all(map(_is_mapping, data))
    return not (is_pair or is_dicts)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _split_rows(
    train: ClientData,
    test: ClientData | None,
    partition: Any,
    count: int | None,
    seed: int,
    groups: Groups,
) -> tuple[list[Indices], list[Indices]]:
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
        return from_flwr(partition, labels), []
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


def _make_population(
    train: Sequence[ClientData],
    tests: Sequence[ClientData],
    server_test: ClientData | None,
    budgets: BudgetDistribution,
    validation: float,
    groups: Sequence[str],
) -> Population:
    """Makes the clients, splits off validation data, and adds the server's test data."""
    dealt = assign_budgets(budgets, len(train))
    held_back: dict[int, ClientData] = {}
    if validation:
        pairs = [split_last(examples, validation) for examples in train]
        train = [first for first, _ in pairs]
        held_back = {i: last for i, (_, last) in enumerate(pairs) if len(last)}
    test = {i: examples for i, examples in enumerate(tests) if len(examples)}
    targets = [count_targets(test[i]) if i in test else 0 for i in range(len(train))]
    clients = tuple(
        Client(i, len(examples), examples.label_set, budget, group, targets[i])
        for i, (examples, budget, group) in enumerate(zip(train, dealt, groups, strict=True))
    )
    if server_test is not None:
        test[SERVER] = server_test
    return Population(clients, dict(enumerate(train)), test, held_back)


def split_last(examples: ClientData, fraction: float) -> tuple[ClientData, ClientData]:
    """Splits off the last ⌊fraction · n⌋ examples."""
    rows = np.arange(len(examples))
    start = len(rows) - count_fraction(len(rows), fraction)
    return examples.select(rows[:start]), examples.select(rows[start:])
