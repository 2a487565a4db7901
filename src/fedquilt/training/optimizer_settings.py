"""What an optimizer of one round is made of, as values that a recipe computes from its settings."""

from __future__ import annotations

from dataclasses import dataclass

from fedquilt.training.schedules import Schedule
from fedquilt.training.torch_optimizers import OptimizerFactory, TorchOptimizer


@dataclass(frozen=True)
class SGDSettings:
    """SGD with one learning rate.

    Args:
        lr: Learning rate η.
        momentum: μ of the heavy-ball momentum, 0 for none.
        weight_decay: Factor of the weights that is added to their gradients.
        max_grad_norm: Gradients with a larger norm are scaled down to it; None: no clipping.

    >>> import fedquilt as fq
    >>> fq.LocalTraining(optimizer=fq.SGDSettings(lr=0.1, momentum=0.5)).momentum
    0.5
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class TorchSettings:
    """An optimizer of PyTorch with one learning rate.

    Args:
        optimizer: The optimizer by name, or what makes it from the weights.
        lr: Learning rate; of a factory, the factor of the learning rates that it sets.
        momentum: None: the optimizer's default.
        weight_decay: None: the optimizer's default.
        max_grad_norm: Gradients with a larger norm are scaled down to it; None: no clipping.
    """

    optimizer: TorchOptimizer | OptimizerFactory
    lr: float
    momentum: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class StepwiseSettings:
    """An optimizer that does not step on every batch, or not always at the same rate.

    Args:
        base: The optimizer.
        accumulate: Batches whose gradients are averaged for one step. An epoch's last step has
            what is left.
        schedule: Factors of the learning rate by step.
        batches: The batches of an epoch.
        epochs: The epochs of a round.
    """

    base: SGDSettings | TorchSettings
    accumulate: int
    schedule: Schedule
    batches: int
    epochs: int


OptimizerSettings = SGDSettings | TorchSettings | StepwiseSettings
