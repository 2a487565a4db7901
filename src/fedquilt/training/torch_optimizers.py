"""The optimizers of ``torch.optim`` by name, their settings checked against their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedquilt.errors import ConfigError, describe_unknown

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and kind is not torch.optim.Optimizer
    if issubclass(kind, torch.optim.Optimizer)
}
REFUSED = {
    "lbfgs": "computes the loss several times per step, and a client's step has one batch",
    "sparseadam": "takes sparse gradients, and these are dense; choose adam",
    "muon": "moves matrices only, and networks have other weights too; choose adamw",
}
KNOWN = tuple(sorted(OPTIMIZERS.keys() - REFUSED.keys()))
COMMON = ("lr", "momentum", "weight_decay")  # settings of local training, for all optimizers


@dataclass(frozen=True)
class TorchOptimizer:
    """An optimizer of ``torch.optim``: its name, and settings that differ from its defaults.

    Args:
        name: The class in lower case, such as ``adamw``.
        settings: Arguments of the class, as a mapping, without the learning rate, momentum and
            weight decay. These are settings of ``LocalTraining``.

    >>> import fedquilt as fq
    >>> fq.LocalTraining(optimizer=fq.TorchOptimizer("adamw", {"betas": (0.9, 0.98)}), lr=0.002).lr
    0.002
    """

    name: str
    settings: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Refuses an unknown name, and settings that the optimizer does not take."""
        if not isinstance(self.name, str) or self.name.lower() not in OPTIMIZERS:
            raise ConfigError(
                describe_unknown("optimizer", str(self.name), KNOWN) + ", or give file.py:function"
            )
        name = self.name.lower()
        if name in REFUSED:
            raise ConfigError(f"optimizer '{name}' {REFUSED[name]}")
        pairs = dict(self.settings).items()
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in pairs}
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "settings", tuple(sorted(settings.items())))
        for key in settings:
            if key in COMMON:
                raise ConfigError(
                    f"'{key}' is a setting of local training for every optimizer; give "
                    f"local_training.{key} instead of a setting of {name}"
                )
        self._refuse_unknown(settings)

    @property
    def accepted(self) -> Mapping[str, inspect.Parameter]:
        """The arguments of the optimizer's class, without the weights."""
        parameters = dict(inspect.signature(OPTIMIZERS[self.name]).parameters)
        del parameters["params"]
        return parameters

    @property
    def default_lr(self) -> float:
        """The learning rate that PyTorch has for it."""
        return float(self.accepted["lr"].default)

    def _refuse_unknown(self, settings: Iterable[str]) -> None:
        for key in settings:
            if key not in self.accepted:
                raise ConfigError(describe_unknown(f"setting of {self.name}", key, self.accepted))

    def build(
        self, weights: Iterable[Tensor], common: Mapping[str, float | None]
    ) -> torch.optim.Optimizer:
        """Makes the optimizer of some weights.

        Args:
            weights: What it moves.
            common: The learning rate and other settings that many optimizers have; None: the
                optimizer's own default.
        """
        given = {**dict(self.settings), **{k: v for k, v in common.items() if v is not None}}
        self._refuse_unknown(given)
        try:
            return OPTIMIZERS[self.name](weights, **given)
        except (TypeError, ValueError, RuntimeError) as problem:
            listed = ", ".join(f"{key} = {value!r}" for key, value in given.items())
            raise ConfigError(
                f"optimizer {self.name} does not take {listed or 'these weights'}: {problem}"
            ) from problem
