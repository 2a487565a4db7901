"""Metrics of torchmetrics, whose states are summed over clients."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.learning.losses import name_of
from fedquilt.learning.metric import MetricInfo, Sums


@dataclass(frozen=True, eq=False)
class TorchMetric:
    """A metric of torchmetrics, whose state is summed over clients.

    Args:
        metric: The metric; its states must be sums.
        higher_is_better: Overrides what the metric says itself.
        name: How tables call it; None: the name of its class.

    >>> import torchmetrics, fedquilt as fq
    >>> fq.TorchMetric(torchmetrics.R2Score(), name="R2").info.higher_is_better
    True
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
