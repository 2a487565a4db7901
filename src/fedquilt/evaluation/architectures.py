"""The nets that clients chose for themselves: their layers, how much they differ, what they cost.

What APFL's paper plots (Luo et al., 2021, Sec. 5.3 and 5.4): shrink ratios of layers (Fig. 3), the
L2 distance between architectures θ, parameters and MACs of clients' nets (Fig. 5).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedquilt.evaluation.accuracy import cost_of
from fedquilt.evaluation.clients import ClientScore
from fedquilt.federation.state import Setup
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import shapes
from fedquilt.structure.groups import Structure, following
from fedquilt.structure.subnet import Subnet


@dataclass(frozen=True)
class Architecture:
    """A client's own net: which part of every width group and layer it keeps.

    Layers whose outputs are added to each other follow one group: they shrink together.
    """

    client: int
    budget: Budget | None  # None if nobody said
    groups: Mapping[str, float]  # kept channels / channels of the supernet
    layers: Mapping[str, float]  # the same of each layer's outputs
    channels: Mapping[str, int]  # θ: the outputs of each layer


def architectures(
    structure: Structure,
    chosen: Mapping[int, Subnet],
    budgets: Mapping[int, Budget] | None = None,
) -> list[Architecture]:
    """The architecture of every client that chose one, by clients' numbers.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> axes = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
    >>> structure = Structure.declare(net, axes)
    >>> architectures(structure, {7: structure.subnet(0.75)})[0].channels
    {'0': 6}
    """
    sizes = {name: structure.shapes[name][0] for name in layers(structure)}
    found = []
    for client, subnet in sorted(chosen.items()):
        there = shapes(structure, subnet.shape)
        kept = {name: there[name][0] if name in there else 0 for name in sizes}
        found.append(
            Architecture(
                client,
                (budgets or {}).get(client),
                {group: _share(structure, subnet, group) for group in structure.cut_groups()},
                {_layer(name): kept[name] / size for name, size in sizes.items()},
                {_layer(name): count for name, count in kept.items()},
            )
        )
    return found


def layers(structure: Structure) -> list[str]:
    """The weights of the layers whose outputs may be cut, in the model's order.

    These are tensors of two axes or more whose first axis follows a group that is cut. A depthwise
    convolution is none of them, since the layer before it decides its channels: it has one input
    for each output, and an earlier weight has made them. (One input alone would not tell: so has
    the first layer of a net for grey images.) A transposed convolution counts with its inputs,
    which are its first axis.
    """
    cut, made, found = set(structure.cut_groups()), set[str](), []
    for name, axes in structure.axes.items():
        if len(axes) < 2:
            continue
        outputs = {s.group for s in axes[0] or () if s.group is not None} & cut
        if outputs and (structure.shapes[name][1] > 1 or not outputs <= made):
            found.append(name)
        made |= outputs
    return found


def _layer(weight: str) -> str:
    return weight.removesuffix(".weight")


def _share(structure: Structure, subnet: Subnet, group: str) -> float:
    """The part of a group that is kept; nothing of a group that is in skipped blocks alone."""
    if structure.gone(subnet).issuperset(following(structure)[group]):
        return 0.0
    return structure.kept(subnet, group) / structure.groups[group].size


@dataclass(frozen=True)
class Distance:
    """How far two clients' architectures are apart: L2 over layers, in the mean over pairs."""

    pairs: int
    channels: float  # of numbers of channels, which are θ in the paper: wide layers dominate
    ratios: float  # of shrink ratios: all layers count alike


@dataclass(frozen=True)
class Distances:
    """Distances between clients that can afford the same, and between any two.

    The paper compares clients of one budget: what differs there is due to their data. None where
    there is no pair.
    """

    same_budget: Distance | None
    all_pairs: Distance | None


def distances(nets: Sequence[Architecture]) -> Distances:
    """How much architectures differ."""
    pairs = list(itertools.combinations(nets, 2))
    alike = [(a, b) for a, b in pairs if a.budget is not None and a.budget == b.budget]
    return Distances(_distance(alike), _distance(pairs))


def _distance(pairs: Sequence[tuple[Architecture, Architecture]]) -> Distance | None:
    if not pairs:
        return None
    return Distance(
        len(pairs),
        sum(_l2(a.channels, b.channels) for a, b in pairs) / len(pairs),
        sum(_l2(a.layers, b.layers) for a, b in pairs) / len(pairs),
    )


def _l2(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    return math.dist(list(one.values()), [other[name] for name in one])


@dataclass(frozen=True)
class ClientNet:
    """What a client's net costs it."""

    client: int
    budget: Budget | None
    params: float
    macs: float  # forward, of one example
    bytes: float  # sent up in a round


def client_nets(
    setup: Setup,
    chosen: Mapping[int, Subnet],
    scores: Iterable[ClientScore] = (),
    budgets: Mapping[int, Budget] | None = None,
) -> list[ClientNet]:
    """The cost of every client's own net, by clients' numbers (Fig. 5).

    A client that chose none is taken with what it trained in a round, in the mean, as ``scores``
    tell; so methods can be put side by side. Who never took part has no net.
    """
    known, found = budgets or {}, []
    for client, subnet in chosen.items():
        price = cost_of(setup, (subnet,))
        found.append(ClientNet(client, known.get(client), price.params, price.macs, price.bytes))
    for score in scores:
        if score.client not in chosen and score.rounds:
            spent = (score.params_per_round, score.macs, score.bytes_per_round)
            found.append(ClientNet(score.client, known.get(score.client), *spent))
    return sorted(found, key=lambda net: net.client)


def mean_costs(nets: Sequence[ClientNet]) -> dict[str, float]:
    """Parameters, MACs and bytes, in the mean over clients; nothing without any."""
    names = ("params", "macs", "bytes") if nets else ()
    return {name: sum(getattr(net, name) for net in nets) / len(nets) for name in names}
