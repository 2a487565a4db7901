"""How weights move: SGD in a few operations, and nets that are trained side by side."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from fedquilt.structure.tensors import Example, call_with_tensors, named_tensors, to_arguments
from fedquilt.training.loop import Batch
from fedquilt.training.losses import cross_entropy
from fedquilt.training.objectives import CrossEntropy, Objective
from fedquilt.training.settings import SGDSettings


class SGDStep:
    """One client's SGD in one round: weight decay, clipping, momentum.

    The same steps as ``torch.optim.SGD`` makes, without what an optimizer needs to be general. With
    the small nets of small devices that saves an eighth of the time of training.

    Args:
        weights: Those to move; weights that need no gradient are left out.
        settings: Learning rate, momentum, weight decay and clipping.
        nets: How many nets the weights are stacked from; each is clipped by its own norm.
    """

    def __init__(self, weights: Iterable[Tensor], settings: SGDSettings, *, nets: int = 1) -> None:
        self._weights = [w for w in weights if w.requires_grad]
        self._settings, self._lr, self._nets = settings, settings.lr, nets
        self._momenta: dict[int, Tensor] = {}  # by position; a tensor without gradient has none

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """Goes down the gradient of the loss."""
        self.apply_gradients(torch.autograd.grad(loss, self._weights, allow_unused=True))

    @torch.no_grad()
    def apply_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """One step along gradients, which are left as they are: v <- μ v + g + d w, w <- w - η v.

        A weight whose gradient is None has no part in the step.
        """
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        present: list[Tensor] = [g for g in gradients if g is not None]
        weights: list[Tensor] = [self._weights[i] for i in used]
        settings, scale = self._settings, 1.0
        if settings.max_grad_norm is not None and self._nets > 1:
            present = self._clip_each(present, settings.max_grad_norm)
        elif settings.max_grad_norm is not None and present:
            scale = min(
                1.0, settings.max_grad_norm / (float(nn.utils.get_total_norm(present)) + 1e-6)
            )
        if not settings.momentum:
            if settings.weight_decay:
                torch._foreach_mul_(weights, 1 - self._lr * settings.weight_decay)
            torch._foreach_add_(weights, present, alpha=-self._lr * scale)
            return
        for i, gradient in zip(used, present, strict=True):
            if i not in self._momenta:
                self._momenta[i] = torch.zeros_like(gradient)
        momenta = [self._momenta[i] for i in used]
        torch._foreach_mul_(momenta, settings.momentum)
        torch._foreach_add_(momenta, present, alpha=scale)
        if settings.weight_decay:
            torch._foreach_add_(momenta, weights, alpha=settings.weight_decay)
        torch._foreach_add_(weights, momenta, alpha=-self._lr)

    def _clip_each(self, gradients: list[Tensor], clip: float) -> list[Tensor]:
        """The gradients of stacked nets, each net's clipped by its own norm."""
        norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in gradients]).norm(dim=0)
        scales = (clip / (norms + 1e-6)).clamp(max=1.0)
        return [g * scales.view(-1, *[1] * (g.ndim - 1)) for g in gradients]


class Trainer(Protocol):
    """One net, or several, that learn from the batches of one client."""

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """One step of each net on a batch; the mean of their losses."""
        ...

    def finish(self) -> None:
        """Puts what was learned into the modules."""
        ...


def make_trainer(
    modules: Sequence[nn.Module],
    settings: SGDSettings,
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
        stacked: Whether nets of one shape are trained in one pass, if the objective allows it.
    """
    if stacked and len(modules) > 1 and objective == CrossEntropy():
        return _StackedTrainer(modules, settings, labels)
    return _SequentialTrainer(modules, settings, objective, labels)


class _SequentialTrainer:
    def __init__(
        self,
        modules: Sequence[nn.Module],
        settings: SGDSettings,
        objective: Objective,
        labels: tuple[int, ...] | None,
    ) -> None:
        self._nets = [(module, SGDStep(module.parameters(), settings)) for module in modules]
        self._objective, self._labels = objective, labels

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        total = torch.zeros(())
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
        settings: SGDSettings,
        labels: tuple[int, ...] | None,
    ) -> None:
        self._modules, self._labels = list(modules), labels
        weights, buffers = stack_module_state(self._modules)
        self._weights = {n: w.detach().requires_grad_(w.requires_grad) for n, w in weights.items()}
        self._buffers = buffers
        # clipping is per net, so it cannot be left to one step over the stack
        self._optimizer = SGDStep(self._weights.values(), settings, nets=len(self._modules))

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


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """PyTorch with one thread, as clients train everywhere, so that the bits are the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
