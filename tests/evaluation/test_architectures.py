"""Clients' own nets, against numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.evaluation.architectures import (
    ClientNet,
    Distance,
    architectures,
    client_nets,
    distances,
    layers,
    mean_costs,
)
from fedquilt.evaluation.clients import ClientScore
from fedquilt.models.apfl import MobileNetV2
from fedquilt.structure.budget import Budget
from fedquilt.structure.subnet import Subnet

RICH, POOR = Budget(1.0), Budget(macs=1000)


class Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(4, 8, 1)
        self.alone = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.reduce = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.reduce(self.alone(self.expand(x)).relu())


class Tiny(nn.Module):
    """Grey images; ``project`` and ``block.reduce`` are added, so they are one group."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.alone = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.project = nn.Conv2d(8, 4, 1)
        self.block = Inverted()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(self.alone(self.stem(x)).relu())
        return self.out(self.block(x).mean((2, 3)))


@pytest.fixture(scope="module")
def structure() -> fq.Structure:
    torch.manual_seed(0)
    return fq.Structure.trace(Tiny(), torch.zeros(2, 1, 5, 5))


def kept(stem: int = 8, project: int = 4, expand: int = 8) -> Subnet:
    """A subnet of the last channels, so that counts are no positions."""
    sizes = {"stem": (stem, 8), "project": (project, 4), "block.expand": (expand, 8)}
    channels = {group: range(n - count, n) for group, (count, n) in sizes.items() if count < n}
    return Subnet.of(channels)


def test_layers_are_those_that_make_channels(structure):
    weights = ["stem.weight", "project.weight", "block.expand.weight", "block.reduce.weight"]
    assert layers(structure) == weights  # the stem has one input too, and is not depthwise


def test_mobilenet_has_34_layers_besides_the_inputs_of_its_classifier():
    net = MobileNetV2(multiplier=0.25, head=16)
    structure = fq.Structure.trace(net, torch.zeros(2, 3, 32, 32))
    found = layers(structure)
    assert (found[-1], len(found[:-1])) == ("head.0.weight", 34)
    convolutions = dict(net.named_modules())
    assert all(convolutions[name.removesuffix(".weight")].groups == 1 for name in found)


def test_ratios_are_kept_channels_of_all(structure):
    first, second = architectures(
        structure, {7: kept(stem=2, project=3), 3: Subnet()}, {7: RICH, 5: POOR}
    )
    assert (first.client, first.budget) == (3, None)
    assert set(first.groups.values()) == set(first.layers.values()) == {1.0}
    assert (second.client, second.budget) == (7, RICH)
    assert second.groups == {"stem": 0.25, "project": 0.75, "block.expand": 1.0}
    assert second.layers == {
        "stem": 0.25, "project": 0.75, "block.expand": 1.0, "block.reduce": 0.75,
    }  # fmt: skip
    assert second.channels == {"stem": 2, "project": 3, "block.expand": 8, "block.reduce": 3}


def test_what_stays_at_home_is_part_of_an_architecture(structure):
    whole, home = kept(stem=2), kept(stem=2).leaving("*").owning("own", "*.bias")
    one, other = architectures(structure, {0: whole, 1: home})
    assert (one.groups, one.channels) == (other.groups, other.channels)


def test_a_skipped_block_keeps_nothing_but_what_others_share(structure):
    (block,) = structure.blocks
    (net,) = architectures(structure, {0: kept(project=2).skipping(block)})
    assert net.channels == {"stem": 8, "project": 2, "block.expand": 0, "block.reduce": 0}
    assert net.groups == {"stem": 1.0, "project": 0.5, "block.expand": 0.0}


def test_distances_are_means_over_pairs_of_l2_over_layers(structure):
    chosen = {0: kept(), 1: kept(stem=4, expand=5), 2: kept(project=1)}
    found = distances(architectures(structure, chosen, {0: RICH, 1: RICH, 2: POOR}))
    # differences: 4, 0, 3, 0 channels; then 0, 3, 0, 3; then 4, 3, 3, 3
    assert found.same_budget == Distance(1, 5.0, pytest.approx(0.625))
    assert found.all_pairs is not None
    assert found.all_pairs.pairs == 3
    assert found.all_pairs.channels == pytest.approx((5 + math.sqrt(18) + math.sqrt(43)) / 3)
    ratios = (
        math.hypot(4 / 8, 3 / 8),
        math.hypot(3 / 4, 3 / 4),
        math.hypot(4 / 8, 3 / 8, 3 / 4, 3 / 4),
    )
    assert found.all_pairs.ratios == pytest.approx(sum(ratios) / 3)


def test_where_there_is_no_pair_there_is_no_distance(structure):
    alone = distances(architectures(structure, {0: kept()}, {0: RICH}))
    assert (alone.same_budget, alone.all_pairs) == (None, None)
    unknown = distances(architectures(structure, {0: kept(), 1: kept()}))
    assert unknown.same_budget is None  # nobody knows that they can afford the same
    assert unknown.all_pairs == Distance(1, 0.0, 0.0)


# what nets cost


@pytest.fixture(scope="module")
def setup() -> fq.Setup:
    net, example = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(2, 3)
    return fq.Setup(net, fq.Structure.trace(net, example), example, (), 1, 0)


def trained(client: int, rounds: int) -> ClientScore:
    return ClientScore(client, "", 0.5, rounds, 10.5, 42.0, 7.5, None)


def test_own_nets_cost_what_they_are_and_others_what_was_trained(setup):
    chosen = {2: setup.structure.subnet(0.5).leaving("*.bias")}
    scores = [trained(3, 4), trained(2, 4), trained(1, 0), trained(0, 1)]
    found = client_nets(setup, chosen, scores, {2: POOR, 3: RICH})
    assert found == [
        ClientNet(0, None, 10.5, 7.5, 42.0),
        ClientNet(2, POOR, 3 * 4 + 4 + 2 * 4 + 2, 5 * 4, 4 * (3 * 4 + 2 * 4)),  # biases stay
        ClientNet(3, RICH, 10.5, 7.5, 42.0),
    ]


def test_mean_costs_count_every_client_once():
    nets = [ClientNet(0, RICH, 1.0, 10.0, 4.0), ClientNet(1, POOR, 2.0, 40.0, 5.0)]
    assert mean_costs(nets) == {"params": 1.5, "macs": 25.0, "bytes": 4.5}
    assert mean_costs([]) == {}
