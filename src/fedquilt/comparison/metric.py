"""The score that decides a comparison: its name, its direction, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from fedquilt.comparison.results import Scores, TrialResult
from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.evaluation.scores import name_in_json
from fedquilt.evaluation.summary import SCORES
from fedquilt.learning.metric import MetricInfo
from fedquilt.learning.task import CLASSIFICATION

LOWER_IS_BETTER = ("loss", "perplexity")
COUNTS = ("num_examples",)


@dataclass(frozen=True)
class Metric:
    """A score of the finished model.

    Args:
        name: What it is called in records.
        higher_is_better: Whether more of it is better.
        is_fraction: Whether it is in [0, 1], and written in percent.

    >>> Metric("accuracy").format(0.8123), Metric("loss", False, False).format(0.8123)
    ('81.2 %', '0.812')
    """

    name: str
    higher_is_better: bool = True
    is_fraction: bool = True

    @property
    def label(self) -> str:
        """The score as people read it."""
        return self.name.replace("_", " ")

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.higher_is_better else -1

    def format(self, value: float | None, deviation: float | None = None) -> str:
        """The value with its deviation; a dash if it is not known."""
        if value is None:
            return "-"
        if not self.is_fraction:
            return f"{value:.3g}" + ("" if deviation is None else f" ± {deviation:.2g}")
        if deviation is None:
            return f"{100 * value:.1f} %"
        return f"{100 * value:.1f} ± {100 * deviation:.1f}"

    def get(self, scores: Scores) -> float | None:
        """Its value among the scores of a size."""
        value = scores.get(self.name)
        return float(value) if isinstance(value, Real) else None


def choose_metric(results: Sequence[TrialResult], name: str | None = None) -> Metric:
    """The metric of this name, or the first that all results have for all of their sizes."""
    common = [
        {n for n, v in size.scores.items() if isinstance(v, Real) and n not in COUNTS}
        for result in results
        for size in result.sizes
    ]
    known = set.intersection(*common) if common else set()
    info = _find_info(results)
    usual = [name_in_json(score, info) for score in SCORES]
    if name is None:
        name = next((n for n in (*usual, "perplexity", "loss") if n in known), None)
        if name is None:
            raise ConfigError(
                "runs are compared by a score that all of them have, and these have none; give "
                "test data, or a fraction of the data: data.test_fraction=0.2"
            )
    if name not in known:
        raise ConfigError(describe_unknown("metric", name, known))
    if name.endswith(info.name) and name not in LOWER_IS_BETTER:
        return Metric(name, info.higher_is_better, info.is_fraction)
    return Metric(name, name not in LOWER_IS_BETTER, name not in LOWER_IS_BETTER)


def _find_info(results: Sequence[TrialResult]) -> MetricInfo:
    """The metric of the runs' task, as their scores say."""
    for result in results:
        for size in result.sizes:
            if "metric" in size.scores:
                return MetricInfo(**size.scores["metric"])
    return CLASSIFICATION.metric
