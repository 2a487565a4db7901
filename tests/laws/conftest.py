"""Every method with a tiny federation, so that each law is written once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.data.population import Population
from fedquilt.engines.engine import Engine
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.aggregation import AggregationPipeline
from fedquilt.federation.client import SERVER, Client, Failure, Task, Update
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.methods.method import Method
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.events import Event, RoundDone
from fedquilt.runs.loop import TrainingLoop
from fedquilt.runs.policies import Cadence
from fedquilt.structure.budget import Budget

HAS_DEVICE = hasattr(torch, "sim") or "FEDQUILT_DEVICE" in os.environ
collect_ignore = [] if HAS_DEVICE else ["device_laws.py"]  # see tests/devices
NUM_CLASSES, HIDDEN = 4, (8, 12)
OPTIMISER = fq.LocalTraining(lr=0.05, epochs=1, batch_size=4)
WIDTHS = (1.0, 0.5, 0.5, 0.25, 0.25)
EXAMPLES = (8, 9, 6, 10, 5)
LABELS = ((0, 1, 2, 3), (0, 1), (1, 2), (0, 3), (1,))

EXITS = ("features.0", "features.2", "features.3")
METHODS: dict[str, Method] = {
    "adds": fq.ADDS(OPTIMISER, fraction=0.8, keep_fraction=0.7, keep_lr=0.1, persistent=True),
    "adds anew": fq.ADDS(OPTIMISER, fraction=1.0, strength=0.1),
    "apfl": fq.APFL(OPTIMISER, fraction=0.8, warm_up=0.5, ratio=0.3, nets=3),
    "apfl inherit": fq.APFL(
        OPTIMISER, warm_up=0.5, ratio=0.3, by_group=True, inherit=True, whole=("features.0",)
    ),
    "centralised": fq.Centralised(OPTIMISER),
    "depthfl": fq.DepthFL(OPTIMISER, fraction=0.8, exit_modules=EXITS),
    "depthfl feddyn": fq.DepthFL(OPTIMISER, fraction=1.0, exit_modules=EXITS, feddyn_alpha=0.1),
    "depthfl last": fq.DepthFL(OPTIMISER, fraction=1.0, exit_modules=EXITS, only_last=True),
    "fedavg": fq.FedAvg(OPTIMISER, fraction=1.0, width=0.5),
    "feddrop": fq.FedDrop(OPTIMISER, fraction=0.8),
    "feddrop each": fq.FedDrop(OPTIMISER, fraction=1.0, width=0.5, per_client=True, scaler=False),
    "fedrolex": fq.FedRolex(OPTIMISER, fraction=0.8),
    "feduniform": fq.fed_uniform(OPTIMISER, fraction=0.8),
    "fjord": fq.FjORD(OPTIMISER, fraction=0.8),
    "fjord plain": fq.FjORD(OPTIMISER, fraction=1.0, distil=False, private_params="norms"),
    "heterofl": fq.HeteroFL(OPTIMISER, fraction=1.0),
    "heterofl dynamic": fq.HeteroFL(
        OPTIMISER, fraction=0.6, assignment="dynamic", widths=(0.25, 0.5, 1.0)
    ),
    "heterofl fedadam": fq.HeteroFL(OPTIMISER, fraction=0.8, server_optimizer=fq.FedAdam(lr=0.02)),
    "lg-fedavg": fq.lg_fedavg(OPTIMISER, fraction=0.8, width=0.5),
    "standalone": fq.standalone(OPTIMISER, fraction=0.6, width=0.25),
    "fedavg-at": fq.fedavg_at(OPTIMISER, steps=2),
    "fedavg-oat": fq.fedavg_oat(OPTIMISER, width=0.5, steps=2),
    "nefl": fq.NeFL(OPTIMISER, fraction=0.8, gammas=(0.25, 0.5, 1.0), tolerance=0.1),
    "nefl by depth": fq.NeFL(
        OPTIMISER,
        fraction=1.0,
        scaling="prefix",
        gammas=(0.2, 1.0),
        step_start="ode",
        assignment="fixed",
    ),
    "nefl untracked": fq.NeFL(
        OPTIMISER,
        fraction=0.8,
        gammas=(0.25, 0.5, 1.0),
        tolerance=0.1,
        private_params=(),
        tracks_statistics=False,
    ),
    "pfedme": fq.PFedMe(OPTIMISER, fraction=0.8, steps=2),
    "sheterofl": fq.SHeteroFL(OPTIMISER, fraction=0.8),
    "sheterofl tracked": fq.SHeteroFL(OPTIMISER, statistics="tracked"),
    "splitmix": fq.SplitMix(OPTIMISER, fraction=0.6, base=0.25, stacked=False),
    "splitmix together": fq.SplitMix(OPTIMISER, base=0.25, stacked=True, sort_bases=True),
    "splitmix post": fq.SplitMix(OPTIMISER, base=0.25, statistics="post", stacked=False),
    "splitmix local": fq.SplitMix(OPTIMISER, base=0.25, statistics="local", stacked=False),
    "splitmix robust": fq.SplitMix(OPTIMISER, base=0.25, robust=True, steps=2, stacked=True),
    "stc": fq.STC(OPTIMISER, fraction=0.8, sparsity_up=0.05, sparsity_down=0.1),
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
        self.blocks = nn.Sequential(Residual(second), Residual(second))
        self.classifier = nn.Linear(second, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.features(x)).mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()


def drawn(labels: tuple[int, ...], count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=generator)
    y = torch.tensor([labels[i % len(labels)] for i in range(count)])
    return to_examples((torch.sigmoid(x + y.view(-1, 1, 1, 1) - 1.5), y))  # pixels


def population() -> Population:
    clients = tuple(
        Client(i, count, labels, Budget(width))
        for i, (count, labels, width) in enumerate(zip(EXAMPLES, LABELS, WIDTHS, strict=True))
    )
    train = {c.id: drawn(c.labels, c.num_examples, c.id) for c in clients}
    test = {c.id: drawn(c.labels, 5, 100 + c.id) for c in clients}
    validation = {c.id: drawn(c.labels, 4, 200 + c.id) for c in clients}
    return Population(clients, train, {**test, SERVER: drawn((0, 1, 2, 3), 11, 99)}, validation)


class Unfinished:
    """A method without its closing phases, nor those before it trains its model."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        *_, last = (p for p in self._method.phases(setup) if not p.is_closing)
        return (last,)


@dataclass(frozen=True, eq=False)
class Case:
    """A method, and what it is tried on."""

    method: Method
    given: Setup  # as a user has it
    setup: Setup  # as the method makes it
    people: Population = field(repr=False)
    answers: dict[Any, Any] = field(default_factory=dict, repr=False)  # of clients, by question

    def anew(self) -> Case:
        """The same case in another process, which knows nothing of this one."""
        return replace(self, setup=self.method.prepare_model(self.given), answers={})

    def engine(self, workers: int = 0, folder: Path | None = None, **more: Any) -> LocalEngine:
        setup = self.setup
        return LocalEngine(
            setup.model,
            setup.structure,
            self.people.data,
            workers=workers,
            folder=folder,
            task=setup.task,
            **more,
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

    def closings(self, state: State) -> list[State]:
        """The state in each of the method's closing phases."""
        phases = self.method.phases(self.setup)
        return [replace(state, phase=phase.name) for phase in phases if phase.is_closing]

    def tasks(self, state: State, clients: Sequence[Client] | None = None) -> list[Task]:
        chosen = self.setup.clients if clients is None else clients
        return self.method.plan(self.setup, state, chosen)

    def updates(self, state: State, clients: Sequence[Client] | None = None) -> list[Update]:
        """What comes back, as it is merged."""
        came = self.done(self.tasks(state, clients))
        decoder = self.aggregation(state).decoder
        return [decoder.decode(self.setup, state, update) for update in came]

    def done(self, tasks: list[Task]) -> list[Update]:
        with self.engine() as engine:
            found = list(engine.run(tasks))
        assert all(isinstance(u, Update) for u in found), found
        return found

    def aggregation(self, state: State) -> AggregationPipeline:
        return self.method.aggregation(self.setup, state.phase)

    def merges_changes(self, state: State) -> bool:
        """Whether changes of weights are merged, not their values."""
        return self.aggregation(state).aggregator.takes_changes

    def told(self, state: State, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What is merged for these tensors of a client: themselves, or how they have changed."""
        if not self.merges_changes(state):
            return tensors
        return {
            name: tensor - state.params[name] if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }

    def merge(self, state: State, updates: Sequence[Update]) -> dict[str, Tensor]:
        return dict(self.method.merge(self.setup, state, iter(updates)).params)

    def run(
        self,
        engine: Engine,
        folder: Path | None = None,
        watch: Any = None,
        cadence: Cadence | None = None,
        *,
        resume: bool = False,
    ) -> tuple[State, tuple[fq.SizeScore, ...], list[Event]]:
        events: list[Event] = []

        def note(event: Event) -> None:
            events.append(event)
            if watch is not None:
                watch(event)

        loop = TrainingLoop(
            self.setup,
            self.method,
            engine,
            self.people.has_server_test,
            self.people.testers,
            None if folder is None else RunDirectory(folder),
            "tiny",
            cadence or Cadence(),
            [note],
        )
        return (*loop.run(resume=resume), events)

    def first_round(self, engine: Engine) -> tuple[State, RoundDone]:
        """The state after one round of training alone, and what was recorded of it."""
        method, setup = Unfinished(self.method), replace(self.setup, rounds=1)
        people = replace(self.people, test={})  # nothing to evaluate, which takes longest
        short = replace(self, method=method, setup=setup, people=people)
        state, _, events = short.run(engine)
        return state, next(e for e in events if isinstance(e, RoundDone))

    @staticmethod
    def bits(params: Mapping[str, Tensor]) -> dict[str, bytes]:
        """Tensors as bytes, so that equality means every bit, NaN and -0 included."""
        return {n: t.detach().contiguous().numpy().tobytes() for n, t in params.items()}


class Replaying:
    """An engine that gives the answers again that a real one gave to the same questions."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.calls: list[tuple[list[Task], list[Update]]] = []

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Failure]:
        question = tuple((t.client, t.seed, t.recipe) for t in tasks)
        answers = self._case.answers
        if question not in answers:
            answers[question] = self._case.done(list(tasks))
        self.calls.append((list(tasks), answers[question]))
        yield from answers[question]

    def client_versions(self) -> Mapping[int, int]:
        return {}

    def remove_unused(self, *used: Mapping[int, int]) -> None:
        pass


@pytest.fixture(scope="session")
def setup() -> Setup:
    torch.manual_seed(0)
    model, example = Net(), torch.zeros(2, 1, 6, 6)
    structure = fq.trace_structure(model, example)
    return Setup(model, structure, example, population().clients, rounds=3, seed=7)


@pytest.fixture(scope="session", params=sorted(METHODS))
def case(request: pytest.FixtureRequest, setup: Setup) -> Case:
    method = METHODS[request.param]
    return Case(method, setup, method.prepare_model(setup), population())


@pytest.fixture
def replaying(case: Case) -> Replaying:
    return Replaying(case)


@pytest.fixture
def case_names() -> set[str]:
    return {name.split()[0] for name in METHODS}
