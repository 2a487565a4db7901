"""How many rounds a run took to reach a value of the metric, and how that compares.

ADDS, Table 4, has this for accuracies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fedquilt.errors import ConfigError
from fedquilt.learning.metric import MetricInfo
from fedquilt.learning.task import CLASSIFICATION

Curve = Iterable[tuple[int, float | None]]  # rounds, and values where they are known


@dataclass(frozen=True)
class TargetResult:
    """The first round whose value was at least as good as the target; None: there was none.

    A speed-up is how many times as many rounds the run took that others are compared with.
    """

    target: float
    rounds: int | None  # of the global model
    local_rounds: int | None = None  # of clients' own models, in the mean over a round's
    speed_up: float | None = None
    local_speed_up: float | None = None


def find_reached_targets(
    targets: Sequence[float],
    values: Curve,
    local: Curve = (),
    metric: MetricInfo = CLASSIFICATION.metric,
) -> list[TargetResult]:
    """When each target was reached.

    >>> curve = [(1, 0.3), (2, 0.5), (3, 0.4), (4, 0.6)]
    >>> [result.rounds for result in find_reached_targets([0.4, 0.5, 0.9], curve)]
    [2, 2, None]
    """
    shared, own = list(values), list(local)
    return [
        TargetResult(
            validate_target(target, metric),
            count_rounds_to(target, shared, metric),
            count_rounds_to(target, own, metric),
        )
        for target in targets
    ]


def count_rounds_to(target: float, curve: Curve, metric: MetricInfo) -> int | None:
    """The first round at least as good as this; None if there is none."""
    reached = (r for r, value in curve if value is not None and metric.reaches(value, target))
    return next(reached, None)


def compute_speed_ups(
    first: Sequence[TargetResult], others: Sequence[TargetResult]
) -> list[TargetResult]:
    """The same with speed-ups: the first one's rounds over the other's.

    >>> first = find_reached_targets([0.5], [(41, 0.5)])
    >>> compute_speed_ups(first, find_reached_targets([0.5], [(34, 0.5)]))[0].speed_up
    1.2058823529411764
    """
    return [
        replace(
            other,
            speed_up=_compute_ratio(one.rounds, other.rounds),
            local_speed_up=_compute_ratio(one.local_rounds, other.local_rounds),
        )
        for one, other in zip(first, others, strict=True)
    ]


def _compute_ratio(one: int | None, other: int | None) -> float | None:
    return one / other if one and other else None


def validate_target(target: float, metric: MetricInfo = CLASSIFICATION.metric) -> float:
    """The target itself, if it is a value that can be reached."""
    if metric.is_fraction and not 0 < target <= 1:
        article = "an" if metric.name[0] in "aeiou" else "a"
        raise ConfigError(
            f"a target is {article} {metric.name} in (0, 1], got {target:g}; write 40 % as 0.4"
        )
    return target
