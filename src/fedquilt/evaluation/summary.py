"""Which of a run's scores is shown, compared and summed up: one choice for tables and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedquilt.evaluation.scores import SizeScore, name_in_json
from fedquilt.federation.state import Setup
from fedquilt.learning.metric import MetricInfo
from fedquilt.methods.method import Method, shares_weights

SCORES = ("value", "user_value", "local_value")  # preferred first: on held-out data, if there are


@dataclass(frozen=True)
class Summary:
    """The worst size and the mean over sizes, of one score."""

    field: str  # of SizeScore
    metric: MetricInfo
    worst: float
    mean: float

    @property
    def score(self) -> str:
        """The score as JSON calls it."""
        return name_in_json(self.field, self.metric)

    @property
    def name(self) -> str:
        """The score as people read it."""
        return name_score(self.field, self.metric)


def name_score(field: str, metric: MetricInfo) -> str:
    """A score as people read it.

    >>> name_score("user_value", MetricInfo("accuracy")), name_score("value", MetricInfo("r2"))
    ('user accuracy', 'r2')
    """
    whose = field.removesuffix("value").removesuffix("_")
    return f"{whose} {metric.name}".strip()


def get_main_value(score: SizeScore) -> float | None:
    """The first value of the metric that is known, in the order of ``SCORES``."""
    known = (getattr(score, name) for name in SCORES)
    return next((value for value in known if value is not None), None)


def find_common_score(scores: Sequence[SizeScore]) -> str | None:
    """The first score that all of them have, by the name of its field; None: there is none."""
    for name in SCORES if scores else ():
        if all(getattr(score, name) is not None for score in scores):
            return name
    return None


def summarize(scores: Sequence[SizeScore]) -> Summary | None:
    """The worst and the mean over sizes; at the first point of the dial, where there is one."""
    shown = [score for score in scores if score.robustness == scores[0].robustness]
    name = find_common_score(shown)
    if name is None:
        return None
    values, metric = [getattr(score, name) for score in shown], shown[0].metric
    return Summary(name, metric, metric.choose_worst(values), sum(values) / len(values))


def describe_value(setup: Setup, method: Method) -> str:
    """What ``value`` is the value of, and on which data."""
    if not method.local_params:
        return "on the server's held-out data"
    if shares_weights(setup, method):
        return "on all test data, each example answered with the statistics of its client"
    return "of each client's own model on the server's held-out data, mean over clients"
