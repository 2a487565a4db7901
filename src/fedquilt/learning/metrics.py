"""Metrics: how good a model is, from sums over batches and clients.

A metric turns the outputs of a batch into a few numbers that are summed over batches and clients.
Its value is computed from the sums. So it is that of all data in one place, and no example leaves
its client.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.learning.batch import count_rows
from fedquilt.learning.losses import Loss, classes_last, match_shapes, name_of

EXAMPLES, LOSS = "examples", "loss"  # sums that are always there
RESERVED = (EXAMPLES, LOSS, "local", "robust", "sequences")  # names of other sums
TAKEN = ("width", "params", "macs", "num_examples", "robustness", "perplexity", "metric", "metrics")
MAX_NUMBERS = 4096  # that one metric sends
Sums = Mapping[str, Any]  # a number or a tensor each
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+.@%-]{0,39}")


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


@dataclass(frozen=True, eq=False)
class TorchMetric:
    """A metric of torchmetrics, whose state is summed over clients.

    Args:
        metric: The metric; its states must be sums.
        higher_is_better: Overrides what the metric says itself.
        name: How tables call it; None: the name of its class.
    """

    metric: Any
    higher_is_better: bool | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Refuses a metric that is more than sums."""
        if self.higher_is_better is None and self.metric.higher_is_better is None:
            raise ConfigError(
                f"a metric says whether higher is better, and {name_of(self.metric)} does not; "
                "write fq.TorchMetric(metric, higher_is_better=True), or False"
            )
        for name, default in self.metric._defaults.items():
            reduction = self.metric._reductions[name]
            if (
                not isinstance(default, Tensor)
                or getattr(reduction, "__name__", "") != "dim_zero_sum"
            ):
                raise ConfigError(
                    f"a metric is computed from sums over clients, and '{name}' of "
                    f"{name_of(self.metric)} is no sum, so examples would have to leave clients; "
                    "choose another, such as one with a fixed number of thresholds"
                )

    @property
    def info(self) -> MetricInfo:
        """As the metric says."""
        is_higher = self.higher_is_better
        is_higher = self.metric.higher_is_better if is_higher is None else is_higher
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(self.metric).__name__).lower()
        return MetricInfo(self.name or words, bool(is_higher))

    @property
    def sums(self) -> Mapping[str, int]:
        """The states."""
        own = self.metric._defaults.items()
        return {f"{self.info.name}.{name}": default.numel() for name, default in own}

    def measure(self, output: Any, targets: Any) -> Sums:
        """The states after one batch."""
        fresh = self._fresh()
        fresh.update(output, targets)
        return {f"{self.info.name}.{n}": getattr(fresh, n).detach() for n in fresh._defaults}

    def compute(self, sums: Sums) -> float:
        """The value of states that are these sums."""
        fresh = self._fresh()
        for name, default in fresh._defaults.items():
            values = torch.as_tensor(sums[f"{self.info.name}.{name}"], dtype=torch.float64)
            kept = torch.float64 if default.is_floating_point() else default.dtype
            setattr(fresh, name, values.reshape(default.shape).to(kept))
        fresh._update_count = 1
        value = torch.as_tensor(fresh.compute())
        if value.numel() != 1:
            raise ConfigError(
                f"a metric is one number, {name_of(self.metric)} gives {value.numel()}; set its "
                "average, such as average='macro'"
            )
        return float(value)

    def _fresh(self) -> Any:
        fresh = copy.deepcopy(self.metric)
        fresh.reset()
        return fresh.set_dtype(torch.float64)


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
