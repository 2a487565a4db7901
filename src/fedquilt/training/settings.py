"""Settings of local training: those of the optimizer, of its schedule, and of the loop."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedquilt.errors import ConfigError
from fedquilt.ranges import BelowOne, Count, Fraction, NotNegative, Positive, check_fields
from fedquilt.training.function_path import FunctionPath
from fedquilt.training.optimizer_settings import (
    OptimizerSettings,
    SGDSettings,
    StepwiseSettings,
    TorchSettings,
)
from fedquilt.training.schedules import Parts, Schedule, read_parts
from fedquilt.training.torch_optimizers import OptimizerFactory, TorchOptimizer
from fedquilt.user_code import is_function_path

PLAIN_SGD = "sgd"
Precision = Literal["float32", "bf16"]


@dataclass(frozen=True)
class LRSchedule:
    """How the learning rate falls from round to round.

    Args:
        milestones: Rounds from which on the learning rate is multiplied by ``milestone_decay``.
        milestone_decay: See above.
        cosine: Instead of milestones, half a cosine from the first round towards 0.
        round_decay: Besides, the factor from each round to the next.
    """

    milestones: tuple[int, ...] = ()
    milestone_decay: float = 0.1
    cosine: bool = False
    round_decay: float = 1.0

    def lr_at(self, lr: float, round: int, rounds: int | None) -> float:
        """The learning rate of a round, if that of the first round is ``lr``."""
        lr = lr * self.round_decay**round
        if self.cosine:
            if rounds is None:
                raise ConfigError("a cosine schedule needs the number of rounds; pass rounds")
            return lr * (1 + math.cos(math.pi * round / rounds)) / 2
        return lr * self.milestone_decay ** sum(round >= m for m in self.milestones)


@dataclass(frozen=True)
class LoopSettings:
    """How often a client goes over its data, in which portions, and in which precision.

    Args:
        epochs: Passes over the data.
        batch_size: Examples of each batch.
        precision: ``bf16``: layers compute in bfloat16 where PyTorch's autocast says so.
    """

    epochs: int
    batch_size: int
    precision: Precision = "float32"

    def count_batches(self, num_examples: int) -> int:
        """The batches of an epoch; a last one of one example is left out if there are others.

        >>> [LoopSettings(1, batch_size=3).count_batches(count) for count in (1, 3, 4, 5, 7)]
        [1, 1, 1, 2, 2]
        """
        whole, rest = divmod(num_examples, self.batch_size)
        is_left_out = rest == 1 and whole > 0
        return whole + (rest > 0 and not is_left_out)


class _Default(float):
    """A default of SGD that was not given, so that another optimizer has its own instead."""


SGD_DEFAULTS = {
    n: _Default(v) for n, v in (("lr", 0.01), ("momentum", 0.9), ("weight_decay", 5e-4))
}


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training, as users write them: optimizer, schedule, epochs and batches.

    Args:
        lr: Learning rate of the first round. Left out for another optimizer than SGD: PyTorch's
            default for it. With a factory it is a factor of the learning rates that this sets.
        momentum: Of SGD, or another optimizer that has it.
        weight_decay: Of SGD, or another optimizer that has it.
        epochs: Passes over the client's data in a round.
        batch_size: Examples of each batch.
        max_grad_norm: Gradients with a larger norm are scaled down to it; None: no clipping.
        milestones: Rounds at which the learning rate falls to ``milestone_decay`` of what it was.
        milestone_decay: See above.
        cosine: Instead of milestones, half a cosine from ``lr`` in the first round towards 0.
        round_decay: Besides, the factor of the learning rate from each round to the next.
        optimizer: An optimizer of torch.optim: ``adamw``, or a table with its ``name`` and further
            settings, or file.py:function that makes one from the weights. In Python also a
            function, ``TorchOptimizer`` or ``SGDSettings``.
        schedule: Factors of the learning rate by round, instead of the four settings above: one of
            constant, ``warmup:5``, cosine, linear, ``milestones:30,60:0.1``, ``decay:0.99`` and
            file.py:function, or several in sequence.
        step_schedule: The same by step of the optimizer, anew in each round.
        accumulate: Batches whose gradients are averaged for one step.
        precision: ``float32``, or ``bf16`` for mixed precision.
        keep_optimizer: Whether a client's optimizer goes on in its next round with what it
            remembers, such as momentum. It is a part of the client's state.

    >>> LocalTraining(lr=0.1, epochs=2).optimizer_at(0.05)
    SGDSettings(lr=0.05, momentum=0.9, weight_decay=0.0005, max_grad_norm=1.0)
    >>> LocalTraining(optimizer="adam").lr
    0.001
    """

    lr: Positive = SGD_DEFAULTS["lr"]
    momentum: BelowOne | None = SGD_DEFAULTS["momentum"]
    weight_decay: NotNegative | None = SGD_DEFAULTS["weight_decay"]
    epochs: Count = 5
    batch_size: Count = 10
    max_grad_norm: Positive | None = 1.0
    milestones: tuple[int, ...] = ()
    milestone_decay: Positive = 0.1
    cosine: bool = False
    round_decay: Fraction = 1.0
    optimizer: (
        str | TorchOptimizer | SGDSettings | Mapping[str, Any] | FunctionPath | OptimizerFactory
    ) = PLAIN_SGD
    schedule: str | Parts = ()
    step_schedule: str | Parts = ()
    accumulate: Count = 1
    precision: Precision = "float32"
    keep_optimizer: bool = False

    def __post_init__(self) -> None:
        """Refuses values outside of their ranges, and optimizers that cannot be made."""
        for name in ("schedule", "step_schedule"):
            self._set(name, read_parts(getattr(self, name)))
        if isinstance(self.optimizer, SGDSettings):
            self._take_sgd(self.optimizer)
        self._set("optimizer", _parse_optimizer(self.optimizer))
        self._fill_defaults()
        check_fields(self)
        self._check_optimizer()
        self._check_schedules()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def _take_sgd(self, settings: SGDSettings) -> None:
        for name in SGD_DEFAULTS:
            if not isinstance(getattr(self, name), _Default):
                raise ConfigError(
                    f"SGDSettings say {name} already; leave it out, got {getattr(self, name)!r}"
                )
        for name in (*SGD_DEFAULTS, "max_grad_norm"):
            self._set(name, getattr(settings, name))
        self._set("optimizer", PLAIN_SGD)

    def _fill_defaults(self) -> None:
        """What was not given is the default of the optimizer: of SGD ours, else PyTorch's."""
        optimizer = self.optimizer
        if optimizer == PLAIN_SGD or getattr(optimizer, "name", None) == PLAIN_SGD:
            for name, default in SGD_DEFAULTS.items():
                value = getattr(self, name)
                if isinstance(value, _Default) or (value is None and name != "lr"):
                    self._set(name, default)
            return
        if isinstance(self.lr, _Default):
            own = optimizer.default_lr if isinstance(optimizer, TorchOptimizer) else 1.0
            self._set("lr", _Default(own))
        for name in ("momentum", "weight_decay"):
            if isinstance(getattr(self, name), _Default):
                self._set(name, None)

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, TorchOptimizer):
            common = {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
            self.optimizer.build([torch.zeros(1, requires_grad=True)], common)
        elif self.optimizer != PLAIN_SGD:
            for name in ("momentum", "weight_decay"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"a function that makes the optimizer sets {name} itself; leave it out, "
                        f"got {getattr(self, name)!r}"
                    )
            _require_picklable(self.optimizer, "optimizer")

    def _check_schedules(self) -> None:
        given = self.milestones or self.cosine or self.round_decay != 1
        if self.schedule and given:
            raise ConfigError(
                "give a schedule, or milestones, cosine and round_decay, got both; the schedule "
                "has parts for each of them, see docs/settings.md"
            )
        for schedule in self._schedules:
            for part in schedule.parts:
                if callable(part):
                    _require_picklable(part, "schedule")

    @property
    def _schedules(self) -> tuple[Schedule, Schedule]:
        """The schedule by round, and that by step."""
        by_round: Any = self.schedule
        by_step: Any = self.step_schedule
        return Schedule(by_round, "round"), Schedule(by_step, "step")

    def optimizer_at(self, lr: float, num_examples: int | None = None) -> OptimizerSettings:
        """The optimizer of a round with this learning rate.

        Args:
            lr: See ``lr_at``.
            num_examples: How many the client trains on. It is needed if steps differ: with a
                ``step_schedule``, or ``accumulate``.
        """
        common = self.momentum, self.weight_decay, self.max_grad_norm
        base: SGDSettings | TorchSettings
        if self.optimizer == PLAIN_SGD:
            base = SGDSettings(lr, self.momentum or 0.0, self.weight_decay or 0.0, common[-1])
        else:
            base = TorchSettings(self.optimizer, lr, *common)  # type: ignore[arg-type]
        _, schedule = self._schedules
        if self.accumulate == 1 and not schedule.parts:
            return base
        if num_examples is None:
            raise ConfigError(
                "accumulate and step_schedule need the number of examples; pass num_examples to "
                "optimizer_at"
            )
        batches = self.loop.count_batches(num_examples)
        return StepwiseSettings(base, self.accumulate, schedule, batches, self.epochs)

    @property
    def loop(self) -> LoopSettings:
        """Epochs, batches and precision."""
        return LoopSettings(self.epochs, self.batch_size, self.precision)

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """The learning rate of a round; a cosine needs the number of ``rounds``.

        >>> [LocalTraining(lr=1.0, milestones=(2, 3)).lr_at(r) for r in range(4)]
        [1.0, 1.0, 0.1, 0.010000000000000002]
        >>> [round(LocalTraining(lr=1.0, cosine=True).lr_at(r, 4), 3) for r in range(4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> [LocalTraining(lr=1.0, round_decay=0.5).lr_at(r) for r in range(4)]
        [1.0, 0.5, 0.25, 0.125]
        >>> [LocalTraining(lr=1.0, schedule=("warmup:1", "linear")).lr_at(r, 5) for r in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.25]
        """
        if self.schedule:
            return self.lr * self._schedules[0].factor_at(round, rounds)
        schedule = LRSchedule(self.milestones, self.milestone_decay, self.cosine, self.round_decay)
        return schedule.lr_at(self.lr, round, rounds)


def _parse_optimizer(given: Any) -> Any:
    """The optimizer as a value: plain SGD by name, a TorchOptimizer, or what makes one."""
    if isinstance(given, Mapping):
        rest = {key: value for key, value in given.items() if key != "name"}
        if not isinstance(given.get("name"), str):
            raise ConfigError(f"an optimizer has a name, such as adamw, got {dict(given)!r}")
        if is_function_path(given["name"]) and rest:
            raise ConfigError(
                f"a function that makes the optimizer has its settings in it, got {rest!r} beside "
                f"'{given['name']}'"
            )
        given = TorchOptimizer(given["name"], rest) if rest else given["name"]
    if isinstance(given, str):
        if is_function_path(given):
            return FunctionPath(given, "optimizer")
        return PLAIN_SGD if given.lower() == PLAIN_SGD else TorchOptimizer(given)
    if isinstance(given, (TorchOptimizer, FunctionPath)) or callable(given):
        return given
    raise ConfigError(
        "an optimizer is a name such as 'adamw', a table with its name and settings, or a function "
        f"that makes it from the weights, got {given!r}"
    )


def _require_picklable(function: object, noun: str) -> None:
    """Refuses a function that worker processes cannot get."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise ConfigError(
            f"a function for the {noun} goes to worker processes, so it must stand at the top of a "
            f"module, or give file.py:function; got {function!r} ({problem})"
        ) from problem
