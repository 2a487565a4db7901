"""Slimmable training: nested widths of one net, all of them on every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.federation.client import Client, ClientResult, Task, Update
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.learning.batch import Batch
from fedquilt.structure.cut import Index, global_name, index_cells_within, view_cells, write_cells
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.client_loss import Masked
from fedquilt.training.context import ClientContext
from fedquilt.training.loop import run_epochs
from fedquilt.training.optimizer_settings import OptimizerSettings
from fedquilt.training.optimizer_state import OptimizerMemory
from fedquilt.training.optimizers import make_optimizer
from fedquilt.training.scaler import scale_outputs
from fedquilt.training.settings import LocalTraining
from fedquilt.training.sgd import differentiate


@dataclass(frozen=True)
class Slimmable:
    """The recipe: on every batch, the gradients of all the task's widths are summed; one step.

    The task's subnets are nested, the widest first. The others share its weights, but for those
    that they own (their normalization), which travel with them.

    Args:
        local_training: Optimizer, epochs and batches.
        lr: The learning rate of this round.
        labels: The client's classes.
        masked: Whether the loss is over the client's classes only; ``batch``: over those of each
            batch.
        scale: Whether to use HeteroFL's Scaler.
        weight: How much the update counts in the mean.
    """

    local_training: LocalTraining
    lr: float
    labels: tuple[int, ...] = ()
    masked: Masked = False
    scale: bool = False
    weight: float = 1.0

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains all widths."""

        def losses(modules: list[nn.Module], batch: Batch) -> list[Tensor]:
            return [self._loss(module, batch, context) for module in modules]

        modules, metrics, state = train_nested(task, context, self.local_training, self.lr, losses)
        tensors = tuple(map(context.tensors, modules, task.subnets, task.subnets))
        update = Update(task.client, task.subnets, tensors, self.weight, metrics)
        return ClientResult(update, state)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be."""
        return ReplySpec(task.subnets, self.weight, training_metrics(client.num_examples))

    def _loss(self, module: nn.Module, batch: Batch, context: ClientContext) -> Tensor:
        loss = context.client_loss(self.labels, self.masked)
        with scale_outputs(module, context.structure) if self.scale else nullcontext():
            return loss.of_batch(module, batch)


Losses = Callable[[list[nn.Module], Batch], Sequence[Tensor | None]]


def train_nested(
    task: Task, context: ClientContext, settings: LocalTraining, lr: float, losses: Losses
) -> tuple[list[nn.Module], dict[str, float], Mapping[str, Tensor] | None]:
    """The task's nested subnets, the widest first, after training on what they share.

    ``losses`` are those of one batch, one for each net, or None where a net has no part in the
    step, which goes down their sum. Also what there is to report, the mean loss of the last epoch,
    and the client's new state if it has one.
    """
    examples = context.examples("train", task.client)
    modules = [m.train() for m in context.modules(task.subnets, task.params)]
    optimizer = settings.optimizer_at(lr, len(examples))
    nets = _NestedStep(context.structure, task.subnets, modules, optimizer)
    memory = OptimizerMemory(context, is_kept=settings.keep_optimizer)
    memory.attach(nets.optimizer, nets.moved)

    def step(batch: Batch, generator: torch.Generator) -> Tensor:
        return nets.step(losses(modules, batch))

    loss = run_epochs(examples, step, settings.loop, task.seed, context.report_progress)
    return modules, {"loss": loss, "examples": len(examples)}, memory.add_to(None)


class _NestedStep:
    """Nets that share the weights of the widest of them, the first."""

    def __init__(
        self,
        structure: Structure,
        subnets: tuple[Subnet, ...],
        modules: list[nn.Module],
        settings: OptimizerSettings,
    ) -> None:
        self._weights = [dict(module.named_parameters()) for module in modules]
        self._shared: list[Mapping[str, tuple[Index, ...]]] = []  # where, in the widest one's
        for weights, subnet in zip(self._weights[1:], subnets[1:], strict=True):
            where = index_cells_within(structure, subnets[0], subnet)
            shared = [n for n in weights if global_name(n, structure, subnet) == n]
            self._shared.append({n: where[n] for n in shared})
        own = [
            (name, subnet, weights[name])
            for weights, shared, subnet in zip(
                self._weights[1:], self._shared, subnets[1:], strict=True
            )
            for name in weights
            if name not in shared
        ]
        moving = [*((n, subnets[0], w) for n, w in self._weights[0].items()), *own]
        self.moved = [(name, subnet) for name, subnet, w in moving if w.requires_grad]
        self.optimizer = make_optimizer((weight for *_, weight in moving), settings)
        self._copy_shared()

    @torch.no_grad()
    def step(self, losses: Sequence[Tensor | None]) -> Tensor:
        """One step down the sum of the widths' losses, of those that have one; their mean."""
        sums, own = self._compute_gradients(losses[0], 0), []
        for number, shared in enumerate(self._shared):
            for name, gradient in self._compute_gradients(losses[number + 1], number + 1).items():
                if name not in shared:
                    own.append(gradient)
                elif gradient is not None:
                    sums[name] = add_at(sums[name], self._weights[0][name], shared[name], gradient)
        self.optimizer.apply_gradients([*sums.values(), *own])
        self._copy_shared()
        return torch.stack([loss.detach() for loss in losses if loss is not None]).mean()

    def _compute_gradients(self, loss: Tensor | None, number: int) -> dict[str, Tensor | None]:
        weights = {n: w for n, w in self._weights[number].items() if w.requires_grad}
        if loss is None:
            return dict.fromkeys(weights)
        return compute_gradients(loss, weights)

    @torch.no_grad()
    def _copy_shared(self) -> None:
        """The shared weights, as the widest net has them now."""
        for weights, shared in zip(self._weights[1:], self._shared, strict=True):
            for name, index in shared.items():
                weights[name].copy_(view_cells(self._weights[0][name], index))


def compute_gradients(loss: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradient of each weight, or None if it has no part in the loss; each a tensor alone.

    Weights that are added to each other may get one tensor from PyTorch.
    """
    gradients = differentiate(loss, list(weights.values()))
    alone = [
        g if id(g) not in map(id, gradients[:i]) or g is None else g.clone()
        for i, g in enumerate(gradients)
    ]
    return dict(zip(weights, alone, strict=True))


def add_at(total: Tensor | None, like: Tensor, index: tuple[Index, ...], part: Tensor) -> Tensor:
    """total[index] += part."""
    total = torch.zeros_like(like) if total is None else total
    if all(isinstance(i, slice) for i in index):
        total[index].add_(part)
    else:
        write_cells(total, index, view_cells(total, index).add_(part))
    return total
