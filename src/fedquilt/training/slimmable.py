"""Slimmable training: nested widths of one net, all of them on every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.federation.boundary import Terms, training
from fedquilt.federation.client import Client, Task, Update
from fedquilt.structure.cut import Index, cells_within, put, source_name, view
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Descent, Optimiser
from fedquilt.training.losses import cross_entropy
from fedquilt.training.recipe import Workbench
from fedquilt.training.scaler import scaled
from fedquilt.training.sgd import batches


@dataclass(frozen=True)
class Slimmable:
    """The recipe: on every batch, the gradients of all the task's widths are summed; one step.

    The task's subnets are nested, the widest first. The others have its weights, but for those
    that they own (their normalisation), which travel with them.
    """

    optimiser: Optimiser
    lr: float
    labels: tuple[int, ...] = ()
    masked: bool = False
    scale: bool = False
    weight: float = 1.0

    def run(self, task: Task, bench: Workbench) -> Update:
        """Trains all widths."""

        def losses(modules: list[nn.Module], x: Tensor, y: Tensor) -> list[Tensor]:
            return [self._loss(module, x, y, bench.structure) for module in modules]

        modules, metrics = train_nested(task, bench, self.optimiser, self.lr, losses)
        return Update(
            task.client,
            task.subnets,
            tuple(map(bench.tensors, modules, task.subnets, task.subnets)),
            self.weight,
            metrics,
        )

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be."""
        return Terms(task.subnets, self.weight, training(client.num_examples))

    def _loss(self, module: nn.Module, x: Tensor, y: Tensor, structure: Structure) -> Tensor:
        with scaled(module, structure) if self.scale else nullcontext():
            return cross_entropy(module(x), y, self.labels if self.masked else None)


Losses = Callable[[list[nn.Module], Tensor, Tensor], Sequence[Tensor | None]]


def train_nested(
    task: Task, bench: Workbench, settings: Optimiser, lr: float, losses: Losses
) -> tuple[list[nn.Module], dict[str, float]]:
    """The task's nested subnets, the widest first, after training on what they share.

    ``losses`` are those of one batch, one for each net, or None where a net has no part in the
    step, which goes down their sum. Also what there is to report: the mean loss of the last epoch.
    """
    examples = bench.examples("train", task.client)
    modules = [m.train() for m in bench.modules(task.subnets, task.params)]
    nets = _Nested(bench.structure, task.subnets, modules, settings, lr)
    torch.default_generator.manual_seed(task.seed)
    generator = torch.Generator().manual_seed(task.seed)
    total = torch.zeros(())
    for _ in range(settings.epochs):
        total, count = torch.zeros(()), 0
        for rows in batches(len(examples), settings.batch_size, generator):
            x, y = examples.batch(rows, generator)
            total += nets.step(losses(modules, x, y)) * len(x)
            count += len(rows)
        total = total / count
    return modules, {"loss": float(total), "examples": len(examples)}


class _Nested:
    """Nets that share the weights of the widest of them, the first."""

    def __init__(
        self,
        structure: Structure,
        subnets: tuple[Subnet, ...],
        modules: list[nn.Module],
        settings: Optimiser,
        lr: float,
    ) -> None:
        self._weights = [dict(module.named_parameters()) for module in modules]
        self._shared: list[Mapping[str, tuple[Index, ...]]] = []  # where, in the widest one's
        for weights, subnet in zip(self._weights[1:], subnets[1:], strict=True):
            where = cells_within(structure, subnets[0], subnet)
            shared = [n for n in weights if source_name(n, structure, subnet) == n]
            self._shared.append({n: where[n] for n in shared})
        own = [
            weight
            for weights, shared in zip(self._weights[1:], self._shared, strict=True)
            for name, weight in weights.items()
            if name not in shared
        ]
        self._descent = Descent([*self._weights[0].values(), *own], settings, lr)
        self._give_out()

    @torch.no_grad()
    def step(self, losses: Sequence[Tensor | None]) -> Tensor:
        """One step down the sum of the widths' losses, of those that have one; their mean."""
        sums, own = self._gradients(losses[0], 0), []
        for number, shared in enumerate(self._shared):
            for name, gradient in self._gradients(losses[number + 1], number + 1).items():
                if name not in shared:
                    own.append(gradient)
                elif gradient is not None:
                    sums[name] = added(sums[name], self._weights[0][name], shared[name], gradient)
        self._descent.follow([*sums.values(), *own])
        self._give_out()
        return torch.stack([loss.detach() for loss in losses if loss is not None]).mean()

    def _gradients(self, loss: Tensor | None, number: int) -> dict[str, Tensor | None]:
        weights = {n: w for n, w in self._weights[number].items() if w.requires_grad}
        if loss is None:
            return dict.fromkeys(weights)
        return gradients(loss, weights)

    @torch.no_grad()
    def _give_out(self) -> None:
        """The shared weights, as the widest net has them now."""
        for weights, shared in zip(self._weights[1:], self._shared, strict=True):
            for name, index in shared.items():
                weights[name].copy_(view(self._weights[0][name], index))


def gradients(loss: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradient of each weight, or None if it has no part in the loss; each a tensor alone.

    Weights that are added to each other may get one tensor from PyTorch.
    """
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    alone = [
        g if id(g) not in map(id, found[:i]) or g is None else g.clone()
        for i, g in enumerate(found)
    ]
    return dict(zip(weights, alone, strict=True))


def added(total: Tensor | None, like: Tensor, index: tuple[Index, ...], part: Tensor) -> Tensor:
    """total[index] += part."""
    total = torch.zeros_like(like) if total is None else total
    if all(isinstance(i, slice) for i in index):
        total[index].add_(part)
    else:
        put(total, index, view(total, index).add_(part))
    return total
