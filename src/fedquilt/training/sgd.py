"""Plain local training: epochs of mini-batch SGD on one subnet."""

from __future__ import annotations

from collections.abc import Iterator
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
        weights = [p for p in module.parameters() if p.requires_grad]
        sgd = torch.optim.SGD(
            weights,
            lr=self.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        torch.default_generator.manual_seed(seed)  # what dropout and the like draw from
        generator = torch.Generator().manual_seed(seed)
        foreign: Tensor | None = None
        total = torch.zeros(())
        for _ in range(settings.epochs):
            total, count = torch.zeros(()), 0
            for rows in batches(len(examples), settings.batch_size, generator):
                x, y = examples.batch(rows, generator)
                sgd.zero_grad(set_to_none=True)
                logits = module(x)
                if self.masked and foreign is None:
                    foreign = label_mask(self.labels, logits.shape[-1])
                loss = cross_entropy(logits, y, foreign)
                loss.backward()
                if settings.clip is not None:
                    nn.utils.clip_grad_norm_(weights, settings.clip)
                sgd.step()
                total += loss.detach() * len(rows)
                count += len(rows)
            total = total / count
        return float(total)


def batches(count: int, size: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Rows of each mini-batch, shuffled if there is a generator.

    A last batch of one example is left out when there are others: batch normalisation cannot
    train on it, and another epoch's shuffle brings the example back.
    """
    order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
    for rows in order.split(size):
        if generator is None or len(rows) > 1 or count == 1 or size == 1:
            yield rows
