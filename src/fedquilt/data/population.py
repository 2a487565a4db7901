"""Clients with their data: who takes part, what each holds and can afford."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Real
from typing import Any

import numpy as np

from fedquilt.data.client_sets import (
    CallFunction,
    ClientSets,
    HoldDrawn,
    HoldLast,
    TransformEach,
    list_owners,
    list_samples,
)
from fedquilt.data.conversion import CollateFn, to_examples
from fedquilt.data.divide import Groups, divide_data, hold_out_clients
from fedquilt.data.examples import ClientData
from fedquilt.data.pipeline import (
    AnyTransform,
    Chain,
    Pipeline,
    make_pipeline,
)
from fedquilt.data.transformed import check_sizes, find_common_transforms, transform_examples
from fedquilt.errors import DataError
from fedquilt.federation.budgets import BudgetDistribution, assign_budgets
from fedquilt.federation.client import SERVER, Client
from fedquilt.federation.columns import ClientNumbers, CodedColumn
from fedquilt.federation.registry import ClientRegistry
from fedquilt.formatting import format_count
from fedquilt.ranges import Count, Number, check_value


@dataclass(frozen=True, repr=False, eq=False)
class Population:
    """All clients of a run, and the data that stays with each of them.

    Made by ``make_clients``.

    Args:
        clients: The clients, as the server knows them: a ``ClientRegistry``, or several clients.
        train: The training data of each client; a mapping may make them when they are asked for.
        test: The test data of each client; the server's own is that of client ``SERVER``.
        validation: What clients hold back from training to select a model; may be empty.
        remote_testers: The numbers of clients whose test data are on their own machines.
        remote_validators: The numbers of clients whose validation data are on their own machines.

    >>> import torch, fedquilt as fq
    >>> clients = fq.make_clients((torch.rand(12, 4), torch.arange(12) % 3), count=3)
    >>> [client.num_examples for client in clients.clients], len(clients.train[0])
    ([4, 4, 4], 4)
    """

    clients: Sequence[Client]
    train: Mapping[int, ClientData]
    test: Mapping[int, ClientData]
    validation: Mapping[int, ClientData] = field(default_factory=dict)
    remote_testers: frozenset[int] = frozenset()
    remote_validators: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        budgets = self.registry.budget_counts
        names = [f"{b.width:g}" if b.is_width_alone else str(b) for b in budgets]
        listed = ", ".join([*names[:5], "..."] if len(names) > 5 else names)
        who = f"{format_count(len(self), 'client')}, budgets {listed}"
        if (sizes := self.registry.known_sizes) is None:
            return f"{who}; examples made by a function"
        low, high = (int(end(sizes)) if len(sizes) else 0 for end in (np.min, np.max))
        examples = format_count(high, "example")
        return f"{who}; {examples} each" if low == high else f"{who}; {low} to {examples}"

    def __len__(self) -> int:
        return len(self.clients)

    @cached_property
    def registry(self) -> ClientRegistry:
        """The clients as columns."""
        return ClientRegistry.of(self.clients)

    @property
    def data(self) -> dict[str, Mapping[int, ClientData]]:
        """The data by split, as engines take it."""
        splits = {"train": self.train, "test": self.test}
        return {**splits, "validation": self.validation} if self.validation else splits

    def without_labels(self) -> Population:
        """The same clients for a task without classes: nobody knows their labels."""
        return replace(self, clients=self.registry.without_labels())

    def restrict_to(self, numbers: Sequence[int]) -> Population:
        """The same data with some of the clients only, as a report shows them."""
        return replace(self, clients=self.registry.select(numbers))

    @property
    def evaluation_transforms(self) -> Chain:
        """What all inputs go through in evaluation; empty if clients differ."""
        return find_common_transforms((*list_samples(self.train), *list_samples(self.test)))

    @property
    def has_server_test(self) -> bool:
        """Whether the server has test data."""
        return SERVER in self.test

    @property
    def testers(self) -> ClientNumbers:
        """Clients with test data of their own; whether one is among them is known at once."""
        return self._find_known(list_owners(self.test), self.remote_testers)

    @property
    def validators(self) -> ClientNumbers:
        """Clients with validation data; whether one is among them is known at once."""
        return self._find_known(list_owners(self.validation), self.remote_validators)

    def _find_known(self, owners: Sequence[int], remote: frozenset[int]) -> ClientNumbers:
        ids = self.registry.numbers
        if not remote and isinstance(owners, ClientNumbers) and owners.is_same_range(ids):
            return ids
        if not remote and not len(owners):
            return ClientNumbers(range(0))
        known = np.union1d(np.asarray(owners, np.int64), np.array(sorted(remote), np.int64))
        return ClientNumbers(known[np.isin(known, np.asarray(ids))])


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
    num_examples: int | Sequence[int] | None = None,
    labels: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Population:
    """Makes the clients of a run: divides data among them, and gives them budgets.

    Args:
        train: One set that is divided among the clients, a list with one set per client, or a
            function that makes the set of a client of its number, when it is asked for. A set
            is a ``torch.utils.data.Dataset`` of (input, target) or of dicts, or a pair of arrays,
            tuples or dicts of arrays.
        test: One set, which the server holds and which is divided like the training set, a list
            with one set per client, or a function of a client's number.
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
        num_examples: Where a function makes the data: how many training examples a client has, one
            number for all or an array. None: the function is called to find out.
        labels: Where a function makes the data: the classes that all clients have, or a list of
            those of each. None: the function is called to find out.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> clients
    4 clients, budgets 1, 0.5; 3 examples each
    >>> [client.budget.width for client in clients.clients]
    [1.0, 1.0, 0.5, 0.5]

    A million clients, each of whose data are made when it trains:

    >>> def load(client):
    ...     rows = torch.arange(20 * client, 20 * client + 20)
    ...     return rows[:, None] / 2e7, rows % 3
    >>> fq.make_clients(load, count=1_000_000, num_examples=20, labels=(0, 1, 2))
    1000000 clients, budgets 1; 20 examples each
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
    pipeline = None
    if transforms is not None or test_transforms is not None or transform_targets:
        pipeline = make_pipeline(
            transforms or (), test_transforms, transform_targets=transform_targets
        )
    if not _is_function(train) and (num_examples is not None or labels is not None):
        raise DataError(
            "num_examples and labels are for data that a function makes, and these are there to be "
            "counted; leave them out"
        )
    if _is_per_client(train) or _is_function(train):
        if holdout_clients:
            raise DataError(
                "holdout_clients are drawn where one set is divided, got one set per client; leave "
                "some out, and give their data as test"
            )
        own = _make_sets(train, count, convert, pipeline, num_examples, labels)
        tests, server_test = _take_tests(test, len(own), convert, pipeline)
        names = CodedColumn.repeat("", len(own))
    else:
        train, shared = (_transform(data, pipeline, convert) for data in (train, test))
        check_sizes(train)
        divided = divide_data(train, shared, partition, count, min_examples, seed, groups)
        divided, server_test = hold_out_clients(divided, holdout_clients, seed)
        own, tests = divided.train_sets, divided.test_sets
        names = divided.name_groups(groups[0], group_names)
    if test_fraction:
        if tests is not None and len(tests.owners):
            raise DataError(
                "test_fraction is for clients without test data, and these have some; leave it out"
            )
        own, tests = own.split(test_fraction, HoldDrawn(test_fraction, seed))
    return _make_population(own, tests, server_test, budgets, validation, names)


def _transform(
    data: Any, pipeline: Pipeline | None, convert: Callable[[Any], ClientData]
) -> ClientData | None:
    """Converts a set, if there is one, and puts it through a pipeline, if there is one."""
    if data is None:
        return None
    return convert(data) if pipeline is None else transform_examples(convert(data), pipeline)


def _make_sets(
    data: Any,
    count: int | None,
    convert: Callable[[Any], ClientData],
    pipeline: Pipeline | None,
    num_examples: int | Sequence[int] | None = None,
    labels: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> ClientSets:
    """The sets of clients: of a list, or as a function makes them."""
    if not _is_function(data):
        make = partial(_transform, pipeline=pipeline, convert=convert)
        return ClientSets.of_list([_make_examples(i, own, make) for i, own in enumerate(data)])
    if count is None or count < 1:
        raise DataError(
            f"a function makes the data of as many clients as there are, got count={count}; give "
            "their number, such as count=1000"
        )
    function = CallFunction(data, convert)
    return ClientSets.of_function(
        function if pipeline is None else TransformEach(function, pipeline),
        count,
        _read_sizes(num_examples, count),
        _read_labels(labels, count),
    )


def _read_sizes(num_examples: int | Sequence[int] | None, count: int) -> Any:
    """The sizes as an array; None: not known."""
    if num_examples is None:
        return None
    sizes = np.asarray(num_examples)
    if sizes.dtype.kind not in "iu" or sizes.shape not in ((), (count,)) or sizes.min() < 1:
        raise DataError(
            f"num_examples is a whole number from 1 on, or an array of {count} of them, got "
            f"{num_examples!r}"
        )
    return np.broadcast_to(sizes.astype(np.int64, copy=False), (count,))


def _read_labels(labels: Any, count: int) -> Any:
    """The label sets of all clients; None: not known."""
    if labels is None:
        return None
    try:
        first = labels[:1]
    except TypeError:
        raise DataError(
            f"labels is a list of classes, such as labels=range(10), got {labels!r}"
        ) from None
    if all(isinstance(label, int | np.integer) for label in first):
        return CodedColumn.repeat(tuple(sorted(map(int, labels))), count)
    if len(labels) != count:
        raise DataError(
            f"labels are the classes that all clients have, or a list of those of each, got "
            f"{len(labels)} for {count} clients"
        )
    return CodedColumn.of(tuple(sorted(map(int, own))) for own in labels)


def _take_tests(
    test: Any, count: int, convert: Callable[[Any], ClientData], pipeline: Pipeline | None
) -> tuple[ClientSets | None, ClientData | None]:
    """The test sets of clients, and the server's: where training sets come per client."""
    if not (_is_per_client(test) or _is_function(test)):
        return None, _transform(test, pipeline, convert)
    if _is_function(test):
        return _make_sets(test, count, convert, pipeline), None
    tests = ClientSets.of_list([_transform(own, pipeline, convert) for own in test])  # type: ignore[misc]
    if len(tests) and len(tests) != count:
        raise DataError(f"there are {count} clients but {len(tests)} test sets; give one each")
    return (tests, None) if len(tests) else (None, convert(test))


def _make_examples(
    number: int, data: Any, convert: Callable[[Any], ClientData | None]
) -> ClientData:
    rows = data[0] if isinstance(data, tuple) and data else data
    if hasattr(rows, "__len__") and len(rows) == 0:
        raise DataError(f"client {number} has no data; give it some, or leave the client out")
    examples = convert(data)
    assert examples is not None
    return examples


def _is_function(data: Any) -> bool:
    return isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__"))


def _is_per_client(data: Any) -> bool:
    if not isinstance(data, (list, tuple)):
        return False
    is_pair = len(data) == 2 and hasattr(data[1], "dtype")
    is_dicts = isinstance(data, tuple) and len(data) == 2 and all(map(_is_mapping, data))
    return not (is_pair or is_dicts)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _make_population(
    train: ClientSets,
    tests: ClientSets | None,
    server_test: ClientData | None,
    budgets: BudgetDistribution,
    validation: float,
    groups: CodedColumn[str],
) -> Population:
    """Makes the clients, splits off validation data, and adds the server's test data."""
    held_back: Mapping[int, ClientData] = {}
    if validation:
        train, held = train.split(validation, HoldLast(validation))
        held_back = held.to_mapping() if len(held.owners) else {}
    count = len(train)
    registry = ClientRegistry(
        range(count),
        train.sizes,
        train.labels,
        assign_budgets(budgets, count),
        groups,
        CodedColumn.repeat(0, count) if tests is None else tests.num_targets,
    )
    test: Mapping[int, ClientData] = {} if server_test is None else {SERVER: server_test}
    if tests is not None:
        test = tests.to_mapping(server_test)
    return Population(registry, train.to_mapping(), test, held_back)
