"""Nets that learn from the batches of a client: one after another, or side by side in one pass."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from fedquilt.structure.tensors import (
    Example,
    call_with_tensors,
    find_tensors,
    named_tensors,
    to_arguments,
)
from fedquilt.training.loop import Batch
from fedquilt.training.losses import cross_entropy
from fedquilt.training.objectives import CrossEntropy, Objective
from fedquilt.training.optimizer_settings import OptimizerSettings, SGDSettings, is_elementwise
from fedquilt.training.optimizers import WeightOptimizer, make_optimizer
from fedquilt.training.threads import single_thread


class Trainer(Protocol):
    """One net, or several, that learn from the batches of one client.

    ``optimizers`` are one of each net, or one of all of them together.
    """

    optimizers: Sequence[WeightOptimizer]

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """One step of each net on a batch; the mean of their losses."""
        ...

    def finish(self) -> None:
        """Puts what was learned into the modules."""
        ...


def make_trainer(
    modules: Sequence[nn.Module],
    settings: OptimizerSettings,
    objective: Objective,
    labels: tuple[int, ...] | None = None,
    *,
    stacked: bool,
) -> Trainer:
    """Trains nets one after another on each batch, or all of them in one pass.

    Args:
        modules: The nets.
        settings: Of the optimizer of each.
        objective: What each net minimizes.
        labels: The classes that the loss is over; None: all.
        stacked: Whether nets of one shape are trained in one pass, if the objective and the
            optimizer allow it.
    """
    can_stack = len(modules) > 1 and objective == CrossEntropy() and is_elementwise(settings)
    if stacked and can_stack:
        return _StackedTrainer(modules, settings, labels)
    return _SequentialTrainer(modules, settings, objective, labels)


class _SequentialTrainer:
    def __init__(
        self,
        modules: Sequence[nn.Module],
        settings: OptimizerSettings,
        objective: Objective,
        labels: tuple[int, ...] | None,
    ) -> None:
        self._nets = [(module, make_optimizer(module.parameters(), settings)) for module in modules]
        self._objective, self._labels = objective, labels
        self.optimizers: Sequence[WeightOptimizer] = [optimizer for _, optimizer in self._nets]

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        total = torch.zeros((), device=find_tensors(batch)[0].device)
        for module, optimizer in self._nets:
            loss = self._objective.loss(module, batch, self._labels, generator)
            optimizer.step(loss)
            total += loss.detach()
        return total / len(self._nets)

    def finish(self) -> None:
        pass


class _StackedTrainer:
    """Nets of one shape in one pass: their tensors stacked, and every operation done on the stack.

    Convolutions become grouped ones and matrix products batched ones.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        settings: OptimizerSettings,
        labels: tuple[int, ...] | None,
    ) -> None:
        self._modules, self._labels = list(modules), labels
        weights, buffers = stack_module_state(self._modules)
        self._weights = {n: w.detach().requires_grad_(w.requires_grad) for n, w in weights.items()}
        self._buffers = buffers
        # clipping is per net, so it cannot be left to one step over the stack
        self._optimizer = make_optimizer(self._weights.values(), settings, nets=len(self._modules))
        self.optimizers: Sequence[WeightOptimizer] = [self._optimizer]

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        x, y = batch
        logits = vmap(self._call, in_dims=(0, 0, None), randomness="different")(
            self._weights, self._buffers, x
        )
        losses = torch.stack([cross_entropy(one, y, self._labels) for one in logits])
        self._optimizer.step(losses.sum())
        return losses.detach().mean()

    def _call(self, weights: Any, buffers: Any, x: Tensor) -> Any:
        return call_with_tensors(self._modules[0], {**weights, **buffers}, (x,))

    @torch.no_grad()
    def finish(self) -> None:
        for number, module in enumerate(self._modules):
            own = named_tensors(module)
            for name, stack in {**self._weights, **self._buffers}.items():
                own[name].copy_(stack[number])


MIN_SPEED_UP = 1.5  # times quicker, so that noise does not decide


def should_stack(
    model: nn.Module, example: Example, count: int, batch_size: int, tries: int = 3
) -> bool:
    """Whether nets of this shape train clearly quicker in one pass than one after another.

    A short trial on inputs like the example, on one thread as clients train.
    """
    nets = [copy.deepcopy(model).train() for _ in range(count)]
    x = torch.cat([to_arguments(example)[0]] * batch_size)[:batch_size]
    settings = SGDSettings(lr=0.0, momentum=0.9, weight_decay=5e-4)
    seconds = {}
    with single_thread(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are slow on a stack: they are timed
        y = torch.zeros(nets[0](x).shape[:-1], dtype=torch.int64)
        generator = torch.Generator()
        for stacked in (False, True):
            trainer = make_trainer(nets, settings, CrossEntropy(), stacked=stacked)
            times = []
            try:
                for _ in range(tries + 1):
                    started = time.perf_counter()
                    trainer.step((x, y), generator)
                    times.append(time.perf_counter() - started)
            except RuntimeError:  # not every operation can be done on a stack
                return False
            seconds[stacked] = min(times[1:])
    return seconds[True] * MIN_SPEED_UP < seconds[False]
