"""Which of a run's scores is shown, compared and summed up: one choice for tables and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.federation.state import Setup
from fedquilt.methods.method import Method, shares_weights

SCORES = {  # in the order in which they are preferred: on held-out data, if the server has any
    "accuracy": "accuracy",
    "user_accuracy": "user accuracy",
    "local_accuracy": "local accuracy",
}


@dataclass(frozen=True)
class Summary:
    """The worst size and the mean over sizes, of one score."""

    score: str  # a field of SizeScore
    worst: float
    mean: float

    @property
    def name(self) -> str:
        """The score as people read it."""
        return SCORES[self.score]


def get_main_accuracy(score: SizeScore) -> float | None:
    """The first accuracy that is known, in the order of ``SCORES``."""
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
    values = [getattr(score, name) for score in shown]
    return Summary(name, min(values), sum(values) / len(values))


def describe_accuracy(setup: Setup, method: Method) -> str:
    """What ``accuracy`` is the accuracy of, and on which data."""
    if not method.local_params:
        return "on the server's held-out data"
    if shares_weights(setup, method):
        return "on all test data, each example answered with the statistics of its client"
    return "of each client's own model on the server's held-out data, mean over clients"
