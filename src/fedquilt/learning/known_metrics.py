"""The metrics that are known by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedquilt.learning.losses import classes_last, match_shapes
from fedquilt.learning.metric import EXAMPLES, LOSS, Metric, MetricInfo, Sums


@dataclass(frozen=True)
class Accuracy:
    """The fraction of class numbers that the largest logit names."""

    info = MetricInfo("accuracy", is_fraction=True)
    sums = {"hits": 1}  # noqa: RUF012

    def measure(self, output: Any, targets: Any) -> Sums:
        """Counts hits."""
        return {"hits": count_hits(output, targets)}

    def compute(self, sums: Sums) -> float:
        """Hits among all targets."""
        return float(sums["hits"] / sums[EXAMPLES])


def count_hits(logits: Tensor, labels: Tensor) -> Tensor:
    """How many labels are the class of the largest logit."""
    return (classes_last(logits, labels).argmax(-1) == labels).sum()


@dataclass(frozen=True)
class LossMetric:
    """The loss itself, where nothing else is asked for."""

    info = MetricInfo("loss", higher_is_better=False)
    sums = dict[str, int]()  # noqa: RUF012

    def measure(self, output: Any, targets: Any) -> Sums:
        """Nothing: the loss is always summed."""
        return {}

    def compute(self, sums: Sums) -> float:
        """The mean over examples."""
        return float(sums[LOSS] / sums[EXAMPLES])


@dataclass(frozen=True, eq=False)
class Summed:
    """A metric of named sums: what a batch adds to them, and the value that they give."""

    info: MetricInfo
    entries: tuple[str, ...]
    add: Callable[[Tensor, Tensor], Sequence[Any]]
    value: Callable[..., float]

    @property
    def sums(self) -> Mapping[str, int]:
        """One number each."""
        return {f"{self.info.name}.{entry}": 1 for entry in self.entries}

    def measure(self, output: Any, targets: Any) -> Sums:
        """Adds in double precision, so that the order of clients does not show."""
        return dict(zip(self.sums, self.add(output, targets), strict=True))

    def compute(self, sums: Sums) -> float:
        """The value of the sums."""
        return float(self.value(*(float(sums[name]) for name in self.sums)))


def _differences(output: Tensor, targets: Tensor) -> Tensor:
    output, targets = match_shapes(output, targets)
    return output.double() - targets.double()


def _add_squares(output: Tensor, targets: Tensor) -> Sequence[Any]:
    error = _differences(output, targets)
    return error.square().sum(), error.numel()


def _add_sizes(output: Tensor, targets: Tensor) -> Sequence[Any]:
    error = _differences(output, targets)
    return error.abs().sum(), error.numel()


def _add_moments(output: Tensor, targets: Tensor) -> Sequence[Any]:
    error, values = _differences(output, targets), targets.double()
    return error.square().sum(), values.sum(), values.square().sum(), values.numel()


def _compute_r2(residual: float, total: float, squares: float, count: float) -> float:
    variation = squares - total * total / count
    return 1 - residual / variation if variation > 0 else math.nan


def _add_decisions(output: Tensor, targets: Tensor) -> Sequence[Any]:
    """Of yes-or-no answers by logits: right ones, and all."""
    logits, wanted = match_shapes(output, targets)
    return ((logits > 0) == (wanted > 0.5)).sum(), wanted.numel()


def _add_overlap(output: Tensor, targets: Tensor) -> Sequence[Any]:
    """Of yes-or-no answers by logits: true positives, false positives, false negatives."""
    logits, wanted = match_shapes(output, targets)
    said, is_true = logits > 0, wanted > 0.5
    return (said & is_true).sum(), (said & ~is_true).sum(), (~said & is_true).sum()


def _compute_f1(right: float, wrong: float, missed: float) -> float:
    return 2 * right / (2 * right + wrong + missed) if right + wrong + missed else 1.0


def _compute_iou(right: float, wrong: float, missed: float) -> float:
    return right / (right + wrong + missed) if right + wrong + missed else 1.0


def _ratio(total: float, count: float) -> float:
    return total / count


def _root_ratio(total: float, count: float) -> float:
    return math.sqrt(total / count)


OVERLAP = ("right", "wrong", "missed")
SUMMED = [
    Summed(MetricInfo("mse", False), ("squares", "count"), _add_squares, _ratio),
    Summed(MetricInfo("rmse", False), ("squares", "count"), _add_squares, _root_ratio),
    Summed(MetricInfo("mae", False), ("sizes", "count"), _add_sizes, _ratio),
    Summed(MetricInfo("r2"), ("residual", "total", "squares", "count"), _add_moments, _compute_r2),
    Summed(
        MetricInfo("binary-accuracy", is_fraction=True), ("right", "count"), _add_decisions, _ratio
    ),
    Summed(MetricInfo("f1", is_fraction=True), OVERLAP, _add_overlap, _compute_f1),
    Summed(MetricInfo("iou", is_fraction=True), OVERLAP, _add_overlap, _compute_iou),
]
METRICS: Mapping[str, Metric] = {
    "accuracy": Accuracy(),
    "loss": LossMetric(),
    **{metric.info.name: metric for metric in SUMMED},
}
DEFAULTS = {  # the metrics of a loss, where none is asked for
    "cross-entropy": ("accuracy",),
    "mse": ("mae", "r2"),
    "mae": ("mae",),
    "huber": ("mae",),
    "bce": ("binary-accuracy", "f1"),
    "dice": ("iou",),
}
