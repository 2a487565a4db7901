"""Pictures of runs, from plain data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.architectures import (
    Architecture,
    ClientNet,
    Compression,
    Distance,
    Distances,
    LayerCost,
    Rate,
    correlation,
    mean_costs,
)
from fedquilt.evaluation.clients import ClientScore
from fedquilt.evaluation.summary import SCORES, common_score, main_accuracy
from fedquilt.report.density import counted, smoothed
from fedquilt.report.records import (
    LocalTest,
    Milestone,
    bytes_to_reach,
    in_last_phase,
)
from fedquilt.report.tables import percent, prefixed
from fedquilt.structure.budget import Budget

MOST_BUDGETS = 8  # that bars are drawn for
MOST_LEVEL = 8  # names below bars that are nearly level; more of them stand upright
Curve = Sequence[tuple[float, float]]  # x and y of each point


@dataclass(frozen=True)
class Lines:
    """A picture of curves, by name."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    is_linear: bool = False  # also where x grows by orders of magnitude
    is_joined: bool = True  # False: points alone
    caption: str = ""


@dataclass(frozen=True)
class Bars:
    """A picture of bars: for each series, a value for each place."""

    title: str
    y: str
    places: tuple[str, ...]
    series: Mapping[str, Sequence[float]]
    spread: Mapping[str, Sequence[float]] = field(default_factory=dict)  # up and down, if known
    caption: str = ""


@dataclass(frozen=True)
class Boxes:
    """A picture of how values spread over clients: one box for each name, panels side by side."""

    title: str
    panels: Mapping[str, Mapping[str, Sequence[float]]]
    caption: str = ""


@dataclass(frozen=True)
class Grid:
    """A picture of percentages as colours, in rows and columns.

    ``bands`` are neighbouring columns that belong together: their name, and how many.
    """

    title: str
    x: str
    values_are: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Sequence[Sequence[float]]  # of every row, a value for each column
    bands: Sequence[tuple[str, int]] = ()
    caption: str = ""


@dataclass(frozen=True)
class Densities:
    """A picture of how percentages lie: bars, a smooth curve, and a stroke for every one."""

    title: str
    x: str
    values: Mapping[str, Sequence[float]]
    caption: str = ""


Figure = Lines | Bars | Boxes | Grid | Densities


def by_size(
    runs: Mapping[str, Sequence[SizeScore]], names: Collection[str] = ("width",)
) -> list[Figure]:
    """Accuracy against parameters, MACs and size (Split-Mix, Table 1).

    ``names`` are those of the runs' sizes. Parameters are what all runs can be compared by; against
    sizes there is a picture only where these mean the same.
    """
    against = {"params": "parameters", "macs": "MACs, one example"}
    if len(names) == 1:
        against["width"] = next(iter(names))
    accuracy = _shown_accuracy([score for scores in runs.values() for score in scores])
    return [
        Lines(
            f"Accuracy against {label}",
            label,
            accuracy.label,
            {name: _points(scores, attribute, accuracy) for name, scores in runs.items()},
        )
        for attribute, label in against.items()
    ]


def _points(scores: Sequence[SizeScore], attribute: str, accuracy: _Accuracy) -> Curve:
    return sorted(
        (float(getattr(score, attribute)), 100 * value)
        for score in scores
        if not score.robustness and (value := accuracy.of(score)) is not None
    )


@dataclass(frozen=True)
class _Accuracy:
    """The accuracy that a picture shows: one that all of its runs have."""

    label: str
    of: Callable[[SizeScore], float | None]


def _shown_accuracy(scores: Sequence[SizeScore]) -> _Accuracy:
    name = common_score(scores)
    if name is None:
        return _Accuracy("accuracy (%), where it is known", main_accuracy)
    return _Accuracy(f"{SCORES[name]} (%)", attrgetter(name))


def trade_off(runs: Mapping[str, Sequence[SizeScore]]) -> list[Figure]:
    """Robust against standard accuracy, one curve for each width (Split-Mix, Fig. 7)."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, scores in runs.items():
        for score in scores:
            clean = score.user_accuracy  # of the clients whose data are attacked
            if score.robust_accuracy is not None and clean is not None:
                curves.setdefault(f"{name} x{score.width:g}", []).append(
                    (100 * clean, 100 * score.robust_accuracy)
                )
    if not curves:
        return []
    return [
        Lines(
            "Robust against standard accuracy",
            "user accuracy (%)",
            "robust accuracy (%)",
            curves,
        )
    ]


def by_clock(runs: Mapping[str, Sequence[Milestone]]) -> Figure:
    """Accuracy of the widest net against seconds of training (Split-Mix, Fig. 9)."""
    accuracy = _shown_accuracy([m.score for progress in runs.values() for m in progress])
    return Lines(
        "Accuracy of the largest net against wall-clock time",
        "seconds",
        accuracy.label,
        {
            name: [
                (milestone.seconds, 100 * value)
                for milestone in progress
                if (value := accuracy.of(milestone.score)) is not None
            ]
            for name, progress in runs.items()
        },
        is_linear=True,
    )


def by_round(
    runs: Mapping[str, Sequence[Milestone]], local: Mapping[str, Sequence[LocalTest]]
) -> list[Figure]:
    """Accuracy of the widest net, and of clients' own models, against rounds (ADDS, Fig. 4)."""
    accuracy = _shown_accuracy([m.score for progress in runs.values() for m in progress])
    known = {n: [(m.round, accuracy.of(m.score)) for m in ms] for n, ms in runs.items()}
    shared = {n: [(r, 100 * a) for r, a in pairs if a is not None] for n, pairs in known.items()}
    own = {n: [(test.round, 100 * test.accuracy) for test in tests] for n, tests in local.items()}
    return [
        Lines(f"Accuracy of {whose} against rounds", "round", y, curves, is_linear=True)
        for whose, y, curves in (
            ("the largest net", accuracy.label, shared),
            ("clients' own models", "accuracy before merging (%)", own),
        )
        if any(curves.values())
    ]


def by_density(local: Mapping[str, Mapping[int, float]]) -> list[Figure]:
    """How the accuracies of clients' own models lie (ADDS, Fig. 4)."""
    values = {name: [100 * a for a in found.values()] for name, found in local.items() if found}
    if not values:
        return []
    means = ", ".join(f"{name} {fmean(v):.1f}% ± {pstdev(v):.1f}%" for name, v in values.items())
    return [
        Densities(
            "Clients' own models, each on its own test data",
            "accuracy before merging (%)",
            values,
            f"Mean and standard deviation over clients, the last time each was tested: {means}.",
        )
    ]


def by_traffic(runs: Mapping[str, Sequence[Milestone]]) -> list[Figure]:
    """Accuracy of the widest net, and of clients' own, against bytes (APFL, Fig. 4)."""
    most = max((m.bytes for progress in runs.values() for m in progress), default=0)
    unit, factor = next(((u, f) for u, f in (("GB", 1e9), ("MB", 1e6)) if most >= f), ("kB", 1e3))
    accuracy = _shown_accuracy([m.score for progress in runs.values() for m in progress])
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, progress in runs.items():
        for milestone in progress:
            shown = {name: accuracy.of(milestone.score)}
            shown[f"{name}, own nets"] = milestone.score.personal_accuracy
            for curve, value in shown.items():
                if value is not None:
                    point = (milestone.bytes / factor, 100 * value)
                    curves.setdefault(curve, []).append(point)
    if not curves:
        return []
    return [
        Lines(
            "Accuracy of the largest net against communication",
            f"{unit} received and sent by all clients",
            accuracy.label,
            curves,
            is_linear=True,
            caption=_reached(runs, accuracy),
        )
    ]


def _reached(runs: Mapping[str, Sequence[Milestone]], accuracy: _Accuracy) -> str:
    """What it took every run to reach what all of them reach.

    Earlier phases count with their bytes, not with the accuracy of what they train: another net.
    """
    last = {n: in_last_phase(ms) for n, ms in runs.items() if ms}
    best = [max(accuracy.of(m.score) or 0.0 for m in ms) for ms in last.values()]
    spent = {name: bytes_to_reach(ms, min(best), accuracy.of) for name, ms in last.items()}
    reached = {name: sent for name, sent in spent.items() if sent is not None}
    if not len(runs) == len(reached) > 1:
        return ""
    return _listed(f"To reach {percent(min(best))}, as all do", reached, "B")


def by_client(runs: Mapping[str, Sequence[ClientScore]]) -> Figure:
    """How accuracy, MACs and parameters sent spread over clients (Split-Mix, Fig. 5)."""
    return Boxes(
        "Clients",
        {
            "accuracy (%)": {
                n: [100 * c.accuracy for c in clients if c.accuracy is not None]
                for n, clients in runs.items()
            },
            "MACs, one example (M)": {n: [c.macs / 1e6 for c in cs] for n, cs in runs.items()},
            "parameters a round (M)": {
                n: [c.params_per_round / 1e6 for c in cs] for n, cs in runs.items()
            },
        },
    )


def by_group(runs: Mapping[str, Mapping[str, float]]) -> Figure:
    """The share of parameters ever trained by the clients of each group (Split-Mix, Fig. 6)."""
    places = tuple(dict.fromkeys(group for shares in runs.values() for group in shares))
    return Bars(
        "Share of parameters ever trained",
        "share (%)",
        places,
        {n: [100 * shares.get(g, 0.0) for g in places] for n, shares in runs.items()},
    )


def by_block(title: str, y: str, sizes: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """A value of every block, one series for each size; nothing for blocks that it skips."""
    places = tuple(dict.fromkeys(block for blocks in sizes.values() for block in blocks))
    if not places:
        return []
    series = {f"x{s}": [blocks.get(b, 0.0) for b in places] for s, blocks in sizes.items()}
    return [Bars(title, y, places, series)]


def by_layer(name: str, nets: Sequence[Architecture], apart: Distances | None) -> list[Figure]:
    """What clients' own nets keep of every width group (APFL, Fig. 3).

    Clients of one budget stand together. Rows are groups, so that their names can be read and the
    picture grows downwards.
    """
    groups = tuple(dict.fromkeys(group for net in nets for group in net.groups))
    if all(share == 1 for net in nets for share in net.groups.values()):
        return []
    budgets = _richest_first(net.budget for net in nets)
    nets = sorted(nets, key=lambda net: (budgets.index(net.budget), net.client))
    bands = [(_named(budget), sum(n.budget == budget for n in nets)) for budget in budgets]
    return [
        Grid(
            f"Architectures of {name}",
            "client",
            "kept channels (%)",
            groups,
            tuple(str(net.client) for net in nets),
            [[100 * net.groups[group] for net in nets] for group in groups],
            bands if 2 * len(bands) <= len(nets) else (),  # not if everybody's is another
            _distances_told(apart),
        )
    ]


def by_rate(name: str, rates: Sequence[Rate]) -> list[Figure]:
    """The part of each width group that clients' own nets keep (ADDS, Fig. 5)."""
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


def by_layer_cost(name: str, layers: Sequence[LayerCost]) -> list[Figure]:
    """What sampling saves in each layer (ADDS, Fig. 5)."""
    if all(layer.params == layer.whole_params for layer in layers):
        return []
    found: list[Figure] = []
    for title, y, cost in (
        ("Parameters", "parameters (M)", "params"),
        ("MACs", "MACs, one example (M)", "macs"),
    ):
        whole = [getattr(layer, f"whole_{cost}") / 1e6 for layer in layers]
        mean = [getattr(layer, cost) / 1e6 for layer in layers]
        total = prefixed(1e6 * sum(mean)), prefixed(1e6 * sum(whole))
        found.append(
            Bars(
                f"{title} by layer of {name}",
                y,
                tuple(layer.layer for layer in layers),
                {"supernet": whole, "clients' nets, in the mean": mean},
                caption="All together: {} of {}.".format(*total),
            )
        )
    return found


def by_divergence(runs: Mapping[str, Sequence[Compression]]) -> list[Figure]:
    """The size of clients' nets against how far their labels are from uniform (ADDS, Fig. 8)."""
    runs = {n: points for n, points in runs.items() if len({p.share for p in points}) > 1}
    if not runs:
        return []
    told = []
    for name, points in runs.items():
        found = correlation(points)
        known = "none" if found is None else f"{found:.2f}"
        told.append(f"{name} {known} over {len(points)} clients")
    return [
        Lines(
            "Compression against the divergence of labels",
            "Jensen-Shannon divergence of labels from uniform",
            "parameters of the supernet (%)",
            {n: [(p.divergence, 100 * p.share) for p in points] for n, points in runs.items()},
            is_linear=True,
            is_joined=False,
            caption=f"Correlation: {', '.join(told)}.",
        )
    ]


def _distances_told(apart: Distances | None) -> str:
    if apart is None or apart.all_pairs is None:
        return ""

    def told(distance: Distance, who: str) -> str:
        return (
            f"{distance.channels:,.1f} channels, or {distance.ratios:.2f} in shares of layers, "
            f"over {who} ({distance.pairs})"
        )

    parts = [told(apart.same_budget, "pairs of the same budget")] if apart.same_budget else []
    parts.append(told(apart.all_pairs, "all pairs"))
    return f"Mean L2 distance between two clients' architectures: {'; '.join(parts)}."


def by_cost(runs: Mapping[str, Sequence[ClientNet]]) -> list[Figure]:
    """What clients' nets cost, in the mean over all, and over those of a budget (APFL, Fig. 5)."""
    runs = {name: nets for name, nets in runs.items() if nets}
    budgets = _richest_first(net.budget for nets in runs.values() for net in nets)
    if not budgets:
        return []
    several = budgets if 1 < len(budgets) <= MOST_BUDGETS else []
    means = {
        name: [
            mean_costs(nets),
            *(mean_costs([net for net in nets if net.budget == budget]) for budget in several),
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
            ("all clients", *map(_named, several)),
            {run: [mean.get(cost, 0.0) / 1e6 for mean in listed] for run, listed in means.items()},
            caption=_listed(
                "In the mean over clients", {r: m[0][cost] for r, m in means.items()}, unit
            ),
        )
        for cost, (title, y, unit) in costs.items()
    ]


def _listed(what: str, values: Mapping[str, float], unit: str = "") -> str:
    return f"{what}: {', '.join(f'{n} {prefixed(v, unit)}' for n, v in values.items())}."


def _richest_first(budgets: Iterable[Budget | None]) -> list[Budget | None]:
    """Each budget once; what nobody said comes last."""
    return sorted(set(budgets), key=lambda b: (0.0,) if b is None else b.limits, reverse=True)


def _named(budget: Budget | None) -> str:
    """A budget in lines; a width of 1 is no limit where there are others."""
    if budget is None:
        return ""
    words = {"params": "M params", "macs": "M MACs", "memory": "MB memory", "upload": "MB upload"}
    lines = [f"width {budget.width:g}"] if budget.width < 1 or budget.is_width_alone else []
    limits = {words[name]: getattr(budget, name) for name in words}
    lines += [f"{limit / 1e6:.3g} {word}" for word, limit in limits.items() if limit is not None]
    return "\n".join(lines)


def draw(figure: Figure, path: Path) -> None:
    """Writes the picture."""
    figure = replace(figure, **{f.name: plain(getattr(figure, f.name)) for f in fields(figure)})
    with _axes(figure, path) as panels:
        if isinstance(figure, Lines):
            look = {"marker": "o", "linestyle": "-" if figure.is_joined else "none"}
            for name, curve in figure.curves.items():
                panels[0].plot(*zip(*curve, strict=True), label=name, **look) if curve else None
            panels[0].set(xlabel=figure.x, ylabel=figure.y, title=figure.title)
            if all(x > 0 for c in figure.curves.values() for x, _ in c) and not figure.is_linear:
                panels[0].set_xscale("log") if _is_wide(figure) else None
            panels[0].legend(fontsize="small")
        elif isinstance(figure, Bars):
            _draw_bars(panels[0], figure)
        elif isinstance(figure, Grid):
            _draw_grid(panels[0], figure)
        elif isinstance(figure, Densities):
            _draw_densities(panels[0], figure)
        else:
            for panel, (label, boxes) in zip(panels, figure.panels.items(), strict=True):
                kept = {n: values for n, values in boxes.items() if values}
                if kept:
                    panel.boxplot(list(kept.values()), tick_labels=list(kept))
                panel.set(ylabel=label)
                panel.tick_params(axis="x", rotation=30)


def plain(value: Any) -> Any:
    """The same with all texts such that matplotlib draws them as they are.

    Between two dollars it reads formulas, and it leaves out of legends what begins with a stroke.

    >>> plain({"$a$": [1.0], "_b": "c"})
    {'\\\\$a\\\\$': [1.0], ' _b': 'c'}
    """
    if isinstance(value, str):
        return (" " if value.startswith("_") else "") + value.replace("$", r"\$")
    if isinstance(value, Mapping):
        return {plain(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(inner) for inner in value)
    return value


def _is_wide(figure: Lines) -> bool:
    xs = [x for curve in figure.curves.values() for x, _ in curve]
    return max(xs) > 20 * min(xs)


def _draw_bars(panel: Any, figure: Bars) -> None:
    thickness = 0.8 / max(len(figure.series), 1)
    for number, (name, values) in enumerate(figure.series.items()):
        places = [i + number * thickness for i in range(len(values))]
        panel.bar(places, values, thickness, label=name, yerr=figure.spread.get(name))
    middle = thickness * (len(figure.series) - 1) / 2
    panel.set_xticks([i + middle for i in range(len(figure.places))], figure.places)
    panel.tick_params(axis="x", rotation=20 if len(figure.places) <= MOST_LEVEL else 90)
    panel.set(ylabel=figure.y, title=figure.title)
    panel.legend(fontsize="small")


def _draw_densities(panel: Any, figure: Densities) -> None:
    for number, (name, values) in enumerate(figure.values.items()):
        look, bins = {"color": f"C{number}"}, counted(values)
        width = 100 / len(bins)
        heights = [count / len(values) / width for count in bins]
        starts = [width * place for place in range(len(bins))]
        panel.bar(starts, heights, width, align="edge", alpha=0.25, **look)
        panel.plot(*zip(*smoothed(values), strict=True), label=name, **look)
        panel.plot(values, [0.0] * len(values), "|", markersize=14, clip_on=False, **look)
    panel.set(xlabel=figure.x, ylabel="density of clients", title=figure.title, xlim=(0, 100))
    panel.legend(fontsize="small")


def _draw_grid(panel: Any, figure: Grid) -> None:
    image = panel.imshow(figure.values, vmin=0, vmax=100, aspect="auto", cmap="viridis")
    is_crowded = any(len(label) > 2 for label in figure.columns)
    panel.set_xticks(range(len(figure.columns)), figure.columns, rotation=90 * is_crowded)
    panel.set_yticks(range(len(figure.rows)), figure.rows)
    panel.tick_params(labelsize=7)
    panel.set(xlabel=figure.x)
    lines = max((name.count("\n") + 1 for name, _ in figure.bands), default=0)
    panel.set_title(figure.title, pad=8 + 9 * lines)
    start = 0
    for name, count in figure.bands:
        panel.annotate(
            name,
            (start + (count - 1) / 2, 1),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
        start += count
        if start < len(figure.columns):
            panel.axvline(start - 0.5, color="white", linewidth=2.5)
    panel.figure.colorbar(image, ax=panel, label=figure.values_are, pad=0.01)


@contextmanager
def _axes(figure: Figure, path: Path) -> Iterator[list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure as Canvas

    count = len(figure.panels) if isinstance(figure, Boxes) else 1
    size = (4.2 * count + 1.5, 4.0)
    if isinstance(figure, Grid):  # so that every cell has room for its label
        rows, columns = len(figure.rows), len(figure.columns)
        size = (max(5.7, 3 + 0.16 * columns), max(3.0, 1.5 + 0.16 * rows))
    elif isinstance(figure, Bars):
        size = (max(5.7, 1.5 + 0.24 * len(figure.places)), 4.0)
    canvas = Canvas(figsize=size, layout="constrained")
    FigureCanvasAgg(canvas)
    yield [canvas.add_subplot(1, count, i + 1) for i in range(count)]
    canvas.savefig(path, dpi=120)
