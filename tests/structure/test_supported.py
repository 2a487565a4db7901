"""Models that are refused at the door, with what to do about it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import StructureError
from fedquilt.structure.create import declare_structure, trace_structure

from .nets import VECTOR


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5))


def scripted_part() -> nn.Module:
    net = plain()
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        net[1] = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    return net


def scripted() -> nn.Module:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        return torch.jit.script(plain())


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(5))


def transposed() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8), nn.Linear(8, 5))
    net[2].weight = nn.Parameter(net[0].weight.detach().t())
    return net


def buffered() -> nn.Module:
    net = plain()
    net.register_buffer("copy", net[0].weight.detach()[2:4])
    return net


REFUSED = {
    "compiled by TorchScript": (scripted, r"^the model is compiled by TorchScript.*; give the"),
    "a part compiled by TorchScript": (scripted_part, r"^module '1' is compiled by TorchScript"),
    "in parallel": (lambda: nn.DataParallel(plain()), r"wrapper \(DataParallel\).* model\.module$"),
    "compiled": (
        lambda: torch.compile(plain(), backend="eager"),
        r"\(OptimizedModule\).*, model\._orig_mod$",
    ),
    "lazy layers": (lazy, r"^'0.weight' belongs to a lazy layer.*; run the model once"),
    "a transposed view": (transposed, r"^'0.weight' and '2.weight' .*share memory.*clone\(\)$"),
    "a view as buffer": (buffered, r"^'0.weight' and 'copy' .*share memory"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_what_cannot_be_cut_is_refused_in_a_sentence(name):
    make, message = REFUSED[name]
    model = make()
    data = (torch.randn(8, 8), torch.arange(8) % 5)
    for attempt in (
        lambda: trace_structure(model, VECTOR),
        lambda: declare_structure(model, {}),
        lambda: fq.train(model, VECTOR, fq.FedAvg(), fq.make_clients([data]), rounds=1, workers=0),
    ):
        with pytest.raises(StructureError, match=message) as problem:
            attempt()
        assert "\n" not in str(problem.value)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_layers_that_have_run_are_layers():
    model = lazy()
    model(VECTOR)
    assert trace_structure(model, VECTOR).cut_groups() == ["0"]


def test_buffers_that_share_a_table_are_written_like_others(tmp_path):
    table = torch.rand(8)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("scale", table[:1].expand(8))
            self.register_buffer("table", table[2:])

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) * self.table.mean() * self.scale

    model = nn.Sequential(Scaled(), nn.ReLU(), Scaled(), nn.Linear(8, 5))
    data = fq.make_clients([(torch.randn(8, 8), torch.arange(8) % 5)], budgets=[1.0])
    run = fq.train(model, VECTOR, fq.FedAvg(), data, rounds=1, workers=0, out=tmp_path / "run")
    assert model[0].table.data_ptr() == model[2].table.data_ptr()  # the model given is as it was
    net = run.customize()
    torch.testing.assert_close(net[2].table, table[2:])
    fq.export(model, tmp_path / "model.safetensors", VECTOR)


class Halves(nn.Module):
    """Parameters that lie beside each other in one memory, and have no element in common."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        both = torch.randn(8, 8)
        first, second = both.chunk(2, axis)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (w if w.shape[0] == 8 else w.t() for w in (self.first, self.second))
        return self.out(torch.relu(x @ first) + x @ second)


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_one_memory_are_tensors_like_others(axis):
    assert trace_structure(Halves(axis), VECTOR).cut_groups() == ["first"]
