"""The nets that clients chose for themselves: their layers, how much they differ, what they cost.

What APFL's paper plots (Luo et al., 2021, Sec. 5.3 and 5.4): shrink ratios of layers (Fig. 3), the
L2 distance between architectures θ, parameters and MACs of clients' nets (Fig. 5). And ADDS's (Gong
et al., Sec. 4.4): sampling rates of layers and what they save (Fig. 5), compression against the
divergence of labels (Fig. 8).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedquilt.evaluation.accuracy import compute_ensemble_cost
from fedquilt.evaluation.clients import ClientScore
from fedquilt.federation.state import Setup
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import count_macs_by_layer
from fedquilt.structure.cut import compute_shapes
from fedquilt.structure.structure import Structure, map_followers
from fedquilt.structure.subnet import Subnet

COSTS = ("params", "macs", "bytes")


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


def describe_architectures(
    structure: Structure,
    chosen: Mapping[int, Subnet],
    budgets: Mapping[int, Budget] | None = None,
) -> list[Architecture]:
    """The architecture of every client that chose one, by clients' numbers.

    >>> from fedquilt.structure.create import declare_structure
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> axes = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
    >>> structure = declare_structure(net, axes)
    >>> describe_architectures(structure, {7: structure.subnet(0.75)})[0].channels
    {'0': 6}
    """
    sizes = {name: structure.shapes[name][0] for name in list_cut_layers(structure)}
    found = []
    for client, subnet in sorted(chosen.items()):
        there = compute_shapes(structure, subnet.shape)
        kept = {name: there[name][0] if name in there else 0 for name in sizes}
        found.append(
            Architecture(
                client,
                (budgets or {}).get(client),
                {group: _share(structure, subnet, group) for group in structure.cut_groups()},
                {_find_layer(name): kept[name] / size for name, size in sizes.items()},
                {_find_layer(name): count for name, count in kept.items()},
            )
        )
    return found


def list_cut_layers(structure: Structure) -> list[str]:
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


def _find_layer(weight: str) -> str:
    return weight.removesuffix(".weight")


def _share(structure: Structure, subnet: Subnet, group: str) -> float:
    """The part of a group that is kept; nothing of a group that is in skipped blocks alone."""
    if structure.dropped_tensors(subnet).issuperset(map_followers(structure)[group]):
        return 0.0
    return structure.kept_count(subnet, group) / structure.groups[group].size


@dataclass(frozen=True)
class KeepRate:
    """The part of a width group's channels that clients' own nets keep."""

    group: str
    size: int  # channels of the supernet
    mean: float  # over clients
    spread: float  # standard deviation over clients


def compute_keep_rates(structure: Structure, nets: Sequence[Architecture]) -> list[KeepRate]:
    """How much of every width group clients keep, in the model's order (ADDS, Fig. 5)."""
    found = []
    for group in structure.cut_groups() if nets else ():
        shares = [net.groups[group] for net in nets]
        size = structure.groups[group].size
        found.append(KeepRate(group, size, statistics.fmean(shares), statistics.pstdev(shares)))
    return found


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs in the supernet, and in the mean over clients' own nets."""

    layer: str
    whole_params: int
    params: float
    whole_macs: int  # forward, of one example
    macs: float


def compute_layer_costs(setup: Setup, chosen: Mapping[int, Subnet]) -> list[LayerCost]:
    """What sampling saves in every layer, in the model's order (ADDS, Fig. 5).

    Layers are modules with a weight of two axes or more: normalization is none. MACs of a layer
    grow with the cells of these weights.
    """
    structure, nets = setup.structure, Counter(subnet.shape for subnet in chosen.values())
    macs = count_macs_by_layer(setup.model, structure, setup.example) if nets else {}
    found = []
    for layer, names in _group_weights_by_layer(setup).items() if nets else ():
        large = [name for name in names if len(structure.shapes[name]) > 1]
        whole, used = macs.get(layer, 0), _count_cells(structure, Subnet(), large)
        cells = (
            sum(n * _count_cells(structure, net, large) for net, n in nets.items()) / nets.total()
        )
        params = (
            sum(n * _count_cells(structure, net, names) for net, n in nets.items()) / nets.total()
        )
        found.append(
            LayerCost(
                layer, _count_cells(structure, Subnet(), names), params, whole, whole * cells / used
            )
        )
    return found


def _group_weights_by_layer(setup: Setup) -> dict[str, list[str]]:
    """Modules with a weight of two axes or more, and all parameters of their own."""
    found: dict[str, list[str]] = {}
    large = set[str]()
    for name, weight in setup.model.named_parameters():
        layer = name.rpartition(".")[0] or name
        found.setdefault(layer, []).append(name)
        large.update({layer} if weight.ndim > 1 else ())
    return {layer: names for layer, names in found.items() if layer in large}


def _count_cells(structure: Structure, subnet: Subnet, names: Sequence[str]) -> int:
    there = compute_shapes(structure, subnet)
    return sum(math.prod(there[name]) for name in names if name in there)


@dataclass(frozen=True)
class Compression:
    """How small a client's own net is, and how far its labels are from uniform."""

    client: int
    share: float  # parameters of its net / of the supernet
    divergence: float  # Jensen-Shannon, in [0, 1]


def compute_compressions(
    setup: Setup, chosen: Mapping[int, Subnet], divergences: Mapping[int, float]
) -> list[Compression]:
    """Every client that chose a net and whose labels are known (ADDS, Fig. 8)."""
    names = [name for name, _ in setup.model.named_parameters()]
    whole = _count_cells(setup.structure, Subnet(), names)
    return [
        Compression(
            client, _count_cells(setup.structure, subnet.shape, names) / whole, divergences[client]
        )
        for client, subnet in sorted(chosen.items())
        if client in divergences
    ]


def compute_correlation(points: Sequence[Compression]) -> float | None:
    """Pearson's, between share and divergence; None where one of them does not vary."""
    pairs = [(point.share, point.divergence) for point in points]
    if any(len(set(values)) < 2 for values in zip(*pairs, strict=True)) or not pairs:
        return None
    return statistics.correlation(*zip(*pairs, strict=True))


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


def compute_distances(nets: Sequence[Architecture]) -> Distances:
    """How much architectures differ."""
    pairs = list(itertools.combinations(nets, 2))
    alike = [(a, b) for a, b in pairs if a.budget is not None and a.budget == b.budget]
    return Distances(_compute_distance(alike), _compute_distance(pairs))


def _compute_distance(pairs: Sequence[tuple[Architecture, Architecture]]) -> Distance | None:
    if not pairs:
        return None
    return Distance(
        len(pairs),
        sum(_compute_l2(a.channels, b.channels) for a, b in pairs) / len(pairs),
        sum(_compute_l2(a.layers, b.layers) for a, b in pairs) / len(pairs),
    )


def _compute_l2(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    return math.dist(list(one.values()), [other[name] for name in one])


@dataclass(frozen=True)
class ClientNet:
    """What a client's net costs it."""

    client: int
    budget: Budget | None
    params: float
    macs: float  # forward, of one example
    bytes: float  # sent up in a round


def compute_client_nets(
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
        price = compute_ensemble_cost(setup, (subnet,), memory=False)
        found.append(ClientNet(client, known.get(client), price.params, price.macs, price.bytes))
    for score in scores:
        if score.client not in chosen and score.rounds:
            spent = (score.params_per_round, score.macs, score.bytes_per_round)
            found.append(ClientNet(score.client, known.get(score.client), *spent))
    return sorted(found, key=lambda net: net.client)


def compute_mean_costs(nets: Sequence[ClientNet]) -> dict[str, float]:
    """Parameters, MACs and bytes, in the mean over clients; nothing without any."""
    names = COSTS if nets else ()
    return {name: sum(getattr(net, name) for net in nets) / len(nets) for name in names}


def compute_mean_fractions(setup: Setup, nets: Sequence[ClientNet]) -> dict[str, float]:
    """The same as parts of what the whole model costs (ADDS, Table 3)."""
    whole = compute_ensemble_cost(setup, (Subnet(),), memory=False)
    return {
        name: mean / max(getattr(whole, name), 1) for name, mean in compute_mean_costs(nets).items()
    }
