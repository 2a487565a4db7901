"""Makes the figures of a report that show what happened round by round."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import find_common_score, get_main_value, name_score
from fedquilt.figures.figure import Bars, Figure, Lines
from fedquilt.report.coverage import Coverage
from fedquilt.report.records import RoundRecord
from fedquilt.runs.attacks import BACKDOOR_SUCCESS

MAX_PARTS = 24  # of a model that have a bar

Evaluations = Sequence[tuple[int, Sequence[SizeScore]]]


def plot_rounds(runs: Mapping[str, Sequence[RoundRecord]]) -> list[Figure]:
    """Loss, bytes, seconds, failures and spent privacy of every round."""
    figures: list[Figure] = [
        _plot(runs, "Training loss by round", "mean loss of clients", lambda r: r.loss)
    ]
    sent = {
        name: itertools.accumulate(r.bytes_up + r.bytes_down for r in runs[name]) for name in runs
    }
    curves = {
        name: [(r.round, total / 1e6) for r, total in zip(runs[name], sent[name], strict=True)]
        for name in runs
    }
    figures.append(
        Lines(
            "Communication by round", "round", "MB sent and received so far", curves, is_linear=True
        )
    )
    figures.append(_plot(runs, "Time of each round", "seconds", lambda r: r.seconds))
    if any(r.failures for rounds in runs.values() for r in rounds):
        title = "Clients that failed by round"
        figures.append(_plot(runs, title, "clients", lambda r: float(r.failures)))
    if any(r.epsilon is not None for rounds in runs.values() for r in rounds):
        figures.append(_plot(runs, "Privacy spent by round", "ε so far", lambda r: r.epsilon))
    if any(r.kept_fraction for rounds in runs.values() for r in rounds):
        title = "Weights that kept their values, for want of updates"
        figures.append(_plot(runs, title, "% of weights", lambda r: _to_percent(r.kept_fraction)))
    return figures


def _to_percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _plot(
    runs: Mapping[str, Sequence[RoundRecord]],
    title: str,
    y: str,
    read: Callable[[RoundRecord], float | None],
) -> Lines:
    curves = {
        name: [(float(r.round), value) for r in rounds if (value := read(r)) is not None]
        for name, rounds in runs.items()
    }
    return Lines(title, "round", y, curves, is_linear=True)


def plot_sizes_by_round(name: str, evaluations: Evaluations) -> list[Figure]:
    """The metric of every size of one run, round by round."""
    scores = [score for _, sizes in evaluations for score in sizes]
    if not scores:
        return []
    field, metric = find_common_score(scores), scores[0].metric
    factor = 100 if metric.is_fraction else 1
    curves: dict[str, list[tuple[float, float]]] = {}
    for round, sizes in evaluations:
        for score in sizes:
            value = get_main_value(score) if field is None else getattr(score, field)
            if value is not None and not score.robustness:
                curves.setdefault(f"size {score.width:g}", []).append((round, factor * value))
    label = metric.name if field is None else name_score(field, metric)
    if not curves:
        return []
    return [
        Lines(
            f"Every size of {name} by round",
            "round",
            f"{label} (%)" if metric.is_fraction else label,
            curves,
            is_linear=True,
        )
    ]


def plot_backdoor(name: str, evaluations: Evaluations) -> list[Figure]:
    """How often a backdoor works in every size of one run, round by round, if there is one."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for round, sizes in evaluations:
        for score in sizes:
            success = score.metrics.get(BACKDOOR_SUCCESS)
            if success is not None and not score.robustness:
                curves.setdefault(f"size {score.width:g}", []).append((round, 100 * success))
    title = f"Success of the backdoor in {name} by round"
    return [Lines(title, "round", "triggered images (%)", curves, is_linear=True)] if curves else []


def plot_coverage(name: str, coverage: Coverage | None) -> list[Figure]:
    """How many clients have trained each part of a model in a round, in the mean."""
    if coverage is None:
        return []
    parts = coverage.parts[:MAX_PARTS]
    labels = [f"{100 * part.share:.3g}%" for part in parts]
    left_out = len(coverage.parts) - len(parts)
    rest = f" {left_out} parts that were trained less often are left out." if left_out else ""
    return [
        Bars(
            f"Coverage of {name}",
            "clients per round",
            tuple(labels),
            {name: [part.trained for part in parts]},
            caption="A part is what the same clients hold, named by its share of all weights. "
            f"Counted over {coverage.rounds} rounds.{rest}",
        )
    ]
