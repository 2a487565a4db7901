"""Makes the figures of a report that show the architectures and costs of subnets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedquilt.evaluation.architectures import (
    Architecture,
    ClientNet,
    Compression,
    Distance,
    Distances,
    KeepRate,
    LayerCost,
    compute_correlation,
    compute_mean_costs,
)
from fedquilt.figures.figure import Bars, Figure, Grid, Lines
from fedquilt.formatting import format_si, list_values
from fedquilt.structure.budget import Budget

MAX_BUDGETS = 8  # that bars are drawn for


def plot_by_block(title: str, y: str, sizes: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """A value of every block, one series for each size; 0 for blocks that a size skips."""
    labels = tuple(dict.fromkeys(block for blocks in sizes.values() for block in blocks))
    if not labels:
        return []
    series = {f"x{s}": [blocks.get(b, 0.0) for b in labels] for s, blocks in sizes.items()}
    return [Bars(title, y, labels, series)]


def plot_by_layer(
    name: str, nets: Sequence[Architecture], distances: Distances | None
) -> list[Figure]:
    """The channels of every width group that clients' subnets keep (APFL, Fig. 3).

    Clients of one budget stand together. Rows are groups, so that their names are readable.
    """
    groups = tuple(dict.fromkeys(group for net in nets for group in net.groups))
    if all(share == 1 for net in nets for share in net.groups.values()):
        return []
    budgets = _sort_budgets(net.budget for net in nets)
    nets = sorted(nets, key=lambda net: (budgets.index(net.budget), net.client))
    bands = [
        (_describe_budget(budget), sum(n.budget == budget for n in nets)) for budget in budgets
    ]
    return [
        Grid(
            f"Architectures of {name}",
            "client",
            "kept channels (%)",
            groups,
            tuple(str(net.client) for net in nets),
            [[100 * net.groups[group] for net in nets] for group in groups],
            bands if 2 * len(bands) <= len(nets) else (),  # not if most budgets differ
            _describe_distances(distances),
        )
    ]


def plot_keep_rates(name: str, rates: Sequence[KeepRate]) -> list[Figure]:
    """The fraction of each width group that clients' subnets keep (ADDS, Fig. 5)."""
    if all(rate.mean == 1 for rate in rates):
        return []
    return [
        Bars(
            f"Sampling rates of {name}",
            "kept channels (%)",
            tuple(rate.group for rate in rates),
            {"mean over clients": [100 * rate.mean for rate in rates]},
            {"mean over clients": [100 * rate.spread for rate in rates]},
            "Lines are one standard deviation over clients up and down.",
        )
    ]


def plot_layer_costs(name: str, layers: Sequence[LayerCost]) -> list[Figure]:
    """What sampling saves in each layer (ADDS, Fig. 5)."""
    if all(layer.params == layer.whole_params for layer in layers):
        return []
    figures: list[Figure] = []
    for title, y, cost in (
        ("Parameters", "parameters (M)", "params"),
        ("MACs", "MACs, one example (M)", "macs"),
    ):
        whole = [getattr(layer, f"whole_{cost}") / 1e6 for layer in layers]
        mean = [getattr(layer, cost) / 1e6 for layer in layers]
        total = format_si(1e6 * sum(mean)), format_si(1e6 * sum(whole))
        figures.append(
            Bars(
                f"{title} by layer of {name}",
                y,
                tuple(layer.layer for layer in layers),
                {"supernet": whole, "clients' nets, in the mean": mean},
                caption="All together: {} of {}.".format(*total),
            )
        )
    return figures


def plot_by_divergence(runs: Mapping[str, Sequence[Compression]]) -> list[Figure]:
    """The size of clients' subnets against the divergence of their labels (ADDS, Fig. 8)."""
    runs = {n: points for n, points in runs.items() if len({p.share for p in points}) > 1}
    if not runs:
        return []
    correlations = []
    for name, points in runs.items():
        value = compute_correlation(points)
        text = "none" if value is None else f"{value:.2f}"
        correlations.append(f"{name} {text} over {len(points)} clients")
    return [
        Lines(
            "Compression against the divergence of labels",
            "Jensen-Shannon divergence of labels from uniform",
            "parameters of the supernet (%)",
            {n: [(p.divergence, 100 * p.share) for p in points] for n, points in runs.items()},
            is_linear=True,
            is_joined=False,
            caption=f"Correlation: {', '.join(correlations)}.",
        )
    ]


def _describe_distances(distances: Distances | None) -> str:
    if distances is None or distances.all_pairs is None:
        return ""

    def describe(distance: Distance, pairs: str) -> str:
        return (
            f"{distance.channels:,.1f} channels, or {distance.ratios:.2f} in shares of layers, "
            f"over {pairs} ({distance.pairs})"
        )

    same = distances.same_budget
    parts = [describe(same, "pairs of the same budget")] if same else []
    parts.append(describe(distances.all_pairs, "all pairs"))
    return f"Mean L2 distance between two clients' architectures: {'; '.join(parts)}."


def plot_by_cost(runs: Mapping[str, Sequence[ClientNet]]) -> list[Figure]:
    """The mean cost of clients' subnets, over all and for each budget (APFL, Fig. 5)."""
    runs = {name: nets for name, nets in runs.items() if nets}
    budgets = _sort_budgets(net.budget for nets in runs.values() for net in nets)
    if not budgets:
        return []
    shown = budgets if 1 < len(budgets) <= MAX_BUDGETS else []
    means = {
        name: [
            compute_mean_costs(nets),
            *(
                compute_mean_costs([net for net in nets if net.budget == budget])
                for budget in shown
            ),
        ]
        for name, nets in runs.items()
    }
    costs = {
        "params": ("Parameters of clients' nets", "parameters (M)", ""),
        "macs": ("MACs of clients' nets", "MACs, one example (M)", ""),
        "bytes": ("Upload of clients' nets", "upload of a round (MB)", "B"),
    }
    return [
        Bars(
            title,
            y,
            ("all clients", *map(_describe_budget, shown)),
            {run: [mean.get(cost, 0.0) / 1e6 for mean in listed] for run, listed in means.items()},
            caption=list_values(
                "In the mean over clients", {r: m[0][cost] for r, m in means.items()}, unit
            ),
        )
        for cost, (title, y, unit) in costs.items()
    ]


def _sort_budgets(budgets: Iterable[Budget | None]) -> list[Budget | None]:
    """Each budget once, the largest first; unknown ones come last."""
    return sorted(set(budgets), key=lambda b: (0.0,) if b is None else b.limits, reverse=True)


def _describe_budget(budget: Budget | None) -> str:
    """A budget, one limit a line; a width of 1 is left out where there are other limits."""
    if budget is None:
        return ""
    units = {"params": "M params", "macs": "M MACs", "memory": "MB memory", "upload": "MB upload"}
    lines = [f"width {budget.width:g}"] if budget.width < 1 or budget.is_width_alone else []
    limits = {units[name]: getattr(budget, name) for name in units}
    lines += [f"{limit / 1e6:.3g} {unit}" for unit, limit in limits.items() if limit is not None]
    return "\n".join(lines)
