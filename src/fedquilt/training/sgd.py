"""Plain local training: epochs of mini-batch SGD on one subnet, or on several side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.federation.boundary import Terms, training
from fedquilt.federation.client import Client, Task, Update
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser, learner
from fedquilt.training.objectives import Objective, Plain, through
from fedquilt.training.recipe import Workbench
from fedquilt.training.scaler import scaled
from fedquilt.training.tokens import Seen, reading, tokens_read


@dataclass(frozen=True)
class SGD:
    """The recipe: train the task's subnets on the client's data, send them back.

    Several subnets are trained side by side on the same batches, each by its own loss. A new
    optimiser each time, so momentum does not survive a round. ``masked`` trains on the
    client's own classes only; ``own_rows`` sends back only their rows of the output layer, and of
    embeddings only the rows that the client has read; ``scale`` is HeteroFL's Scaler. Tensors
    matching ``home`` never leave the client. ``together`` trains subnets of one
    shape in one pass instead of one after another.
    """

    optimiser: Optimiser
    lr: float
    labels: tuple[int, ...] = ()
    masked: bool = False
    own_rows: bool = False
    scale: bool = False
    home: tuple[str, ...] = ()
    weight: float = 1.0
    objective: Objective = field(default_factory=Plain)
    together: bool = False

    def run(self, task: Task, bench: Workbench) -> Update:
        """Trains the subnets."""
        examples = bench.examples("train", task.client)
        modules = [m.train() for m in bench.modules(task.subnets, task.params, self.home)]
        with ExitStack() as stack:
            for module in modules if self.scale else ():
                stack.enter_context(scaled(module, bench.structure))
            seen = [stack.enter_context(reading(m)) for m in modules if self.own_rows]
            loss = self._train(modules, examples, task.seed)
        own = [self._own(bench.structure, rows) for rows in seen] or [{}] * len(modules)
        sent = tuple(map(self._sent, task.subnets, own))
        for module, subnet in zip(modules, task.subnets, strict=True):
            bench.keep(module, subnet, self.home)
        return Update(
            task.client,
            sent,
            tuple(map(bench.tensors, modules, sent, task.subnets)),
            self.weight,
            {"loss": loss, "examples": len(examples)},
        )

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be."""
        least = getattr(self.objective, "least", -math.inf)
        return Terms(task.subnets, self.weight, training(client.num_examples, least))

    def _own(self, structure: Structure, seen: Seen) -> dict[str, set[int]]:
        """The classes that the client has and the tokens that it has read, by their groups."""
        own = tokens_read(structure, seen)
        if structure.classes and structure.classes in structure.groups:
            own.setdefault(structure.classes, set()).update(self.labels)
        return own

    def _sent(self, subnet: Subnet, own: Mapping[str, Iterable[int]]) -> Subnet:
        """What of a subnet goes back."""
        sent = subnet.leaving(*self.home) if self.home else subnet
        for group, rows in own.items():
            sent = sent.keeping(group, rows)
        return sent

    def _train(self, modules: list[nn.Module], examples: ClientData, seed: int) -> float:
        """Trains in place; the mean loss of the last epoch."""
        settings = self.optimiser
        objective = through(self.objective, examples)
        nets = learner(modules, settings, self.lr, objective, together=self.together)
        torch.default_generator.manual_seed(seed)  # what dropout and the like draw from
        generator = torch.Generator().manual_seed(seed)
        own = self.labels if self.masked else None
        total = torch.zeros(())
        for _ in range(settings.epochs):
            total, count = torch.zeros(()), 0
            for rows in batches(len(examples), settings.batch_size, generator):
                x, y = examples.batch(rows, generator)
                total += nets.step(x, y, own, generator) * len(rows)
                count += len(rows)
            total = total / count
        nets.finish()
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
