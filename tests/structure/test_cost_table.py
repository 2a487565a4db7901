"""A table of costs gives what ``compute_cost`` counts, in less time."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.structure.cost import Cost, CostTable, compute_cost
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import STATISTICS, Structure
from fedquilt.structure.subnet import Subnet

from .nets import CLASSES, VECTOR, ZOO, structured

HOME = (STATISTICS, "*num_batches_tracked")
LAYERS = ["conv, flatten, linear", "dense", "grouped", "mlp", "tied words", "u-net"]
PRODUCTS = ["attention to another", "rotary halves"]  # activations are multiplied with each other


class Pair(nn.Module):
    """One layer with two weights, each of its own width; at equal widths they look like one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(6, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, self.weight), F.linear(x, self.other)], 1)


class Again(nn.Module):
    """A layer that is used three times, and a weight that is used without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.b(self.b(self.a(x)).relu()).relu())
        return self.c(x + F.linear(x, self.b.weight))


ODD = {
    "a pair of weights": lambda: nn.Sequential(Pair(), nn.ReLU(), nn.Linear(12, CLASSES)),
    "used again": Again,
}


@functools.cache
def net(name: str) -> tuple[nn.Module, Structure, object]:
    if name in ZOO:
        return *structured(name), ZOO[name].example
    torch.manual_seed(0)
    model = ODD[name]()
    return model, trace_structure(model, VECTOR), VECTOR


@functools.cache
def prices(name: str, home: tuple[str, ...] = ()) -> CostTable:
    """One for all tests, so that it is asked in any order."""
    model, structure, inputs = net(name)
    return CostTable(model, structure, inputs, local_params=home)


def subnet_at(structure: Structure, widths: list[float]) -> Subnet:
    return structure.subnet(dict(zip(structure.cut_groups(), itertools.cycle(widths))))


widths = st.lists(st.floats(0.01, 1) | st.just(1.0), min_size=1, max_size=5)


@pytest.mark.parametrize("name", [*LAYERS, *PRODUCTS, *ODD])
@given(widths=widths)
@example(widths=[0.3, 1.0])
@settings(max_examples=3, deadline=None)
def test_prices_are_what_is_counted(name, widths):
    model, structure, inputs = net(name)
    subnet = subnet_at(structure, widths)
    counted = compute_cost(model, structure, subnet, inputs)
    found = prices(name)(subnet)
    assert found == Cost(counted.params, counted.bytes, counted.macs, memory=0)
    assert prices(name)(subnet, memory=True) == counted


@pytest.mark.parametrize("name", ["dense", "mlp"])
@given(widths=widths)
@settings(max_examples=3, deadline=None)
def test_what_stays_at_home_does_not_travel(name, widths):
    model, structure, inputs = net(name)
    subnet = subnet_at(structure, widths)
    counted = compute_cost(model, structure, subnet.excluding(*HOME), inputs)
    found = prices(name, HOME)(subnet)
    assert found == Cost(counted.params, counted.bytes, counted.macs, memory=0)
    assert found.bytes < prices(name)(subnet).bytes


def test_the_price_of_a_net_that_can_be_counted_in_the_head():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5))
    image = torch.zeros(1, 3, 8, 8)
    structure = trace_structure(model, image)
    found = CostTable(model, structure, image, local_params=HOME)(
        Subnet.from_channels({"0": range(3)})
    )
    conv, linear = 3 * 3 * 9, 3 * 36 * 5
    assert found.params == (conv + 3) + (3 + 3) + (linear + 5)
    assert found.bytes == 4 * found.params
    assert found.macs == conv * 36 + linear


@pytest.mark.parametrize("name", ["dense", "attention to another"])
def test_the_order_of_questions_does_not_matter(name):
    model, structure, inputs = net(name)
    asked = [subnet_at(structure, w) for w in ([0.3], [1.0], [0.5, 1.0], [0.2, 0.7, 1.0])]
    first = prices(name)
    expected = {subnet: first(subnet) for subnet in asked}
    assert len(set(expected.values())) == len(asked)
    fresh = CostTable(model, structure, inputs)
    for order in itertools.permutations(asked):
        assert {subnet: fresh(subnet) for subnet in order} == expected


def test_memory_is_that_of_the_batch_size():
    model, structure, inputs = net("mlp")
    few, many = (CostTable(model, structure, inputs, batch_size=n) for n in (2, 64))
    subnet = structure.subnet(0.5)
    for price, batch_size in ((few, 2), (many, 64)):
        counted = compute_cost(model, structure, subnet, inputs, batch_size=batch_size)
        assert price(subnet, memory=True).memory == counted.memory
    assert few(subnet) == many(subnet)
