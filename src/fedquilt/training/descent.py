"""How weights move: SGD in a few operations, and nets that are trained side by side."""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from fedquilt.errors import ConfigError
from fedquilt.ranges import BelowOne, Count, Fraction, NotNegative, Positive, check_fields
from fedquilt.structure.trace import Example, arguments, call_with, named_tensors
from fedquilt.training.losses import cross_entropy
from fedquilt.training.objectives import Objective, Plain


@dataclass(frozen=True)
class Optimiser:
    """Settings of local SGD, and how the learning rate falls from round to round."""

    lr: Positive = 0.01
    momentum: BelowOne = 0.9
    weight_decay: NotNegative = 5e-4
    epochs: Count = 5
    batch_size: Count = 10
    clip: Positive | None = 1.0  # largest norm of a gradient
    milestones: tuple[int, ...] = ()  # rounds at which the learning rate falls
    decay: Positive = 0.1  # to this part of what it was
    cosine: bool = False  # instead: half a cosine from ``lr`` in the first round towards 0
    falling: Fraction = 1.0  # besides, to this part of what it was in every round

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        check_fields(self)

    def rate(self, round: int, rounds: int | None = None) -> float:
        """The learning rate of a round, of so many.

        >>> [Optimiser(lr=1.0, milestones=(2, 3)).rate(r) for r in range(4)]
        [1.0, 1.0, 0.1, 0.010000000000000002]
        >>> [round(Optimiser(lr=1.0, cosine=True).rate(r, 4), 3) for r in range(4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> [Optimiser(lr=1.0, falling=0.5).rate(r) for r in range(4)]
        [1.0, 0.5, 0.25, 0.125]
        """
        lr = self.lr * self.falling**round
        if self.cosine:
            if rounds is None:
                raise ConfigError("a cosine needs the number of rounds it stretches over")
            return lr * (1 + math.cos(math.pi * round / rounds)) / 2
        return lr * self.decay ** sum(round >= m for m in self.milestones)


class Descent:
    """One client's SGD in one round: weight decay, clipping, momentum.

    The same steps as ``torch.optim.SGD`` makes, without what an optimiser needs to be general. With
    the small nets of small devices that is an eighth of the time of training.
    """

    def __init__(
        self, weights: Iterable[Tensor], settings: Optimiser, lr: float, *, nets: int = 1
    ) -> None:
        """For the weights of one net, or of ``nets`` whose weights are stacked."""
        self._weights = [w for w in weights if w.requires_grad]
        self._settings, self._lr, self._nets = settings, lr, nets
        self._momenta: dict[int, Tensor] = {}  # by position; a tensor without gradient has none

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """Goes down the gradient of the loss."""
        self.follow(torch.autograd.grad(loss, self._weights, allow_unused=True))

    @torch.no_grad()
    def follow(self, gradients: Sequence[Tensor | None]) -> None:
        """One step along gradients, which are left as they are: v <- μ v + g + d w, w <- w - η v.

        A weight whose gradient is None has no part in the step.
        """
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        found: list[Tensor] = [g for g in gradients if g is not None]
        weights: list[Tensor] = [self._weights[i] for i in used]
        settings, scale = self._settings, 1.0
        if settings.clip is not None and self._nets > 1:
            found = self._clipped_apart(found, settings.clip)
        elif settings.clip is not None and found:
            scale = min(1.0, settings.clip / (float(nn.utils.get_total_norm(found)) + 1e-6))
        if not settings.momentum:
            if settings.weight_decay:
                torch._foreach_mul_(weights, 1 - self._lr * settings.weight_decay)
            torch._foreach_add_(weights, found, alpha=-self._lr * scale)
            return
        for i, gradient in zip(used, found, strict=True):
            if i not in self._momenta:
                self._momenta[i] = torch.zeros_like(gradient)
        momenta = [self._momenta[i] for i in used]
        torch._foreach_mul_(momenta, settings.momentum)
        torch._foreach_add_(momenta, found, alpha=scale)
        if settings.weight_decay:
            torch._foreach_add_(momenta, weights, alpha=settings.weight_decay)
        torch._foreach_add_(weights, momenta, alpha=-self._lr)

    def _clipped_apart(self, gradients: list[Tensor], clip: float) -> list[Tensor]:
        """The gradients of stacked nets, each net's clipped by its own norm."""
        norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in gradients]).norm(dim=0)
        scales = (clip / (norms + 1e-6)).clamp(max=1.0)
        return [g * scales.view(-1, *[1] * (g.ndim - 1)) for g in gradients]


class Learner(Protocol):
    """One net, or several, that learn from the batches of one client."""

    def step(
        self, x: Tensor, y: Tensor, own: tuple[int, ...] | None, generator: torch.Generator
    ) -> Tensor:
        """One step of each net on a batch; the mean of their losses."""
        ...

    def finish(self) -> None:
        """Puts what was learned into the modules."""
        ...


def learner(
    modules: Sequence[nn.Module],
    settings: Optimiser,
    lr: float,
    objective: Objective,
    *,
    together: bool,
) -> Learner:
    """Trains nets one after another on each batch, or all of them in one pass."""
    if together and len(modules) > 1 and objective == Plain():
        return _Together(modules, settings, lr)
    return _InTurn(modules, settings, lr, objective)


class _InTurn:
    def __init__(
        self, modules: Sequence[nn.Module], settings: Optimiser, lr: float, objective: Objective
    ) -> None:
        self._nets = [(module, Descent(module.parameters(), settings, lr)) for module in modules]
        self._objective = objective

    def step(
        self, x: Tensor, y: Tensor, own: tuple[int, ...] | None, generator: torch.Generator
    ) -> Tensor:
        total = torch.zeros(())
        for module, descent in self._nets:
            loss = self._objective.loss(module, x, y, own, generator)
            descent.step(loss)
            total += loss.detach()
        return total / len(self._nets)

    def finish(self) -> None:
        pass


class _Together:
    """Nets of one shape in one pass: their tensors stacked, and every operation done on the stack.

    Convolutions become grouped ones and matrix products batched ones.
    """

    def __init__(self, modules: Sequence[nn.Module], settings: Optimiser, lr: float) -> None:
        self._modules = list(modules)
        weights, buffers = stack_module_state(self._modules)
        self._weights = {n: w.detach().requires_grad_(w.requires_grad) for n, w in weights.items()}
        self._buffers = buffers
        # clipping is per net, so it cannot be left to one step over the stack
        self._descent = Descent(self._weights.values(), settings, lr, nets=len(self._modules))

    def step(
        self, x: Tensor, y: Tensor, own: tuple[int, ...] | None, generator: torch.Generator
    ) -> Tensor:
        logits = vmap(self._call, in_dims=(0, 0, None), randomness="different")(
            self._weights, self._buffers, x
        )
        losses = torch.stack([cross_entropy(some, y, own) for some in logits])
        self._descent.step(losses.sum())
        return losses.detach().mean()

    def _call(self, weights: Any, buffers: Any, x: Tensor) -> Any:
        return call_with(self._modules[0], {**weights, **buffers}, (x,))

    @torch.no_grad()
    def finish(self) -> None:
        for number, module in enumerate(self._modules):
            own = named_tensors(module)
            for name, stack in {**self._weights, **self._buffers}.items():
                own[name].copy_(stack[number])


CLEARLY = 1.5  # times quicker, so that noise does not decide


def is_quicker_together(
    model: nn.Module, example: Example, count: int, batch_size: int, tries: int = 3
) -> bool:
    """Whether nets of this shape train clearly quicker in one pass than one after another.

    A short trial on inputs like the example, on one thread as clients train.
    """
    nets = [copy.deepcopy(model).train() for _ in range(count)]
    x = torch.cat([arguments(example)[0]] * batch_size)[:batch_size]
    settings = Optimiser(clip=None)
    seconds = {}
    with one_thread(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are slow on a stack: they are timed
        y = torch.zeros(nets[0](x).shape[:-1], dtype=torch.int64)
        generator = torch.Generator()
        for together in (False, True):
            trained = learner(nets, settings, 0.0, Plain(), together=together)
            times = []
            try:
                for _ in range(tries + 1):
                    started = time.perf_counter()
                    trained.step(x, y, None, generator)
                    times.append(time.perf_counter() - started)
            except RuntimeError:  # not every operation can be done on a stack
                return False
            seconds[together] = min(times[1:])
    return seconds[True] * CLEARLY < seconds[False]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch with one thread, as clients train everywhere, so that the bits are the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
