"""A model whose structure is declared, so that nothing here depends on tracing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedquilt.federation.state import State
from fedquilt.structure.create import declare_structure
from fedquilt.structure.structure import Structure


class Table(nn.Module):
    """Tensors of several ranks over two width groups and one of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5, 3))
        self.b = nn.Parameter(torch.zeros(4, 5, 2))
        self.c = nn.Parameter(torch.zeros(8))  # two positions for each of four channels
        self.out = nn.Parameter(torch.zeros(3, 4))
        self.free = nn.Parameter(torch.zeros(2, 2))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))


AXES = {
    "a": ("h", None),
    "b": ("k", "h", None),
    "c": ("k",),
    "out": ("y", "k"),
    "count": ("h",),
}


@pytest.fixture(scope="session")
def structure() -> Structure:
    return declare_structure(Table(), AXES)


@pytest.fixture(scope="session")
def table() -> Table:
    return Table()


@pytest.fixture
def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in {
        **dict(Table().named_parameters()),
        **dict(Table().named_buffers()),
    }.items():
        if tensor.is_floating_point():
            found[name] = torch.randn(tensor.shape, generator=generator)
        else:
            found[name] = torch.ones_like(tensor)
    return found


@pytest.fixture
def state(params) -> State:
    return State(0, "train", params)
