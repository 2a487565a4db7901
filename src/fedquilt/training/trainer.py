"""Nets that learn from the batches of a client: one after another, or side by side in one pass."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from fedquilt.federation.threads import single_thread
from fedquilt.learning.batch import Batch
from fedquilt.learning.losses import CROSS_ENTROPY, Loss, OutputLoss
from fedquilt.structure.tensors import (
    Example,
    call_with_tensors,
    find_tensors,
    map_tensors,
    named_tensors,
    to_arguments,
)
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.objectives import Objective, PlainLoss
from fedquilt.training.optimizer_settings import OptimizerSettings, SGDSettings, is_elementwise
from fedquilt.training.optimizers import WeightOptimizer, make_optimizer


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
    loss: ClientLoss | None = None,
    *,
    stacked: bool,
) -> Trainer:
    """Trains nets one after another on each batch, or all of them in one pass.

    Args:
        modules: The nets.
        settings: Of the optimizer of each.
        objective: What each net minimizes.
        loss: The loss of the client's task; None: cross entropy.
        stacked: Whether nets of one shape are trained in one pass, if the objective and the
            optimizer allow it.
    """
    loss = loss or ClientLoss()
    is_plain = objective == PlainLoss() and not loss.loss.needs_batch
    if stacked and len(modules) > 1 and is_plain and is_elementwise(settings):
        return _StackedTrainer(modules, settings, loss)
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
    """Nets of one shape in one pass: their tensors stacked, and every operation done on the stack.

    Convolutions become grouped ones and matrix products batched ones.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        settings: OptimizerSettings,
        loss: ClientLoss,
    ) -> None:
        self._modules, self._loss = list(modules), loss
        weights, buffers = stack_module_state(self._modules)
        self._weights = {n: w.detach().requires_grad_(w.requires_grad) for n, w in weights.items()}
        self._buffers = buffers
        # clipping is per net, so it cannot be left to one step over the stack
        self._optimizer = make_optimizer(self._weights.values(), settings, nets=len(self._modules))
        self.optimizers: Sequence[WeightOptimizer] = [self._optimizer]

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        x, y = batch
        outputs = vmap(self._call, in_dims=(0, 0, None), randomness="different")(
            self._weights, self._buffers, to_arguments(x)
        )
        nets = (map_tensors(itemgetter(i), outputs) for i in range(len(self._modules)))
        losses = torch.stack([self._loss(one, y) for one in nets])
        self._optimizer.step(losses.sum())
        return losses.detach().mean()

    def _call(self, weights: Any, buffers: Any, inputs: tuple[Any, ...]) -> Any:
        return call_with_tensors(self._modules[0], {**weights, **buffers}, inputs)

    @torch.no_grad()
    def finish(self) -> None:
        for number, module in enumerate(self._modules):
            own = named_tensors(module)
            for name, stack in {**self._weights, **self._buffers}.items():
                own[name].copy_(stack[number])


MIN_SPEED_UP = 1.5  # times quicker, so that noise does not decide


def should_stack(
    model: nn.Module,
    example: Example,
    count: int,
    batch_size: int,
    loss: Loss = CROSS_ENTROPY,
    tries: int = 3,
) -> bool:
    """Whether nets of this shape train clearly quicker in one pass than one after another.

    A short trial on inputs like the example, on one thread as clients train.
    """
    if loss.needs_batch:
        return False
    nets = [copy.deepcopy(model).train() for _ in range(count)]
    x = map_tensors(
        lambda x: torch.cat([x] * batch_size)[:batch_size] if x.ndim else x, to_arguments(example)
    )
    settings = SGDSettings(lr=0.0, momentum=0.9, weight_decay=5e-4)
    seconds = {}
    with single_thread(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are slow on a stack: they are timed
        trial: Loss = OutputLoss(_square_outputs)  # no target is needed to know how long it takes
        y = None
        if loss.has_classes:
            trial, y = loss, torch.zeros(nets[0](*x).shape[:-1], dtype=torch.int64)
        generator = torch.Generator()
        for stacked in (False, True):
            trainer = make_trainer(nets, settings, PlainLoss(), ClientLoss(trial), stacked=stacked)
            times = []
            try:
                for _ in range(tries + 1):
                    started = time.perf_counter()
                    trainer.step(Batch(x, y), generator)
                    times.append(time.perf_counter() - started)
            except RuntimeError:  # not every operation can be done on a stack
                return False
            seconds[stacked] = min(times[1:])
    return seconds[True] * MIN_SPEED_UP < seconds[False]


def _square_outputs(output: Any, targets: None) -> Tensor:
    return torch.stack([tensor.square().mean() for tensor in find_tensors(output)]).sum()
