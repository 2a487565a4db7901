"""Gates on channels do what subnets do, and give every channel its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.structure.cut import build_module
from fedquilt.training.gating import find_gateable_groups, gate_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.expand = nn.Conv2d(6, 8, 1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.project = nn.Conv2d(8, 6, 1)
        self.hidden = nn.Linear(6 * 9, 10)
        self.classifier = nn.Linear(10, 3)

    def forward(self, x):
        x = self.stem(x).relu()
        x = x + self.project(self.norm(self.deep(self.expand(x).relu())).relu())
        return self.classifier(self.hidden(x.flatten(1)).relu())


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 7)
        self.classifier = nn.Linear(12 + 4, 3)

    def forward(self, x):
        return self.classifier(torch.cat([self.left(x).relu(), x, self.right(x).tanh()], 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.hidden = nn.Linear(8, 10)
        self.classifier = nn.Linear(10, 9)

    def forward(self, x):
        return self.classifier(self.hidden(self.lstm(self.embedding(x))[0]).relu())


def traced(model, example):
    torch.manual_seed(0)
    return model, fq.trace_structure(model, example), example


NETS = {
    "block": lambda: traced(Block(), torch.zeros(2, 2, 3, 3)),
    "joined": lambda: traced(Joined(), torch.zeros(2, 4)),
}


@pytest.mark.parametrize("name", NETS)
def test_closed_gates_give_what_the_subnet_gives(name):
    model, structure, example = NETS[name]()
    model = model.double().eval()
    x = torch.rand(3, *example.shape[1:], dtype=torch.float64)
    groups = structure.cut_groups()
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        channels = {}
        for group in groups:
            size = structure.groups[group].size
            count = int(torch.randint(1, size + 1, (), generator=generator))
            channels[group] = torch.randperm(size, generator=generator)[:count].tolist()
        small = build_module(model, structure, structure.subnet(channels=channels)).eval()
        with torch.no_grad(), gate_module(model, structure, groups) as gates:
            gates.values = {
                g: torch.zeros(structure.groups[g].size, dtype=torch.float64).index_fill(
                    0, torch.tensor(kept), 1.0
                )
                for g, kept in channels.items()
            }
            torch.testing.assert_close(model(x), small(x))


def test_gates_that_are_closed_have_a_gradient_too():
    """That is what lets a channel come back: the loss with it, to first order."""
    model, structure, example = NETS["block"]()
    model = model.double().eval()
    x = torch.rand(3, *example.shape[1:], dtype=torch.float64)
    for group in structure.cut_groups():
        size = structure.groups[group].size
        start = (torch.arange(size) % 2).double()

        def loss(values, group=group):
            with gate_module(model, structure, [group]) as gates:
                gates.values = {group: values}
                return (model(x) ** 2).sum()

        values = start.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(values), values)
        for channel in range(size):
            step = torch.zeros(size, dtype=torch.float64)
            step[channel] = 1e-5
            with torch.no_grad():
                slope = (loss(start + step) - loss(start - step)) / 2e-5
            assert float(found[channel]) == pytest.approx(float(slope), rel=1e-4, abs=1e-6)
        assert (found[start == 0].abs() > 1e-8).any()


def test_gates_leave_no_trace():
    model, structure, _ = NETS["joined"]()
    x = torch.rand(2, 4)
    before = model(x)
    with gate_module(model, structure, structure.cut_groups()) as gates:
        assert torch.equal(model(x), before)  # no values: no gates
        gates.values = {g: torch.zeros(structure.groups[g].size) for g in structure.cut_groups()}
        assert not torch.equal(model(x), before)
    assert torch.equal(model(x), before)
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_activity_is_the_mean_size_of_what_goes_into_layers():
    model, structure, _ = NETS["block"]()
    x = torch.rand(4, 2, 3, 3)
    with torch.no_grad(), gate_module(model, structure, ["hidden", "stem"]) as gates:
        gates.wants_activity = frozenset(["hidden"])
        gates.values = {"hidden": torch.zeros(10)}  # it is seen before the gates
        model(x)
        inner = model.stem(x).relu()
        inner = inner + model.project(model.norm(model.deep(model.expand(inner).relu())).relu())
        expected = model.hidden(inner.flatten(1)).relu().abs().mean(0)
    torch.testing.assert_close(gates.activity["hidden"], expected)
    assert list(gates.activity) == ["hidden"]


def test_activity_of_a_channel_is_over_all_its_positions():
    model, structure, _ = NETS["block"]()
    x = torch.rand(4, 2, 3, 3)
    with torch.no_grad(), gate_module(model, structure, ["stem"]) as gates:
        gates.wants_activity = frozenset(["stem"])
        model(x)  # the last layer that takes them in is the linear one, nine positions a channel
    with torch.no_grad():
        inner = model.stem(x).relu()
        inner = inner + model.project(model.norm(model.deep(model.expand(inner).relu())).relu())
    torch.testing.assert_close(gates.activity["stem"], inner.abs().mean((0, 2, 3)))


def test_only_groups_whose_gates_are_right_can_be_sampled():
    for name, make in NETS.items():
        model, structure, example = make()
        assert find_gateable_groups(model, structure, example) == tuple(structure.cut_groups()), (
            name
        )
    model = Recurrent()
    structure = fq.trace_structure(model, torch.zeros(2, 5, dtype=torch.int64))
    found = find_gateable_groups(model, structure, torch.zeros(2, 5, dtype=torch.int64))
    assert found == ("hidden",)
