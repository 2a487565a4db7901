"""Plain local training: epochs of mini-batch SGD on one subnet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.federation.client import Task, Update
from fedquilt.training.losses import cross_entropy, label_mask
from fedquilt.training.recipe import Workbench
from fedquilt.training.scaler import scaled


@dataclass(frozen=True)
class Optimiser:
    """Settings of local SGD; the learning rate is multiplied by ``decay`` at each milestone."""

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    epochs: int = 5
    batch_size: int = 10
    clip: float | None = 1.0  # largest norm of a gradient
    milestones: tuple[int, ...] = ()  # rounds at which the learning rate falls
    decay: float = 0.1

    def rate(self, round: int) -> float:
        """The learning rate of a round (multi-step schedule).

        >>> [Optimiser(lr=1.0, milestones=(2, 3)).rate(r) for r in range(4)]
        [1.0, 1.0, 0.1, 0.010000000000000002]
        """
        return self.lr * self.decay ** sum(round >= m for m in self.milestones)


@dataclass(frozen=True)
class SGD:
    """The recipe: train the task's subnet on the client's data, send it back.

    A new optimiser each time, so momentum does not survive a round. ``masked`` trains on the
    client's own classes only and ``own_rows`` sends back only their rows of the output layer;
    ``scale`` is HeteroFL's Scaler. Tensors matching ``home`` never leave the client.
    """

    optimiser: Optimiser
    lr: float
    labels: tuple[int, ...] = ()
    masked: bool = False
    own_rows: bool = False
    scale: bool = False
    home: tuple[str, ...] = ()
    weight: float = 1.0

    def run(self, task: Task, bench: Workbench) -> Update:
        """Trains one subnet."""
        (subnet,) = task.subnets
        examples = bench.examples("train", task.client)
        module = bench.module(subnet, task.params, self.home).train()
        with scaled(module, bench.structure) if self.scale else nullcontext():
            loss = self._train(module, examples, task.seed)
        bench.keep(module, self.home)
        sent = subnet.leaving(*self.home) if self.home else subnet
        classes = bench.structure.classes
        if self.own_rows and classes and classes in bench.structure.groups:
            sent = sent.keeping(classes, self.labels)
        return Update(
            task.client,
            (sent,),
            (bench.tensors(module, sent, subnet),),
            self.weight,
            {"loss": loss, "examples": len(examples)},
        )

    def _train(self, module: nn.Module, examples: ClientData, seed: int) -> float:
        """Trains in place; the mean loss of the last epoch."""
        settings = self.optimiser
        descent = Descent(module.parameters(), settings, self.lr)
        torch.default_generator.manual_seed(seed)  # what dropout and the like draw from
        generator = torch.Generator().manual_seed(seed)
        foreign: Tensor | None = None
        total = torch.zeros(())
        for _ in range(settings.epochs):
            total, count = torch.zeros(()), 0
            for rows in batches(len(examples), settings.batch_size, generator):
                x, y = examples.batch(rows, generator)
                logits = module(x)
                if self.masked and foreign is None:
                    foreign = label_mask(self.labels, logits.shape[-1])
                loss = cross_entropy(logits, y, foreign)
                descent.step(loss)
                total += loss.detach() * len(rows)
                count += len(rows)
            total = total / count
        return float(total)


class Descent:
    """One client's SGD in one round: weight decay, clipping, momentum.

    The same steps as ``torch.optim.SGD`` makes, without what an optimiser needs to be general. With
    the small nets of small devices that is an eighth of the time of training.
    """

    def __init__(self, weights: Iterable[nn.Parameter], settings: Optimiser, lr: float) -> None:
        self._weights = [w for w in weights if w.requires_grad]
        self._settings, self._lr = settings, lr
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
        settings, scale = self._settings, self._scale(found)
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

    def _scale(self, gradients: list[Tensor]) -> float:
        """What gradients are multiplied with so that their norm is at most ``clip``."""
        if self._settings.clip is None or not gradients:
            return 1.0
        norm = float(nn.utils.get_total_norm(gradients))
        return min(1.0, self._settings.clip / (norm + 1e-6))


def batches(count: int, size: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Rows of each mini-batch, shuffled if there is a generator.

    A last batch of one example is left out when there are others: batch normalisation cannot
    train on it, and another epoch's shuffle brings the example back.
    """
    order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
    for rows in order.split(size):
        if generator is None or len(rows) > 1 or count == 1 or size == 1:
            yield rows
