"""The score that decides a comparison: its name, its direction, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

from fedquilt.comparison.results import Scores, TrialResult
from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.evaluation.scores import VALUES, name_in_json
from fedquilt.evaluation.summary import SCORES
from fedquilt.learning.metric import MetricInfo
from fedquilt.learning.task import CLASSIFICATION

LOWER_IS_BETTER = ("loss", "perplexity")
COUNTS = ("num_examples",)


def get_score(metric: MetricInfo, scores: Scores) -> float | None:
    """The value of a metric among the scores of a size."""
    value = scores.get(metric.name)
    return float(value) if isinstance(value, Real) else None


def format_score(metric: MetricInfo, value: float | None, deviation: float | None = None) -> str:
    """A value with its deviation over seeds; a dash if it is not known.

    >>> format_score(MetricInfo(is_fraction=True), 0.8123, 0.012)
    '81.2 ± 1.2'
    >>> format_score(MetricInfo(is_fraction=True), 0.8123), format_score(MetricInfo("mae"), 0.8123)
    ('81.2 %', '0.812')
    """
    if value is None:
        return "-"
    if not metric.is_fraction:
        return f"{value:.3g}" + ("" if deviation is None else f" ± {deviation:.2g}")
    if deviation is None:
        return f"{100 * value:.1f} %"
    return f"{100 * value:.1f} ± {100 * deviation:.1f}"


def list_scores(metric: MetricInfo) -> frozenset[str]:
    """The scores that runs may have which are of a metric, and may be compared by.

    >>> sorted(list_scores(MetricInfo("r2")))[:3]
    ['local_r2', 'loss', 'perplexity']
    """
    fields = [name for name in VALUES if name != "group_values"]  # which has a value per domain
    return frozenset([*(name_in_json(name, metric) for name in fields), *LOWER_IS_BETTER])


def choose_metric(results: Sequence[TrialResult], name: str | None = None) -> MetricInfo:
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
        return replace(info, name=name)
    return MetricInfo(name, name not in LOWER_IS_BETTER, name not in LOWER_IS_BETTER)


def _find_info(results: Sequence[TrialResult]) -> MetricInfo:
    """The metric of the runs' task, as their scores say."""
    for result in results:
        for size in result.sizes:
            if "metric" in size.scores:
                return MetricInfo(**size.scores["metric"])
    return CLASSIFICATION.metric
