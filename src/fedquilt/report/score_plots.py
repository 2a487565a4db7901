"""Makes the figures of a report that show scores of runs and clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, pstdev

from fedquilt.evaluation.clients import ClientScore
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import find_common_score, get_main_value, name_score
from fedquilt.figures.figure import Bars, Boxes, Curve, Densities, Figure, Lines
from fedquilt.formatting import list_values
from fedquilt.learning.metric import MetricInfo
from fedquilt.learning.task import CLASSIFICATION
from fedquilt.report.records import (
    LocalTest,
    Milestone,
    count_bytes_to_reach,
    filter_last_phase,
)


def plot_by_size(
    runs: Mapping[str, Sequence[SizeScore]], names: Collection[str] = ("width",)
) -> list[Figure]:
    """The metric against parameters, MACs and size (Split-Mix, Table 1).

    ``names`` are the names of the runs' sizes. Sizes that mean different things have no figure.
    """
    against = {"params": "parameters", "macs": "MACs, one example"}
    if len(names) == 1:
        against["width"] = next(iter(names))
    shown = _choose_score([score for scores in runs.values() for score in scores])
    return [
        Lines(
            f"{shown.title} against {label}",
            label,
            shown.label,
            {name: _make_curve(scores, attribute, shown) for name, scores in runs.items()},
        )
        for attribute, label in against.items()
    ]


def _make_curve(scores: Sequence[SizeScore], attribute: str, shown: _ShownScore) -> Curve:
    return sorted(
        (float(getattr(score, attribute)), value)
        for score in scores
        if not score.robustness and (value := shown.get(score)) is not None
    )


@dataclass(frozen=True)
class _ShownScore:
    """The score that a figure shows."""

    metric: MetricInfo
    label: str
    read: Callable[[SizeScore], float | None]

    @property
    def title(self) -> str:
        """The name of the metric as the first word of a title."""
        return self.metric.name[:1].upper() + self.metric.name[1:]

    def get(self, score: SizeScore) -> float | None:
        """The value as it is drawn: fractions in percent."""
        return self.scale(self.read(score))

    def scale(self, value: float | None) -> float | None:
        """A value as it is drawn."""
        return value if value is None or not self.metric.is_fraction else 100 * value


def _choose_score(scores: Sequence[SizeScore]) -> _ShownScore:
    """Chooses a score that all have."""
    metric = scores[0].metric if scores else CLASSIFICATION.metric
    unit = " (%)" if metric.is_fraction else ""
    name = find_common_score(scores)
    if name is None:
        return _ShownScore(metric, f"{metric.name}{unit}, where it is known", get_main_value)
    return _ShownScore(metric, f"{name_score(name, metric)}{unit}", attrgetter(name))


def plot_trade_off(runs: Mapping[str, Sequence[SizeScore]]) -> list[Figure]:
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


def plot_by_time(runs: Mapping[str, Sequence[Milestone]]) -> Figure:
    """The metric of the largest subnet against seconds of training (Split-Mix, Fig. 9)."""
    shown = _choose_score([m.score for progress in runs.values() for m in progress])
    return Lines(
        f"{shown.title} of the largest net against wall-clock time",
        "seconds",
        shown.label,
        {
            name: [
                (milestone.seconds, value)
                for milestone in progress
                if (value := shown.get(milestone.score)) is not None
            ]
            for name, progress in runs.items()
        },
        is_linear=True,
    )


def plot_by_round(
    runs: Mapping[str, Sequence[Milestone]], local: Mapping[str, Sequence[LocalTest]]
) -> list[Figure]:
    """The metric of the largest subnet, and of local models, against rounds (ADDS, Fig. 4)."""
    shown = _choose_score([m.score for progress in runs.values() for m in progress])
    known = {n: [(m.round, shown.get(m.score)) for m in ms] for n, ms in runs.items()}
    shared = {n: [(r, a) for r, a in pairs if a is not None] for n, pairs in known.items()}
    own = {n: [(test.round, 100 * test.accuracy) for test in tests] for n, tests in local.items()}
    return [
        Lines(f"{what} of {whose} against rounds", "round", y, curves, is_linear=True)
        for what, whose, y, curves in (
            (shown.title, "the largest net", shown.label, shared),
            ("Accuracy", "clients' own models", "accuracy before merging (%)", own),
        )
        if any(curves.values())
    ]


def plot_density(local: Mapping[str, Mapping[int, float]]) -> list[Figure]:
    """The distribution of the accuracies of local models (ADDS, Fig. 4)."""
    values = {name: [100 * a for a in scores.values()] for name, scores in local.items() if scores}
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


def plot_by_traffic(runs: Mapping[str, Sequence[Milestone]]) -> list[Figure]:
    """The metric of the largest subnet, and of personal models, against bytes (APFL, Fig. 4)."""
    largest = max((m.bytes for progress in runs.values() for m in progress), default=0)
    unit, factor = next(
        ((u, f) for u, f in (("GB", 1e9), ("MB", 1e6)) if largest >= f), ("kB", 1e3)
    )
    shown = _choose_score([m.score for progress in runs.values() for m in progress])
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, progress in runs.items():
        for milestone in progress:
            values = {name: shown.get(milestone.score)}
            values[f"{name}, personal"] = shown.scale(milestone.score.personal_value)
            for curve, value in values.items():
                if value is not None:
                    point = (milestone.bytes / factor, value)
                    curves.setdefault(curve, []).append(point)
    if not curves:
        return []
    return [
        Lines(
            f"{shown.title} of the largest net against communication",
            f"{unit} received and sent by all clients",
            shown.label,
            curves,
            is_linear=True,
            caption=_describe_bytes_to_reach(runs, shown),
        )
    ]


def _describe_bytes_to_reach(runs: Mapping[str, Sequence[Milestone]], shown: _ShownScore) -> str:
    """The bytes that every run needed for a value which all of them reach.

    Earlier phases count with their bytes, but not with their values: they train another model.
    """
    last = {n: filter_last_phase(ms) for n, ms in runs.items() if ms}
    values = {
        n: [v for m in ms if (v := shown.read(m.score)) is not None] for n, ms in last.items()
    }
    if not values or not all(values.values()):
        return ""
    metric = shown.metric
    target = metric.choose_worst([metric.choose_best(known) for known in values.values()])
    spent = {name: count_bytes_to_reach(ms, target, shown.read) for name, ms in last.items()}
    reached = {name: sent for name, sent in spent.items() if sent is not None}
    if not len(runs) == len(reached) > 1:
        return ""
    return list_values(f"To reach {metric.format(target)}, as all do", reached, "B")


def plot_by_client(
    runs: Mapping[str, Sequence[ClientScore]], metric: MetricInfo = CLASSIFICATION.metric
) -> Figure:
    """The distribution of the metric, MACs and sent parameters over clients (Split-Mix, Fig. 5)."""
    factor, unit = (100, " (%)") if metric.is_fraction else (1, "")
    return Boxes(
        "Clients",
        {
            f"{metric.name}{unit}": {
                n: [factor * c.value for c in clients if c.value is not None]
                for n, clients in runs.items()
            },
            "MACs, one example (M)": {n: [c.macs / 1e6 for c in cs] for n, cs in runs.items()},
            "parameters a round (M)": {
                n: [c.params_per_round / 1e6 for c in cs] for n, cs in runs.items()
            },
        },
    )


def plot_by_group(runs: Mapping[str, Mapping[str, float]]) -> Figure:
    """The fraction of parameters trained by the clients of each group (Split-Mix, Fig. 6)."""
    labels = tuple(dict.fromkeys(group for shares in runs.values() for group in shares))
    return Bars(
        "Share of parameters ever trained",
        "share (%)",
        labels,
        {n: [100 * shares.get(g, 0.0) for g in labels] for n, shares in runs.items()},
    )
