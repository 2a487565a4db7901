"""What a workbench knows about statistics that stay on the client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedquilt.structure.groups import STATISTICS, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.recipe import Workbench

HOME = (STATISTICS, "*num_batches_tracked")


def kept_by(bench: Workbench, subnet: Subnet, home: tuple[str, ...], params) -> dict[str, Tensor]:
    """What a client keeps after it has trained a subnet."""
    bench.kept = bench.to_keep = None
    bench.keep(bench.module(subnet, params, home), subnet, home)
    return dict(bench.to_keep or {})


@pytest.mark.parametrize("home", [(STATISTICS,), HOME])
@pytest.mark.parametrize("owner", ["", "own"])
def test_a_client_lacks_statistics_until_it_has_trained(structure, bench, params, home, owner):
    subnet = structure.subnet(0.5)
    subnet = subnet.owning(owner, *home) if owner else subnet
    assert bench.lacks_statistics(subnet, home)
    bench.kept = kept_by(bench, subnet, home, params)
    assert not bench.lacks_statistics(subnet, home)


def test_a_client_lacks_statistics_of_every_net_but_its_own(structure, bench, params):
    own = structure.subnet(0.5).owning("own", *HOME)
    bench.kept = kept_by(bench, own, HOME, params)
    assert bench.lacks_statistics(Subnet(), HOME)
    assert bench.lacks_statistics(structure.subnet(0.5), HOME)
    assert bench.lacks_statistics(structure.subnet(0.5).owning("other", *HOME), HOME)


@pytest.mark.parametrize("name", ["norm.running_mean", "norm2.running_var"])
def test_all_of_them_have_to_be_there(bench, params, name):
    bench.kept = kept_by(bench, Subnet(), HOME, params)
    del bench.kept[name]
    assert bench.lacks_statistics(Subnet(), HOME)


def test_counters_are_no_statistics(bench, params):
    bench.kept = {
        n: t for n, t in kept_by(bench, Subnet(), HOME, params).items() if "tracked" not in n
    }
    assert not bench.lacks_statistics(Subnet(), HOME)


@pytest.mark.parametrize("home", [(), ("*num_batches_tracked",), ("*", f"!{STATISTICS}")])
def test_statistics_that_travel_are_never_lacking(bench, home):
    assert not bench.lacks_statistics(Subnet(), home)


@pytest.mark.parametrize("home", [("*",), (":norms",), (STATISTICS, "classifier.bias")])
def test_a_client_that_keeps_weights_too_has_not_trained_them_either(bench, home):
    """Its own net is as it was at first; statistics alone would not make it right."""
    assert not bench.lacks_statistics(Subnet(), home)


def test_a_net_without_statistics_lacks_none():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    structure = Structure.trace(net, torch.zeros(2, 3))
    assert not Workbench(net, structure, {}).lacks_statistics(Subnet(), HOME)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


def test_statistics_of_blocks_that_are_skipped_are_not_missed():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Block(), nn.Linear(4, 2))
    structure = Structure.trace(net, torch.zeros(2, 3))
    (block,) = structure.blocks
    bench = Workbench(net, structure, {})
    bench.kept = {"1.running_mean": torch.zeros(4), "1.running_var": torch.ones(4)}
    assert bench.lacks_statistics(Subnet(), HOME)
    assert not bench.lacks_statistics(Subnet().skipping(block), HOME)
