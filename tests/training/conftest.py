"""One small net with its structure, and clients with drawn images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedquilt.data import to_examples
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.context import ClientContext

LABELS = {0: (0, 1, 2, 3), 1: (1, 3), 2: (2,)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 10, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(10)
        self.classifier = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.norm2(self.second(x)))
        return self.classifier(x.mean((2, 3)))


def examples(labels: tuple[int, ...], count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 5, 5, generator=generator)
    y = torch.tensor([labels[i % len(labels)] for i in range(count)])
    return to_examples((x, y))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nets this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="session")
def structure(net: nn.Module) -> Structure:
    return trace_structure(net, torch.zeros(2, 1, 5, 5))


@pytest.fixture(scope="session")
def data() -> dict[str, dict[int, Any]]:
    train = {c: examples(labels, 6 if c == 2 else 14, c) for c, labels in LABELS.items()}
    test = {c: examples(labels, 9, 50 + c) for c, labels in LABELS.items()}
    return {"train": train, "test": {**test, -1: examples((0, 1, 2, 3), 21, 77)}}


@pytest.fixture
def context(net: nn.Module, structure: Structure, data: Any) -> ClientContext:
    return ClientContext(net, structure, data)


@pytest.fixture
def fresh_bench(net: nn.Module, structure: Structure, data: Any) -> Callable[[], ClientContext]:
    return lambda: ClientContext(net, structure, data)


@pytest.fixture
def params(net: nn.Module) -> dict[str, Tensor]:
    """Global tensors that are not the model's own."""
    generator = torch.Generator().manual_seed(5)
    return {
        n: t.detach() + 0.1 * torch.rand(t.shape, generator=generator)
        if t.is_floating_point()
        else t.clone()
        for n, t in named_tensors(net).items()
    }
