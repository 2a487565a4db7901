"""What a metric is: sums over batches and clients, and the value that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

EXAMPLES, LOSS = "examples", "loss"  # sums that are always there
Sums = Mapping[str, Any]  # a number or a tensor each


@dataclass(frozen=True)
class MetricInfo:
    """What is known of a metric wherever its values are shown.

    Args:
        name: Its name.
        higher_is_better: Whether a larger value means a better model.
        is_fraction: Whether values are in [0, 1] and shown as percentages.

    >>> MetricInfo("mae", higher_is_better=False).is_better(0.1, than=0.2)
    True
    """

    name: str = "accuracy"
    higher_is_better: bool = True
    is_fraction: bool = False

    @property
    def label(self) -> str:
        """The name as people read it."""
        return self.name.replace("_", " ")

    @property
    def sign(self) -> int:
        """1 if higher is better, else -1."""
        return 1 if self.higher_is_better else -1

    def is_better(self, value: float, than: float) -> bool:
        """Whether one value is better than another.

        Args:
            value: The one.
            than: The other.
        """
        return value > than if self.higher_is_better else value < than

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as a target."""
        return value == target or self.is_better(value, than=target)

    def choose_worst(self, values: Sequence[float]) -> float:
        """The worst of several values."""
        return min(values) if self.higher_is_better else max(values)

    def choose_best(self, values: Sequence[float]) -> float:
        """The best of several values."""
        return max(values) if self.higher_is_better else min(values)

    def format(self, value: float | None) -> str:
        """A value for people: a percentage, or four digits.

        >>> MetricInfo(is_fraction=True).format(0.983), MetricInfo("mae").format(12.3456)
        ('98.3%', '12.35')
        """
        if value is None:
            return "-"
        return f"{100 * value:.1f}%" if self.is_fraction else f"{value:.4g}"


class Metric(Protocol):
    """How good a model is. Values are computed from sums over batches and clients.

    >>> class WithinTen:
    ...     info = MetricInfo("within-ten", is_fraction=True)
    ...     sums = {"within-ten.hits": 1}
    ...
    ...     def measure(self, output, targets):
    ...         return {"within-ten.hits": ((output - targets).abs() <= 10).sum()}
    ...
    ...     def compute(self, sums):
    ...         return sums["within-ten.hits"] / sums["examples"]
    >>> metric: Metric = WithinTen()

    Those that have a name are in ``METRICS``:

    >>> import fedquilt as fq
    >>> fq.METRICS["r2"].info.higher_is_better
    True
    """

    @property
    def info(self) -> MetricInfo:
        """Its name, and whether higher is better."""
        ...

    @property
    def sums(self) -> Mapping[str, int]:
        """The sums that it needs, with the number of numbers in each; names are its own."""
        ...

    def measure(self, output: Any, targets: Any) -> Sums:
        """What a batch adds to each of its sums.

        Args:
            output: What the model answers.
            targets: What it should answer.
        """
        ...

    def compute(self, sums: Sums) -> float:
        """The value of the metric.

        Args:
            sums: Its sums over all batches and clients, and ``examples`` and ``loss``, summed over
                examples.
        """
        ...
