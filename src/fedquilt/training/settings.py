"""Settings of local training: those of the optimizer, of its schedule, and of the loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedquilt.errors import ConfigError
from fedquilt.ranges import BelowOne, Count, Fraction, NotNegative, Positive, check_fields


@dataclass(frozen=True)
class SGDSettings:
    """The optimizer of one round.

    Args:
        lr: Learning rate η.
        momentum: μ of the heavy-ball momentum, 0 for none.
        weight_decay: Factor of the weights that is added to their gradients.
        max_grad_norm: Gradients with a larger norm are scaled down to it; None: no clipping.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


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
    """How often a client goes over its data, and in which portions.

    Args:
        epochs: Passes over the data.
        batch_size: Examples of each step.
    """

    epochs: int
    batch_size: int


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training, as users write them: SGD, its schedule, epochs and batches.

    Args:
        lr: Learning rate of the first round.
        momentum: Of SGD; a client starts every round without any.
        weight_decay: Of SGD.
        epochs: Passes over the client's data in a round.
        batch_size: Examples of each step.
        max_grad_norm: Gradients with a larger norm are scaled down to it; None: no clipping.
        milestones: Rounds at which the learning rate falls to ``milestone_decay`` of what it was.
        milestone_decay: See above.
        cosine: Instead of milestones, half a cosine from ``lr`` in the first round towards 0.
        round_decay: Besides, the factor of the learning rate from each round to the next.

    >>> LocalTraining(lr=0.1, epochs=2).optimizer_at(0.05)
    SGDSettings(lr=0.05, momentum=0.9, weight_decay=0.0005, max_grad_norm=1.0)
    """

    lr: Positive = 0.01
    momentum: BelowOne = 0.9
    weight_decay: NotNegative = 5e-4
    epochs: Count = 5
    batch_size: Count = 10
    max_grad_norm: Positive | None = 1.0
    milestones: tuple[int, ...] = ()
    milestone_decay: Positive = 0.1
    cosine: bool = False
    round_decay: Fraction = 1.0

    def __post_init__(self) -> None:
        """Refuses values outside of their ranges."""
        check_fields(self)

    def optimizer_at(self, lr: float) -> SGDSettings:
        """The optimizer of a round with this learning rate."""
        return SGDSettings(lr, self.momentum, self.weight_decay, self.max_grad_norm)

    @property
    def schedule(self) -> LRSchedule:
        """How the learning rate falls."""
        return LRSchedule(self.milestones, self.milestone_decay, self.cosine, self.round_decay)

    @property
    def loop(self) -> LoopSettings:
        """Epochs and batches."""
        return LoopSettings(self.epochs, self.batch_size)

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """The learning rate of a round; a cosine needs the number of ``rounds``.

        >>> [LocalTraining(lr=1.0, milestones=(2, 3)).lr_at(r) for r in range(4)]
        [1.0, 1.0, 0.1, 0.010000000000000002]
        >>> [round(LocalTraining(lr=1.0, cosine=True).lr_at(r, 4), 3) for r in range(4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> [LocalTraining(lr=1.0, round_decay=0.5).lr_at(r) for r in range(4)]
        [1.0, 0.5, 0.25, 0.125]
        """
        return self.schedule.lr_at(self.lr, round, rounds)
