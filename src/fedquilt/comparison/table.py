"""The table of a comparison: one row for each variant, over all of its seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np

from fedquilt.comparison.metric import get_score
from fedquilt.comparison.results import Evaluation, Tier, TrialResult
from fedquilt.comparison.significance import (
    PairedTest,
    compare_paired,
    correct_by_holm,
    unpack_outcomes,
)
from fedquilt.learning.metric import MetricInfo
from fedquilt.settings.compare import RESOURCES

TARGET_FRACTION = 0.95  # of the best mean, to be reached where no target was given


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard deviation, which one seed does not have."""

    mean: float
    deviation: float | None = None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Estimate | None:
        """The estimate from one value per seed; None if one is missing."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return cls(fmean(known), stdev(known) if len(known) > 1 else None)


@dataclass(frozen=True)
class Row:
    """One variant.

    Args:
        variant: What is compared.
        method: The name of its method's class.
        seeds: The seeds of its runs that are done.
        rounds: The rounds of each run.
        tiers: The metric of the model that clients of each budget get; None: they get none.
        mean: The mean over the tiers that get a model.
        worst: The worst of them.
        sizes: The size that each tier gets, its parameters and its MACs.
        bytes_down: Bytes that all clients received, mean over seeds.
        bytes_up: Bytes that all clients sent.
        macs: MACs that all clients computed in training.
        seconds: Seconds on simulated devices.
        memory: Peak memory of a training step of the largest size that is served, in bytes.
        rounds_to_target: Rounds until the mean reached the target; None: not with every seed.
        bytes_to_target: Bytes by then.
        at_equal: The mean at the smallest amount that any variant spent, by resource.
        difference: To the best, in its favor; see ``PairedTest``.
        p_value: Of that difference, corrected for the number of rows.
        interval: Half of its 95 % confidence interval.
        is_best: Whether others are compared with it.
        exceeds_budgets: In which way clients train more than they can afford.
        problem: Why there is no result, or not with every seed.
        learning_rate: What the search has found, if there was one.
        runs: The names of the runs' directories, by seed.
    """

    variant: str
    method: str = ""
    seeds: tuple[int, ...] = ()
    rounds: int | None = None
    tiers: Mapping[str, Estimate | None] = field(default_factory=dict)
    mean: Estimate | None = None
    worst: Estimate | None = None
    sizes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bytes_down: float | None = None
    bytes_up: float | None = None
    macs: float | None = None
    seconds: float | None = None
    memory: int | None = None
    rounds_to_target: float | None = None
    bytes_to_target: float | None = None
    at_equal: Mapping[str, Estimate | None] = field(default_factory=dict)
    difference: float | None = None
    p_value: float | None = None
    interval: float | None = None
    test: str = "none"
    is_best: bool = False
    exceeds_budgets: str | None = None
    problem: str | None = None
    learning_rate: float | None = None
    runs: tuple[str, ...] = ()

    @property
    def serves_all(self) -> bool:
        """Whether clients of every budget get a model."""
        return bool(self.tiers) and all(value is not None for value in self.tiers.values())

    @property
    def bytes(self) -> float | None:
        """Bytes both ways."""
        if self.bytes_down is None or self.bytes_up is None:
            return None
        return self.bytes_down + self.bytes_up


@dataclass(frozen=True)
class VariantResults:
    """All runs of a variant that are done, and the first problem of the others."""

    variant: str
    results: tuple[TrialResult, ...]
    problem: str | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class Analysis:
    """The rows, the best first; the target; and the smallest amount of each resource spent."""

    rows: tuple[Row, ...]
    target: float | None = None
    amounts: Mapping[str, float] = field(default_factory=dict)


def analyze(
    variants: Sequence[VariantResults], metric: MetricInfo, target: float | None = None
) -> Analysis:
    """Makes the rows, and compares them with the best."""
    done = [one for one in variants if one.results]
    rows = {one.variant: _describe(one, metric) for one in done}
    best = choose_best(list(rows.values()), metric)
    if best is None:
        return Analysis(tuple(Row(one.variant, problem=one.problem) for one in variants), target)
    if target is None and best.mean is not None:
        gap = (1 - TARGET_FRACTION) * abs(best.mean.mean)
        target = best.mean.mean - metric.sign * gap
    amounts = {
        resource: min(getattr(result.spent, resource) for one in done for result in one.results)
        for resource in RESOURCES
    }
    for one in done:
        reached = [_find_first(result, metric, target) for result in one.results]
        rows[one.variant] = replace(
            rows[one.variant],
            is_best=one.variant == best.variant,
            at_equal={
                resource: _estimate_at(one, metric, resource, amount)
                for resource, amount in amounts.items()
            },
            rounds_to_target=_average_reached(reached, lambda point: point.round),
            bytes_to_target=_average_reached(reached, lambda point: point.spent.bytes),
        )
    rows |= _add_tests(rows, done, best.variant, metric)
    ranked = sorted(rows.values(), key=lambda row: _rank(row, metric))
    failed = [Row(one.variant, problem=one.problem) for one in variants if not one.results]
    return Analysis((*ranked, *failed), target, amounts)


def _add_tests(
    rows: Mapping[str, Row], done: Sequence[VariantResults], best: str, metric: MetricInfo
) -> dict[str, Row]:
    """The rows with how each compares with the best."""
    by_name = {one.variant: one for one in done}
    others = [name for name in rows if name != best]
    tests = [_compare(by_name[best], by_name[name], metric) for name in others]
    p_values = correct_by_holm([test.p_value for test in tests])
    return {
        name: replace(
            rows[name],
            difference=test.difference,
            p_value=p_value,
            interval=test.interval,
            test=test.test,
        )
        for name, test, p_value in zip(others, tests, p_values, strict=True)
    }


def choose_best(rows: Sequence[Row], metric: MetricInfo) -> Row | None:
    """The row with the best mean, of those that serve all budgets, and within them, if any does."""
    for group in (
        [row for row in rows if row.serves_all and not row.exceeds_budgets and not row.problem],
        [row for row in rows if row.serves_all],
        list(rows),
    ):
        known = [row for row in group if row.mean is not None]
        if known:
            return min(known, key=lambda row: _rank(row, metric))
    return None


def _rank(row: Row, metric: MetricInfo) -> tuple[bool, bool, float]:
    """The best first: rows that serve all budgets, within them, by their mean."""
    value = -metric.sign * row.mean.mean if row.mean is not None else float("inf")
    return not row.serves_all, bool(row.exceeds_budgets), value


def _describe(one: VariantResults, metric: MetricInfo) -> Row:
    """What the runs of a variant show by themselves."""
    first = one.results[0]
    tiers = {
        tier.label: Estimate.of([_get_value(result, tier, metric) for result in one.results])
        for tier in first.tiers
    }
    served = [result.get_size(tier) for result in one.results for tier in result.tiers]
    return Row(
        one.variant,
        first.method,
        tuple(result.seed for result in one.results),
        first.rounds,
        tiers,
        Estimate.of([summarize_tiers(result.curve[-1], result, metric) for result in one.results]),
        Estimate.of([_find_worst(result, metric) for result in one.results]),
        _list_sizes(first),
        fmean(result.spent.bytes_down for result in one.results),
        fmean(result.spent.bytes_up for result in one.results),
        fmean(result.spent.macs for result in one.results),
        fmean(result.spent.seconds for result in one.results),
        max((size.memory for size in served if size is not None), default=None),
        exceeds_budgets=first.exceeds_budgets,
        problem=one.problem,
        learning_rate=one.learning_rate,
        runs=tuple(result.key for result in one.results),
    )


def _list_sizes(result: TrialResult) -> dict[str, dict[str, float]]:
    sizes = {}
    for tier in result.tiers:
        size = result.get_size(tier)
        if size is not None:
            sizes[tier.label] = {"size": size.size, "params": size.params, "macs": size.macs}
    return sizes


def _get_value(result: TrialResult, tier: Tier, metric: MetricInfo) -> float | None:
    size = result.get_size(tier)
    return None if size is None else get_score(metric, size.scores)


def _find_worst(result: TrialResult, metric: MetricInfo) -> float | None:
    values = [_get_value(result, tier, metric) for tier in result.tiers]
    known = [value for value in values if value is not None]
    return metric.choose_worst(known) if known else None


def summarize_tiers(point: Evaluation, result: TrialResult, metric: MetricInfo) -> float | None:
    """The mean over tiers that get a model, at an evaluation."""
    sizes = [f"{tier.size:g}" for tier in result.tiers if tier.size is not None]
    values = [get_score(metric, point.scores[size]) for size in sizes if size in point.scores]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _estimate_at(
    one: VariantResults, metric: MetricInfo, resource: str, limit: float
) -> Estimate | None:
    """The mean at the last evaluation within a limit."""
    values: list[float | None] = []
    for result in one.results:
        within = [p for p in result.curve if getattr(p.spent, resource) <= limit * (1 + 1e-9)]
        values.append(summarize_tiers(within[-1], result, metric) if within else None)
    return Estimate.of(values)


def _find_first(result: TrialResult, metric: MetricInfo, target: float | None) -> Evaluation | None:
    """The first evaluation that reached the target; None: none has."""
    for point in result.curve if target is not None else ():
        value = summarize_tiers(point, result, metric)
        if value is not None and target is not None and metric.sign * (value - target) >= 0:
            return point
    return None


def _average_reached(
    points: Sequence[Evaluation | None], get: Callable[[Evaluation], float]
) -> float | None:
    """The mean over seeds, if all of them reached the target."""
    known = [get(point) for point in points if point is not None]
    return fmean(known) if len(known) == len(points) else None


def _compare(best: VariantResults, other: VariantResults, metric: MetricInfo) -> PairedTest:
    """The best against another, on the seeds and tiers that both have; positive: best is better."""
    pairs = [(one, two) for one in best.results for two in other.results if one.seed == two.seed]
    by_seed, by_example = [], []
    for one, two in pairs:
        tiers = _list_common_tiers(one, two)
        values = [(_get_value(one, a, metric), _get_value(two, b, metric)) for a, b in tiers]
        known = [a - b for a, b in values if a is not None and b is not None]
        if not known:
            return PairedTest(None)
        by_seed.append(metric.sign * fmean(known))
        by_example.append(_get_differences(one, two, tiers) if metric.name == "accuracy" else None)
    if not pairs:
        return PairedTest(None)
    lengths = {None if d is None else len(d) for d in by_example}
    if None in lengths or len(lengths) > 1:
        return compare_paired(by_seed)
    return compare_paired(by_seed, np.stack([d for d in by_example if d is not None]))


def _list_common_tiers(one: TrialResult, two: TrialResult) -> list[tuple[Tier, Tier]]:
    others = {tier.label: tier for tier in two.tiers if tier.size is not None}
    return [(t, others[t.label]) for t in one.tiers if t.size is not None and t.label in others]


def _get_differences(
    one: TrialResult, two: TrialResult, tiers: Sequence[tuple[Tier, Tier]]
) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """The difference on each test example, mean over tiers; None if examples are not known."""
    parts = []
    for a, b in tiers:
        left, right = one.outcomes.get(f"{a.size:g}"), two.outcomes.get(f"{b.size:g}")
        if left is None or right is None:
            return None
        parts.append(unpack_outcomes(left) - unpack_outcomes(right))
    mean: np.ndarray[Any, np.dtype[np.float64]] = np.mean(parts, axis=0)
    return mean


def flatten_row(row: Row, metric: MetricInfo) -> dict[str, Any]:
    """The row as plain values with one name each, as data frames and CSV files take them."""
    flat: dict[str, Any] = {"variant": row.variant, "method": row.method}
    flat |= {"seeds": len(row.seeds), "rounds": row.rounds}
    estimates = {f"{metric.name}@{label}": value for label, value in row.tiers.items()}
    estimates |= {f"mean_{metric.name}": row.mean, f"worst_{metric.name}": row.worst}
    estimates |= {f"{metric.name}_at_equal_{name}": v for name, v in row.at_equal.items()}
    for name, estimate in estimates.items():
        flat[name] = None if estimate is None else estimate.mean
        flat[f"{name}_std"] = None if estimate is None else estimate.deviation
    skipped = ("runs", "tiers", "mean", "worst", "sizes", "at_equal", *flat)
    return flat | {name: v for name, v in asdict(row).items() if name not in skipped}
