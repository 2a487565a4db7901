"""What moves weights: one interface for SGD and every optimizer of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.training.optimizer_settings import (
    OptimizerSettings,
    SGDSettings,
    StepwiseSettings,
    TorchSettings,
)
from fedquilt.training.sgd import SGDStep, differentiate
from fedquilt.training.torch_optimizers import TorchOptimizer

Gradients = Sequence[Tensor | None]  # None: the weight has no part in the step


class WeightOptimizer(Protocol):
    """Moves the weights of one client in one round."""

    def step(self, loss: Tensor) -> None:
        """Goes down the gradient of the loss of a batch."""
        ...

    def compute_gradients(self, loss: Tensor) -> Gradients:
        """The gradients of the weights that move; None where a weight has no part in the loss."""
        ...

    def apply_gradients(self, gradients: Gradients) -> None:
        """One step along the gradients of a batch, which are left as they are."""
        ...

    def state(self) -> list[dict[str, Tensor]]:
        """What the optimizer remembers of each weight that moves, copied."""
        ...

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Goes on from what ``state`` gave, in the order of the weights; empty: nothing yet."""
        ...


def trainable_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that training moves, in the order of an optimizer; statistics are only averaged.

    >>> list(trainable_weights(nn.BatchNorm1d(2)))
    ['weight', 'bias']
    """
    return {n: w for n, w in module.named_parameters() if w.requires_grad}


def count_state_tensors(settings: OptimizerSettings) -> int:
    """How many tensors as large as the weights an optimizer keeps; of SGD always momentum.

    >>> import fedquilt as fq
    >>> count_state_tensors(fq.LocalTraining(optimizer="adamw").optimizer_at(0.1))
    2
    """
    base = settings.base if isinstance(settings, StepwiseSettings) else settings
    weight = torch.zeros(2, 3, requires_grad=True)
    optimizer = make_optimizer([weight], base)
    optimizer.step(weight.sum())
    kept = [t for state in optimizer.state() for t in state.values() if t.shape == weight.shape]
    return max(1, len(kept))


def make_optimizer(weights: Iterable[Tensor], settings: OptimizerSettings) -> WeightOptimizer:
    """Makes the optimizer of some weights.

    Args:
        weights: Those to move; weights that need no gradient are left out.
        settings: See ``LocalTraining.optimizer_at``.

    >>> import torch, fedquilt as fq
    >>> weight = torch.ones(1, requires_grad=True)
    >>> settings = fq.LocalTraining(optimizer="adam", max_grad_norm=None).optimizer_at(lr=0.1)
    >>> make_optimizer([weight], settings).step((3 * weight).sum())
    >>> weight
    tensor([0.9000], requires_grad=True)
    """
    base = settings.base if isinstance(settings, StepwiseSettings) else settings
    optimizer = (
        SGDStep(weights, base) if isinstance(base, SGDSettings) else _TorchStep(weights, base)
    )
    if isinstance(settings, StepwiseSettings):
        return _StepwiseOptimizer(optimizer, settings)
    return optimizer


class _TorchStep:
    """An optimizer of PyTorch, with clipping."""

    def __init__(self, weights: Iterable[Tensor], settings: TorchSettings) -> None:
        self._weights = [w for w in weights if w.requires_grad]
        self._settings = settings
        self._optimizer = _build(settings, self._weights)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        self.apply_gradients(self.compute_gradients(loss))

    def compute_gradients(self, loss: Tensor) -> Gradients:
        return differentiate(loss, self._weights)

    @torch.no_grad()
    def apply_gradients(self, gradients: Gradients) -> None:
        used = [(w, g) for w, g in zip(self._weights, gradients, strict=True) if g is not None]
        laid_out = [_lay_out(gradient, weight) for weight, gradient in used]
        for (weight, _), gradient in zip(used, self._clip(laid_out), strict=True):
            weight.grad = gradient
        self._optimizer.step()
        for weight, _ in used:
            weight.grad = None

    def _clip(self, gradients: list[Tensor]) -> list[Tensor]:
        max_norm = self._settings.max_grad_norm
        if max_norm is None or not gradients:
            return gradients
        scale = (max_norm / (nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
        return [gradient * scale for gradient in gradients]

    def state(self) -> list[dict[str, Tensor]]:
        return [
            {key: _copy_state(key, value) for key, value in self._optimizer.state[weight].items()}
            for weight in self._weights
        ]

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        for weight, tensors in zip(self._weights, state, strict=True):
            if tensors:
                self._optimizer.state[weight] = {
                    key: value.clone().to(weight.device if value.ndim else "cpu")
                    for key, value in tensors.items()  # counts are on the host
                }

    def scale_lr(self, factor: float) -> None:
        """Makes learning rates ``factor`` times those of the settings, from the next step on."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor


def _build(settings: TorchSettings, weights: list[Tensor]) -> torch.optim.Optimizer:
    if isinstance(settings.optimizer, TorchOptimizer):
        common = {
            "lr": settings.lr,
            "momentum": settings.momentum,
            "weight_decay": settings.weight_decay,
        }
        return settings.optimizer.build(weights, common)
    optimizer = settings.optimizer(weights)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "a function that makes the optimizer returns a torch.optim.Optimizer of the weights, "
            f"got {type(optimizer).__name__}"
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * settings.lr
    return optimizer


def _copy_state(key: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"the state of an optimizer is kept if it is tensors, its '{key}' is "
            f"{type(value).__name__}; leave out keep_optimizer"
        )
    return value.detach().to("cpu", copy=True)


def _lay_out(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient in the memory layout of its weight, as ``backward`` has it: sums round alike."""
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight).copy_(gradient)


class _StepwiseOptimizer:
    """Averages the gradients of several batches for each step, and follows a schedule by step."""

    def __init__(self, inner: SGDStep | _TorchStep, settings: StepwiseSettings) -> None:
        self._inner, self._settings = inner, settings
        self._num_batches = self._num_steps = 0
        self._sums: list[Tensor | None] = []  # of the batches since the last step
        per_epoch = -(-settings.batches // settings.accumulate)
        self._total = per_epoch * settings.epochs

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        self.apply_gradients(self.compute_gradients(loss))

    def compute_gradients(self, loss: Tensor) -> Gradients:
        return self._inner.compute_gradients(loss)

    def state(self) -> list[dict[str, Tensor]]:
        return self._inner.state()

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        self._inner.load_state(state)

    @torch.no_grad()
    def apply_gradients(self, gradients: Gradients) -> None:
        number = self._num_batches % self._settings.batches + 1  # of this batch in its epoch
        count = (number - 1) % self._settings.accumulate + 1
        self._num_batches += 1
        self._sums = list(gradients) if count == 1 else _add(self._sums, gradients)
        if count == self._settings.accumulate or number == self._settings.batches:
            mean = [s if s is None or count == 1 else s / count for s in self._sums]
            self._inner.scale_lr(self._settings.schedule.factor_at(self._num_steps, self._total))
            self._inner.apply_gradients(mean)
            self._num_steps += 1
            self._sums = []


def _add(sums: Gradients, gradients: Gradients) -> list[Tensor | None]:
    return [
        g if s is None else s if g is None else s + g for s, g in zip(sums, gradients, strict=True)
    ]
