"""Nets that learn from the batches of a client: one after another, or side by side in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fedquilt.learning.batch import Batch
from fedquilt.structure.tensors import find_tensors, named_tensors
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.objectives import Objective, StackableObjective, is_stackable
from fedquilt.training.optimizer_settings import OptimizerSettings
from fedquilt.training.optimizers import WeightOptimizer, make_optimizer
from fedquilt.training.stack.nets import NetStack
from fedquilt.training.stack.program import StackedModel


class Trainer(Protocol):
    """One net, or several, that learn from the batches of one client; each has its optimizer."""

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
    loss: ClientLoss | None = None,
    *,
    program: StackedModel | None = None,
) -> Trainer:
    """Trains nets one after another on each batch, or all of them in one pass.

    Args:
        modules: The nets.
        settings: Of the optimizer of each.
        objective: What each net minimizes.
        loss: The loss of the client's task; None: cross entropy.
        program: Computes nets of their shape in one pass; None: one after another, which all
            objectives can.
    """
    loss = loss or ClientLoss()
    if program is not None:
        assert is_stackable(objective)
        return _StackedTrainer(modules, settings, objective, loss, program)
    return _SequentialTrainer(modules, settings, objective, loss)


class _SequentialTrainer:
    def __init__(
        self,
        modules: Sequence[nn.Module],
        settings: OptimizerSettings,
        objective: Objective,
        loss: ClientLoss,
    ) -> None:
        self._nets = [(module, make_optimizer(module.parameters(), settings)) for module in modules]
        self._objective, self._loss = objective, loss
        self.optimizers: Sequence[WeightOptimizer] = [optimizer for _, optimizer in self._nets]

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        total = torch.zeros((), device=find_tensors(batch)[0].device)
        for module, optimizer in self._nets:
            loss = self._objective.loss(module, batch, self._loss, generator)
            optimizer.step(loss)
            total += loss.detach()
        return total / len(self._nets)

    def finish(self) -> None:
        pass


class _StackedTrainer:
    """Nets of one shape in one pass, all on the same batches."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        settings: OptimizerSettings,
        objective: StackableObjective,
        loss: ClientLoss,
        program: StackedModel,
    ) -> None:
        self._losses = [loss] * len(modules)
        self._nets = [named_tensors(module) for module in modules]
        self._stack = NetStack(program, self._nets[0], len(modules), objective)
        self.optimizers: Sequence[WeightOptimizer] = [
            self._stack.load(number, tensors, settings) for number, tensors in enumerate(self._nets)
        ]

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        count = len(self._nets)
        return self._stack.step(range(count), [batch], self._losses, [generator] * count).mean()

    def finish(self) -> None:
        for number, tensors in enumerate(self._nets):
            self._stack.copy_to(number, tensors)
