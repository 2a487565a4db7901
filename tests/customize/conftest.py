"""A tiny Split-Mix run with two dials, on disk, whose bases and normalisations all differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.customize import bundle

EXAMPLE = torch.zeros(2, 1, 6, 6)
STEPS = fq.LocalTraining(lr=0.05, epochs=1, batch_size=4, max_grad_norm=None)


class Net(nn.Module):
    """Normalises images and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.dense = nn.Sequential(nn.Linear(72, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.classifier = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dense(self.features(x).flatten(1)))


@dataclass(frozen=True, eq=False)
class Stored:
    """A finished run in a directory, and what it was made with."""

    folder: Path
    model: nn.Module
    method: fq.Method
    people: fq.Population

    @property
    def file(self) -> Path:
        return self.folder / "model" / "params.safetensors"

    def open(self) -> fq.Run:
        return fq.open_run(self.folder, self.model, self.method)


METHODS: dict[str, fq.Method] = {
    "robust": fq.SplitMix(STEPS, base=0.25, robust=True, steps=1),
    "robust batch": fq.SplitMix(STEPS, base=0.25, robust=True, steps=1, statistics="batch"),
    "batch": fq.SplitMix(STEPS, base=0.25, stacked=False),
    "heterofl": fq.HeteroFL(STEPS),
    "oat": fq.fedavg_oat(STEPS, steps=1),
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Nets this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stored]:
    """A run of a method, trained once and then roughened so that no two tensors are alike."""
    torch.manual_seed(0)
    net = Net()
    structure = fq.trace_structure(net, EXAMPLE)
    y = torch.arange(24) % 3
    x = torch.sigmoid(torch.randn(24, 1, 6, 6) + y.view(-1, 1, 1, 1) - 1)
    people = fq.make_clients((x, y), test=(x, y), count=2, budgets=[1, 0.5])
    found: dict[str, Stored] = {}

    def make(name: str) -> Stored:
        if name not in found:
            method, folder = METHODS[name], tmp_path_factory.mktemp("runs") / "run"
            run = fq.train(net, EXAMPLE, method, people, 1, workers=0, structure=structure)
            generator = torch.Generator().manual_seed(1)
            params = {
                n: t + torch.rand(t.shape, generator=generator) if t.is_floating_point() else t
                for n, t in run.state.params.items()
            }
            bundle.save_bundle(folder / "model", params, structure, run.info)
            found[name] = Stored(folder, net, method, people)
        return found[name]

    return make


@pytest.fixture(scope="session")
def robust(stored: Callable[[str], Stored]) -> Stored:
    """Four bases with dual normalisation."""
    return stored("robust")


@pytest.fixture
def images() -> Tensor:
    return torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(2))
