"""Every method with a tiny federation, so that each law is written once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data.examples import as_examples
from fedquilt.data.population import Population
from fedquilt.engines.engine import Engine
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.client import SERVER, Client, Task, Update
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Method
from fedquilt.runs.loop import Event, Loop, Pace
from fedquilt.structure.budget import Budget

NUM_CLASSES, HIDDEN = 4, (8, 12)
OPTIMISER = fq.Optimiser(lr=0.05, epochs=1, batch_size=4)
WIDTHS = (1.0, 0.5, 0.5, 0.25, 0.25)
LABELS = ((0, 1, 2, 3), (0, 1), (1, 2), (0, 3), (1,))

METHODS: dict[str, Method] = {
    "fedavg": fq.FedAvg(OPTIMISER, fraction=1.0, width=0.5),
    "heterofl": fq.HeteroFL(OPTIMISER, fraction=1.0),
    "heterofl dynamic": fq.HeteroFL(
        OPTIMISER, fraction=0.6, assignment="dynamic", widths=(0.25, 0.5, 1.0)
    ),
    "lg-fedavg": fq.lg_fedavg(OPTIMISER, fraction=0.8, width=0.5),
    "standalone": fq.standalone(OPTIMISER, fraction=0.6, width=0.25),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = HIDDEN
        self.features = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.BatchNorm2d(second),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(second, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def drawn(labels: tuple[int, ...], count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=generator)
    y = torch.tensor([labels[i % len(labels)] for i in range(count)])
    return as_examples((x + y.view(-1, 1, 1, 1), y))


def population() -> Population:
    clients = tuple(
        Client(i, 16, labels, Budget(width))
        for i, (labels, width) in enumerate(zip(LABELS, WIDTHS, strict=True))
    )
    train = {c.id: drawn(c.labels, c.num_examples, c.id) for c in clients}
    test = {c.id: drawn(c.labels, 5, 100 + c.id) for c in clients}
    return Population(clients, train, {**test, SERVER: drawn((0, 1, 2, 3), 11, 99)})


@dataclass(frozen=True, eq=False)
class Case:
    """A method, and what it is tried on."""

    method: Method
    setup: Setup
    people: Population = field(repr=False)

    def engine(self, workers: int = 0, folder: Path | None = None) -> LocalEngine:
        setup = self.setup
        return LocalEngine(
            setup.model, setup.structure, self.people.data, workers=workers, folder=folder
        )

    def start(self) -> State:
        """A state in training whose tensors are not the model's own any more."""
        state = self.method.start(self.setup)
        generator = torch.Generator().manual_seed(3)
        params = {
            n: t + torch.rand(t.shape, generator=generator) * 0.1 if t.is_floating_point() else t
            for n, t in state.params.items()
        }
        return replace(state, phase="train", params=params)

    def closing(self, state: State) -> State | None:
        """The state in the method's closing phase, if it has one."""
        for phase in self.method.phases(self.setup):
            if phase.is_closing:
                return replace(state, phase=phase.name)
        return None

    def tasks(self, state: State, clients: Sequence[Client] | None = None) -> list[Task]:
        chosen = self.setup.clients if clients is None else clients
        return [t for c in chosen for t in self.method.plan(self.setup, state, c)]

    def updates(self, state: State, clients: Sequence[Client] | None = None) -> list[Update]:
        with self.engine() as engine:
            found = list(engine.run(self.tasks(state, clients)))
        assert all(isinstance(u, Update) for u in found), found
        return found

    def merge(self, state: State, updates: Sequence[Update]) -> dict[str, Tensor]:
        return dict(self.method.merge(self.setup, state, iter(updates)).params)

    def run(
        self,
        engine: Engine,
        folder: Path | None = None,
        watch: Any = None,
        pace: Pace | None = None,
        *,
        resume: bool = False,
    ) -> tuple[State, tuple[fq.SizeScore, ...], list[Event]]:
        events: list[Event] = []

        def note(event: Event) -> None:
            events.append(event)
            if watch is not None:
                watch(event)

        loop = Loop(
            self.setup,
            self.method,
            engine,
            self.people.held_out,
            self.people.testers,
            folder,
            "tiny",
            pace or Pace(),
            note,
        )
        return (*loop.run(resume=resume), events)

    @staticmethod
    def bits(params: Mapping[str, Tensor]) -> dict[str, bytes]:
        """Tensors as bytes, so that equality means every bit, NaN and -0 included."""
        return {n: t.detach().contiguous().numpy().tobytes() for n, t in params.items()}

    @staticmethod
    def sizes(width: float) -> tuple[int, int]:
        return math.ceil(HIDDEN[0] * width), math.ceil(HIDDEN[1] * width)


@pytest.fixture(scope="session")
def setup() -> Setup:
    torch.manual_seed(0)
    model, example = Net(), torch.zeros(2, 1, 6, 6)
    structure = fq.Structure.trace(model, example)
    return Setup(model, structure, example, population().clients, rounds=3, seed=7)


@pytest.fixture(params=sorted(METHODS))
def case(request: pytest.FixtureRequest, setup: Setup) -> Case:
    return Case(METHODS[request.param], setup, population())


@pytest.fixture
def case_names() -> set[str]:
    return {name.split()[0] for name in METHODS}
