"""A tiny federation that methods are tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.data.population import Population
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.client import SERVER, Client, Failure, Task, Update
from fedquilt.federation.state import Setup, State
from fedquilt.runs.accounting import count_subnet_bytes
from fedquilt.structure.budget import Budget

LABELS = ((0, 1, 2, 3), (0, 1), (1, 2), (3,))
WIDTHS = (1.0, 0.5, 0.25, 0.25)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.BatchNorm2d(4),
        )
        self.classifier = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.features(x)).mean((2, 3)))


def drawn(labels: tuple[int, ...], count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor([labels[i % len(labels)] for i in range(count)])
    x = torch.randn(count, 1, 5, 5, generator=generator) + y.view(-1, 1, 1, 1)
    return to_examples((x, y))


class World:
    """Clients with their data, and what becomes of a method there."""

    def __init__(self, setup: Setup, people: Population) -> None:
        self.setup, self.people = setup, people

    def engine(self, workers: int = 0) -> LocalEngine:
        setup = self.setup
        return LocalEngine(setup.model, setup.structure, self.people.data, workers=workers)

    def done(self, tasks: list[Task], engine: LocalEngine | None = None) -> list[Update]:
        if engine is None:
            with self.engine() as own:
                return self.done(tasks, own)
        found = list(engine.run(tasks))
        assert not [r for r in found if isinstance(r, Failure)], found
        return found

    def start(self, method: fq.Method) -> State:
        return replace(method.start(self.setup), phase="train")

    def round(self, method: fq.Method, state: State, engine: LocalEngine | None = None) -> State:
        tasks = method.plan(self.setup, state, self.setup.clients)
        merged = method.merge(self.setup, state, self.done(tasks, engine))
        return replace(merged, round=state.round + 1)

    def prepare_model(self, method: fq.Method) -> World:
        return World(method.prepare_model(self.setup), self.people)

    def with_clients(self, *clients: Client) -> World:
        return World(replace(self.setup, clients=clients), self.people)


def population() -> Population:
    pairs = zip(LABELS, WIDTHS, strict=True)
    clients = tuple(Client(i, 16, labels, Budget(w)) for i, (labels, w) in enumerate(pairs))
    train = {c.id: drawn(c.labels, 16, c.id) for c in clients}
    test = {c.id: drawn(c.labels, 5, 10 + c.id) for c in clients}
    validation = {c.id: drawn(c.labels, 7, 20 + c.id) for c in clients}
    return Population(clients, train, {**test, SERVER: drawn((0, 1, 2, 3), 12, 99)}, validation)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nets this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def traced() -> tuple[nn.Module, fq.Structure]:
    torch.manual_seed(0)
    net = Net()
    return net, fq.trace_structure(net, torch.zeros(2, 1, 5, 5))


@pytest.fixture
def world(traced: tuple[nn.Module, fq.Structure]) -> World:
    net, structure = traced
    people = population()
    return World(Setup(net, structure, torch.zeros(2, 1, 5, 5), people.clients, 2, 3), people)


@pytest.fixture
def local_training() -> fq.LocalTraining:
    return fq.LocalTraining(lr=0.05, epochs=1, batch_size=4)


@pytest.fixture(scope="session")
def numbers() -> Callable[[Task], list[int]]:
    """The bases of a task of Split-Mix."""
    return lambda task: [int(subnet.owner) for subnet in task.subnets]


@pytest.fixture
def traffic() -> Callable[..., tuple[int, int]]:
    """Bytes to and from each client."""

    def count(world: World, task: Task, update: Update) -> tuple[int, int]:
        down = sum(count_subnet_bytes(world.setup, subnet) for subnet in task.subnets)
        return down, sum(t.nbytes for part in update.params for t in part.values())

    return count


@pytest.fixture
def same() -> Callable[..., bool]:
    def is_same(one: Any, other: Any, names: Any = None) -> bool:
        return all(one[n].equal(other[n]) for n in (one if names is None else names))

    return is_same
