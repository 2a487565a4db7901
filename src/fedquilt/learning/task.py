"""A learning task: what clients minimize, and what a model is measured by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.learning.known_metrics import METRICS, Accuracy
from fedquilt.learning.losses import CROSS_ENTROPY, Loss, make_loss
from fedquilt.learning.metric import Metric, MetricInfo
from fedquilt.learning.metrics import compute_value, flatten_sums, list_numbers, make_metrics
from fedquilt.structure.tensors import map_tensors


@dataclass(frozen=True, eq=False)
class LearningTask:
    """What is learned: a loss, and metrics of which the first is *the* metric.

    Scores, tables, targets and the selection of models are by the metric. Made by ``make_task``.

    Args:
        loss: What clients minimize.
        metrics: What a model is measured by.

    >>> make_task("mse").metric
    MetricInfo(name='mae', higher_is_better=False, is_fraction=False)
    """

    loss: Loss = CROSS_ENTROPY
    metrics: tuple[Metric, ...] = (METRICS["accuracy"],)

    def __reduce__(self) -> Any:
        """Another process has its own ``CLASSIFICATION``, by which it knows this one."""
        is_known = self is CLASSIFICATION
        return "CLASSIFICATION" if is_known else (type(self), (self.loss, self.metrics))

    @property
    def metric(self) -> MetricInfo:
        """The metric by which models are compared."""
        return self.metrics[0].info

    @property
    def has_classes(self) -> bool:
        """Whether targets are class numbers, and outputs their logits."""
        return self.loss.has_classes

    @cached_property
    def counts_hits(self) -> bool:
        """Whether the metric is the accuracy of class numbers."""
        return self.has_classes and isinstance(self.metrics[0], Accuracy)

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that clients sum for the metrics."""
        return tuple(name for one in self.metrics for name in list_numbers(one))

    def measure(self, output: Any, targets: Any) -> dict[str, float]:
        """What a batch adds to each of the numbers.

        Args:
            output: What the model answers.
            targets: What it should answer.
        """
        numbers: dict[str, float] = {}
        if self.metrics != (METRICS["accuracy"],):  # others need float64, or keep what they count
            output, targets = map_tensors(Tensor.cpu, (output, targets))
        for one in self.metrics:
            try:
                numbers |= flatten_sums(one, one.measure(output, targets))
            except FedquiltError:
                raise
            except Exception as problem:  # of code that is not ours
                raise ConfigError(
                    f"the metric '{one.info.name}' failed: {type(problem).__name__}: {problem}; "
                    "it is called with the model's output and the targets of a batch"
                ) from problem
        return numbers

    def compute(self, numbers: Mapping[str, float]) -> dict[str, float | None]:
        """The value of each metric, from numbers that were summed over batches and clients.

        Args:
            numbers: The numbers by name, with ``examples`` and ``loss``.
        """
        return {one.info.name: compute_value(one, numbers) for one in self.metrics}

    def describe(self) -> dict[str, Any]:
        """The names of the loss and of the metrics."""
        return {
            "loss": self.loss.name,
            "metrics": tuple(one.info.name for one in self.metrics),
        }

    def require_classes(self, what: str) -> None:
        """Raises a ConfigError if there are no classes.

        Args:
            what: What needs them, as the subject of a sentence.
        """
        if not self.has_classes:
            raise ConfigError(
                f"{what} needs class numbers as targets, and the loss '{self.loss.name}' has none; "
                "use cross-entropy, or leave that out"
            )

    def require_outputs(self, what: str) -> None:
        """Raises a ConfigError if the loss is of the whole batch, so that outputs are not seen.

        Args:
            what: What needs them, as the subject of a sentence.
        """
        if self.loss.needs_batch:
            raise ConfigError(
                f"{what} needs a loss of (output, target), and '{self.loss.name}' is of the model "
                "and the batch; give such a loss"
            )


CLASSIFICATION = LearningTask()


def make_task(loss: Any = None, metrics: Any = None) -> LearningTask:
    """The task of a loss and metrics, as users give them.

    Args:
        loss: A name, a callable, or a ``Loss``; None: cross entropy.
        metrics: One metric or several, by name, as decorated functions, or of torchmetrics; None:
            those usual for the loss.

    >>> make_task("bce", ["f1"]).describe()
    {'loss': 'bce', 'metrics': ('f1',)}
    """
    if loss is None and metrics is None:
        return CLASSIFICATION
    made = CROSS_ENTROPY if loss is None else make_loss(loss)
    return LearningTask(made, make_metrics(metrics, made))
