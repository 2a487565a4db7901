"""Metrics: how good a model is, from sums over batches and clients.

A metric turns the outputs of a batch into a few numbers that are summed over batches and clients.
Its value is computed from the sums. So it is that of all data in one place, and no example leaves
its client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.learning.batch import count_rows
from fedquilt.learning.known_metrics import DEFAULTS, METRICS
from fedquilt.learning.losses import Loss, name_of
from fedquilt.learning.metric import EXAMPLES, LOSS, Metric, MetricInfo, Sums
from fedquilt.learning.torch_metric import TorchMetric

RESERVED = (EXAMPLES, LOSS, "local", "robust", "sequences")  # names of other sums
TAKEN = ("width", "params", "macs", "num_examples", "robustness", "perplexity", "metric", "metrics")
MAX_NUMBERS = 4096  # that one metric sends
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+.@%-]{0,39}")


@dataclass(frozen=True, eq=False)
class FunctionMetric:
    """A function of outputs and targets, averaged over examples.

    A function that returns one value per example gives the mean over all examples. One that returns
    a number for the batch is averaged over batches, each weighing as many examples as it has.
    """

    function: Callable[[Any, Any], Any]
    info: MetricInfo

    @property
    def sums(self) -> Mapping[str, int]:
        """The sum, and what it is over."""
        return {f"{self.info.name}.total": 1, f"{self.info.name}.count": 1}

    def measure(self, output: Any, targets: Any) -> Sums:
        """Calls the function."""
        value = torch.as_tensor(self.function(output, targets)).detach().double()
        rows = count_rows(targets)
        total, count = (value * rows, rows) if value.ndim == 0 else (value.sum(), value.numel())
        return dict(zip(self.sums, (total, count), strict=True))

    def __call__(self, output: Any, targets: Any) -> Any:
        """Calls the function, which stays what it was."""
        return self.function(output, targets)

    def compute(self, sums: Sums) -> float:
        """The mean."""
        total, count = (float(sums[name]) for name in self.sums)
        return total / count


def metric(
    *, higher_is_better: bool, name: str | None = None, is_fraction: bool = False
) -> Callable[[Callable[[Any, Any], Any]], FunctionMetric]:
    """Makes a metric of a function (output, target) -> value, one per example or one for all.

    Args:
        higher_is_better: Whether a larger value means a better model.
        name: How tables call it; None: the name of the function.
        is_fraction: Whether values are in [0, 1] and shown as percentages.

    >>> import fedquilt as fq
    >>> @fq.metric(higher_is_better=False)
    ... def largest_error(output, target):
    ...     return (output - target).abs().amax(1)
    >>> largest_error.info
    MetricInfo(name='largest_error', higher_is_better=False, is_fraction=False)
    """

    def decorate(function: Callable[[Any, Any], Any]) -> FunctionMetric:
        info = MetricInfo(name or name_of(function), higher_is_better, is_fraction)
        return FunctionMetric(function, info)

    return decorate


def make_metric(given: Any) -> Metric:
    """A metric from its name, a decorated function, torchmetrics, or an object of ``Metric``.

    >>> make_metric("rmse").info.higher_is_better
    False
    """
    if isinstance(given, str):
        if given not in METRICS:
            raise ConfigError(describe_unknown("metric", given, METRICS) + ", or file.py:function")
        return METRICS[given]
    if isinstance(given, type):
        raise ConfigError(
            f"a metric is an object, got the class {given.__name__}; write it with ()"
        )
    if all(hasattr(given, name) for name in ("info", "sums", "measure", "compute")):
        own: Metric = given
        return own
    if hasattr(given, "_reductions") and hasattr(given, "higher_is_better"):
        return TorchMetric(given)
    if callable(given):
        raise ConfigError(
            f"a metric says whether higher is better, and the function '{name_of(given)}' does "
            "not; decorate it with @fq.metric(higher_is_better=True), or False"
        )
    raise ConfigError(
        f"a metric is a name, a function, or a metric of torchmetrics, got {type(given).__name__}; "
        f"known names: {', '.join(METRICS)}"
    )


def make_metrics(given: Any, loss: Loss) -> tuple[Metric, ...]:
    """The metrics of a task, the first of which is *the* metric; None: those usual for the loss."""
    if given is None:
        given = DEFAULTS.get(loss.name, (LOSS,))
    if isinstance(given, str) or not isinstance(given, (tuple, list)):
        given = (given,)
    made = tuple(make_metric(one) for one in given)
    if not made:
        raise ConfigError("a model is measured by at least one metric, got none; leave metrics out")
    seen: set[str] = set()
    for one in made:
        name, sums = one.info.name, dict(one.sums)
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"the name of a metric is a word of at most 40 letters, digits and -_.+@%, got "
                f"{name!r}"
            )
        if name in TAKEN:
            raise ConfigError(f"the name '{name}' says something else in tables; rename the metric")
        if name in seen or seen & sums.keys() or sums.keys() & set(RESERVED):
            raise ConfigError(
                f"metrics have names of their own, and so have their sums; '{name}' or one of its "
                f"sums ({', '.join(sums)}) is there already"
            )
        if sum(sums.values()) > MAX_NUMBERS:
            raise ConfigError(
                f"a metric sends at most {MAX_NUMBERS} numbers, '{name}' needs "
                f"{sum(sums.values())}; choose fewer thresholds or classes"
            )
        seen |= {name, *sums}
    return made


def flatten_sums(metric: Metric, values: Sums) -> dict[str, float]:
    """Sums as single numbers by name: ``name``, or ``name.0``, ``name.1`` and so on.

    Args:
        metric: The metric that they are of.
        values: What ``measure`` returned.
    """
    numbers: dict[str, float] = {}
    for name, size in metric.sums.items():
        value = values[name]
        if size == 1:
            numbers[name] = float(value)
            continue
        flat = torch.as_tensor(value).flatten().tolist()
        numbers |= {f"{name}.{i}": float(one) for i, one in enumerate(flat)}
    return numbers


def list_numbers(metric: Metric) -> list[str]:
    """The names of the numbers of ``flatten_sums``."""
    return [
        name if size == 1 else f"{name}.{i}"
        for name, size in metric.sums.items()
        for i in range(size)
    ]


def compute_value(metric: Metric, numbers: Mapping[str, float]) -> float | None:
    """The metric's value, from numbers by name; None without examples, or if it is not finite."""
    if not numbers.get(EXAMPLES):
        return None
    sums: dict[str, Any] = {EXAMPLES: numbers[EXAMPLES], LOSS: numbers.get(LOSS, math.nan)}
    for name, size in metric.sums.items():
        if size == 1:
            sums[name] = numbers.get(name, 0.0)
        else:
            values = [numbers.get(f"{name}.{i}", 0.0) for i in range(size)]
            sums[name] = torch.tensor(values, dtype=torch.float64)
    value = metric.compute(sums)
    return value if math.isfinite(value) else None
