"""Clients' own nets, against numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.evaluation.accuracy import compute_ensemble_cost
from fedquilt.evaluation.architectures import (
    ClientNet,
    Compression,
    Distance,
    KeepRate,
    compute_client_nets,
    compute_compressions,
    compute_correlation,
    compute_distances,
    compute_keep_rates,
    compute_layer_costs,
    compute_mean_costs,
    compute_mean_fractions,
    describe_architectures,
    list_cut_layers,
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
    return fq.trace_structure(Tiny(), torch.zeros(2, 1, 5, 5))


def kept(stem: int = 8, project: int = 4, expand: int = 8) -> Subnet:
    """A subnet of the last channels, so that counts are no positions."""
    sizes = {"stem": (stem, 8), "project": (project, 4), "block.expand": (expand, 8)}
    channels = {group: range(n - count, n) for group, (count, n) in sizes.items() if count < n}
    return Subnet.from_channels(channels)


def test_layers_are_those_that_make_channels(structure):
    weights = ["stem.weight", "project.weight", "block.expand.weight", "block.reduce.weight"]
    assert list_cut_layers(structure) == weights  # the stem has one input too, and is not depthwise


def test_mobilenet_has_34_layers_besides_the_inputs_of_its_classifier():
    net = MobileNetV2(multiplier=0.25, head=16)
    structure = fq.trace_structure(net, torch.zeros(2, 3, 32, 32))
    found = list_cut_layers(structure)
    assert (found[-1], len(found[:-1])) == ("head.0.weight", 34)
    convolutions = dict(net.named_modules())
    assert all(convolutions[name.removesuffix(".weight")].groups == 1 for name in found)


def test_ratios_are_kept_channels_of_all(structure):
    first, second = describe_architectures(
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
    whole, home = kept(stem=2), kept(stem=2).excluding("*").with_private("own", "*.bias")
    one, other = describe_architectures(structure, {0: whole, 1: home})
    assert (one.groups, one.channels) == (other.groups, other.channels)


def test_a_skipped_block_keeps_nothing_but_what_others_share(structure):
    (block,) = structure.blocks
    (net,) = describe_architectures(structure, {0: kept(project=2).without_blocks(block)})
    assert net.channels == {"stem": 8, "project": 2, "block.expand": 0, "block.reduce": 0}
    assert net.groups == {"stem": 1.0, "project": 0.5, "block.expand": 0.0}


def test_distances_are_means_over_pairs_of_l2_over_layers(structure):
    chosen = {0: kept(), 1: kept(stem=4, expand=5), 2: kept(project=1)}
    found = compute_distances(
        describe_architectures(structure, chosen, {0: RICH, 1: RICH, 2: POOR})
    )
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
    alone = compute_distances(describe_architectures(structure, {0: kept()}, {0: RICH}))
    assert (alone.same_budget, alone.all_pairs) == (None, None)
    unknown = compute_distances(describe_architectures(structure, {0: kept(), 1: kept()}))
    assert unknown.same_budget is None  # nobody knows that they can afford the same
    assert unknown.all_pairs == Distance(1, 0.0, 0.0)


# what they keep of every layer


def test_rates_are_means_over_clients_in_the_models_order(structure):
    nets = describe_architectures(
        structure, {0: kept(), 1: kept(stem=2), 5: kept(stem=4, project=1)}
    )
    stem, project, expand = compute_keep_rates(structure, nets)
    assert (stem.group, stem.size, project.group, expand.group) == (
        "stem", 8, "project", "block.expand",
    )  # fmt: skip
    assert stem.mean == pytest.approx((1 + 0.25 + 0.5) / 3)
    assert stem.spread == pytest.approx(math.sqrt((1 + 0.0625 + 0.25) / 3 - (1.75 / 3) ** 2))
    assert project.mean == pytest.approx((1 + 1 + 0.25) / 3)
    assert expand == KeepRate("block.expand", 8, 1.0, 0.0)
    assert compute_keep_rates(structure, []) == []


def test_layers_cost_what_is_left_of_them_in_the_mean(structure):
    setup = fq.Setup(Tiny(), structure, torch.zeros(2, 1, 5, 5), (), 1, 0)
    chosen = {0: kept(stem=2), 1: kept(), 2: kept(stem=2).excluding("*").with_private("own", "*")}
    found = {layer.layer: layer for layer in compute_layer_costs(setup, chosen)}
    names = ["stem", "alone", "project", "block.expand", "block.alone", "block.reduce", "out"]
    assert list(found) == names
    stem = found["stem"]  # 3x3 weights and a bias for each of 8 or 2 channels, at 3x3 places
    assert (stem.whole_params, stem.params) == (80, pytest.approx((20 + 80 + 20) / 3))
    assert (stem.whole_macs, stem.macs) == (648, pytest.approx((162 + 648 + 162) / 3))
    assert found["project"].params == pytest.approx((2 * 4 + 4 + 8 * 4 + 4 + 2 * 4 + 4) / 3)
    assert found["out"].params == found["out"].whole_params == 15


@pytest.mark.parametrize("skips", [False, True])
def test_layers_together_cost_what_the_nets_do(structure, skips):
    setup = fq.Setup(Tiny(), structure, torch.zeros(2, 1, 5, 5), (), 1, 0)
    chosen = {0: kept(stem=3, expand=5), 1: kept(project=2), 2: kept(stem=7)}
    if skips:
        chosen[1] = chosen[1].without_blocks(*structure.blocks)
    found = compute_layer_costs(setup, chosen)
    prices = [compute_ensemble_cost(setup, (subnet,)) for subnet in chosen.values()]
    assert sum(layer.params for layer in found) == pytest.approx(sum(p.params for p in prices) / 3)
    assert sum(layer.macs for layer in found) == pytest.approx(sum(p.macs for p in prices) / 3)
    whole = compute_ensemble_cost(setup, (Subnet(),))
    assert sum(layer.whole_params for layer in found) == whole.params
    assert sum(layer.whole_macs for layer in found) == whole.macs
    assert compute_layer_costs(setup, {}) == []


def test_normalisation_is_no_layer_and_all_weights_of_a_recurrent_one_are_one():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.hidden = nn.Linear(4, 6)
            self.norm = nn.LayerNorm(6)
            self.out = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            states, _ = self.lstm(x)
            return self.out(self.norm(self.hidden(states[:, -1]).relu()))

    net, example = Reader(), torch.zeros(2, 5, 3)
    structure = fq.trace_structure(net, example, exclude=("lstm",))
    setup = fq.Setup(net, structure, example, (), 1, 0)
    lstm, hidden, out = compute_layer_costs(setup, {0: Subnet.from_channels({"hidden": [1, 4]})})
    assert (lstm.layer, lstm.params, lstm.macs) == ("lstm", 4 * 4 * (3 + 4 + 2), 5 * 4 * 4 * 7)
    assert (hidden.whole_params, hidden.params) == (30, 10)
    assert (out.whole_macs, out.macs) == (12, 4)


# how small they are, and what their labels are like


def test_compression_is_the_share_of_parameters_of_nets_whose_labels_are_known(setup):
    chosen = {
        4: Subnet.from_channels({"0": [3]}),
        1: setup.structure.subnet(0.5).excluding("*"),
        2: Subnet(),
    }
    found = compute_compressions(setup, chosen, {1: 0.25, 4: 0.75, 7: 0.5})
    assert found == [Compression(1, 26 / 50, 0.25), Compression(4, 8 / 50, 0.75)]


@pytest.mark.parametrize(
    ("shares", "divergences", "expected"),
    [
        ((0.5, 0.25, 0.75), (0.2, 0.3, 0.1), -1.0),
        ((0.1, 0.2, 0.3, 0.4), (1.0, 3.0, 2.0, 5.0), 5.5 / math.sqrt(5 * 8.75)),
        ((0.5, 0.5), (0.2, 0.3), None),
        ((0.4, 0.5), (0.2, 0.2), None),
        ((0.4,), (0.2,), None),
        ((), (), None),
    ],
)
def test_correlation_is_pearsons(shares, divergences, expected):
    points = [Compression(0, s, d) for s, d in zip(shares, divergences, strict=True)]
    found = compute_correlation(points)
    assert found == (None if expected is None else pytest.approx(expected))


# what nets cost


@pytest.fixture(scope="module")
def setup() -> fq.Setup:
    net, example = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(2, 3)
    return fq.Setup(net, fq.trace_structure(net, example), example, (), 1, 0)


def trained(client: int, rounds: int) -> ClientScore:
    return ClientScore(client, "", 0.5, rounds, 10.5, 42.0, 11.5, 7.5, None)


def test_own_nets_cost_what_they_are_and_others_what_was_trained(setup):
    chosen = {2: setup.structure.subnet(0.5).excluding("*.bias")}
    scores = [trained(3, 4), trained(2, 4), trained(1, 0), trained(0, 1)]
    found = compute_client_nets(setup, chosen, scores, {2: POOR, 3: RICH})
    assert found == [
        ClientNet(0, None, 10.5, 7.5, 42.0),
        ClientNet(2, POOR, 3 * 4 + 4 + 2 * 4 + 2, 5 * 4, 4 * (3 * 4 + 2 * 4)),  # biases stay
        ClientNet(3, RICH, 10.5, 7.5, 42.0),
    ]


def test_mean_costs_count_every_client_once():
    nets = [ClientNet(0, RICH, 1.0, 10.0, 4.0), ClientNet(1, POOR, 2.0, 40.0, 5.0)]
    assert compute_mean_costs(nets) == {"params": 1.5, "macs": 25.0, "bytes": 4.5}
    assert compute_mean_costs([]) == {}


def test_mean_shares_are_of_the_whole_model(setup):
    nets = [ClientNet(0, RICH, 25.0, 20.0, 100.0), ClientNet(1, POOR, 50.0, 40.0, 60.0)]
    assert compute_mean_fractions(setup, nets) == {"params": 0.75, "macs": 0.75, "bytes": 0.4}
    assert compute_mean_fractions(setup, []) == {}
