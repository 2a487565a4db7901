"""Slimmable training: nested widths of one net, all of them on every batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedquilt.federation.client import Client, ClientResult, Task, Update
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.learning.batch import Batch
from fedquilt.structure.cut import (
    WHOLE,
    Index,
    global_name,
    index_cells_within,
    view_cells,
    write_cells,
)
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.client_loss import Masked
from fedquilt.training.context import ClientContext
from fedquilt.training.loop import run_epochs
from fedquilt.training.optimizer_settings import OptimizerSettings
from fedquilt.training.optimizer_state import OptimizerMemory
from fedquilt.training.optimizers import make_optimizer
from fedquilt.training.scaler import hook_scale, scale_outputs
from fedquilt.training.settings import LocalTraining
from fedquilt.training.sgd import differentiate
from fedquilt.training.stack.clients import StackableRecipe, require_program
from fedquilt.training.stack.nested import NestedProgram, Place, SumOverWidths
from fedquilt.training.stack.nets import NetStack


@dataclass(frozen=True)
class Slimmable(StackableRecipe):
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
        return self._make_result(task, context, modules, metrics, state)

    def stack_key(self, task: Task) -> Hashable:
        """What must be equal for clients to train in one pass, and how their widths are nested."""
        return repr(replace(self, labels=(), weight=1.0)), task.subnets

    def make_job(self, task: Task, context: ClientContext) -> _Job:
        """The work of one client."""
        return _Job(self, task, context)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be."""
        return ReplySpec(task.subnets, self.weight, training_metrics(client.num_examples))

    def _make_result(
        self,
        task: Task,
        context: ClientContext,
        modules: Sequence[nn.Module],
        metrics: Mapping[str, float],
        state: Mapping[str, Tensor] | None,
    ) -> ClientResult:
        """What the client sends of its trained modules."""
        tensors = tuple(map(context.tensors, modules, task.subnets, task.subnets))
        return ClientResult(Update(task.client, task.subnets, tensors, self.weight, metrics), state)

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
    nested = _NestedStep(_NestedNets(context.structure, task.subnets, modules), optimizer)
    memory = OptimizerMemory(context, is_kept=settings.keep_optimizer)
    memory.attach(nested.optimizer, nested.nets.moved)

    def step(batch: Batch, generator: torch.Generator) -> Tensor:
        return nested.step(losses(modules, batch))

    loss = run_epochs(examples, step, settings.loop, task.seed, context.report_progress)
    return modules, {"loss": loss, "examples": len(examples)}, memory.add_to(None)


class _NestedNets:
    """Nets that share the weights of the widest of them, the first."""

    def __init__(
        self, structure: Structure, subnets: tuple[Subnet, ...], modules: Sequence[nn.Module]
    ) -> None:
        self.modules = modules
        self.weights = [dict(module.named_parameters()) for module in modules]
        self.shared: list[Mapping[str, tuple[Index, ...]]] = []  # where, in the widest one's
        for weights, subnet in zip(self.weights[1:], subnets[1:], strict=True):
            where = index_cells_within(structure, subnets[0], subnet)
            shared = [n for n in weights if global_name(n, structure, subnet) == n]
            self.shared.append({n: where[n] for n in shared})
        own = [
            (name, subnet, weights[name])
            for weights, shared, subnet in zip(
                self.weights[1:], self.shared, subnets[1:], strict=True
            )
            for name in weights
            if name not in shared
        ]
        self.moving = [*((n, subnets[0], w) for n, w in self.weights[0].items()), *own]
        self.moved = [(name, subnet) for name, subnet, w in self.moving if w.requires_grad]
        self.copy_shared()

    @torch.no_grad()
    def copy_shared(self) -> None:
        """The shared weights, as the widest net has them now."""
        for weights, shared in zip(self.weights[1:], self.shared, strict=True):
            for name, index in shared.items():
                weights[name].copy_(view_cells(self.weights[0][name], index))

    def list_places(self) -> list[dict[str, Place]]:
        """Where each net has its tensors among those of all, see ``tensors``."""
        places: list[dict[str, Place]] = []
        for number, (module, shared) in enumerate(
            zip(self.modules, [{}, *self.shared], strict=True)
        ):
            places.append({})
            for name in named_tensors(module):
                key = f"{name}@{number}" if number else name
                is_shared = name in shared
                index = (WHOLE, *shared[name]) if is_shared else None  # the first axis: nets
                places[-1][name] = (name, index) if is_shared else (key, None)
        return places

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all nets by name, those that move in the order of ``moved``."""
        return {
            key: tensor
            for module, places in zip(self.modules, self.list_places(), strict=True)
            for name, tensor in named_tensors(module).items()
            for key, index in [places[name]]
            if index is None
        }


class _NestedStep:
    """Trains nets that share weights."""

    def __init__(self, nets: _NestedNets, settings: OptimizerSettings) -> None:
        self.nets = nets
        self.optimizer = make_optimizer((weight for *_, weight in nets.moving), settings)

    @torch.no_grad()
    def step(self, losses: Sequence[Tensor | None]) -> Tensor:
        """One step down the sum of the widths' losses, of those that have one; their mean."""
        sums, own = self._compute_gradients(losses[0], 0), []
        for number, shared in enumerate(self.nets.shared):
            for name, gradient in self._compute_gradients(losses[number + 1], number + 1).items():
                if name not in shared:
                    own.append(gradient)
                elif gradient is not None:
                    widest = self.nets.weights[0][name]
                    sums[name] = add_at(sums[name], widest, shared[name], gradient)
        self.optimizer.apply_gradients([*sums.values(), *own])
        self.nets.copy_shared()
        return torch.stack([loss.detach() for loss in losses if loss is not None]).mean()

    def _compute_gradients(self, loss: Tensor | None, number: int) -> dict[str, Tensor | None]:
        weights = {n: w for n, w in self.nets.weights[number].items() if w.requires_grad}
        if loss is None:
            return dict.fromkeys(weights)
        return compute_gradients(loss, weights)


class _Job:
    """One client's work, to be done with that of others."""

    def __init__(self, recipe: Slimmable, task: Task, context: ClientContext) -> None:
        self.recipe, self.task, self.context = recipe, task, context
        self.examples = context.examples("train", task.client)
        self.loop, self.seed = recipe.local_training.loop, task.seed
        self.loss = context.client_loss(recipe.labels, recipe.masked)
        self.optimizer_settings = recipe.local_training.optimizer_at(recipe.lr, len(self.examples))
        modules = [module.train() for module in context.modules(task.subnets, task.params)]
        self.nets = _NestedNets(context.structure, task.subnets, modules)

    def make_stack(self, count: int) -> NetStack:
        """Room for the nets of as many clients."""
        scale = self.recipe.scale
        programs = [require_program(self, module, scale=scale) for module in self.nets.modules]
        program = NestedProgram(programs, self.nets.list_places())
        return NetStack(program, self.nets.tensors(), count, SumOverWidths())

    def load(self, stack: NetStack, number: int) -> None:
        """Copies the client's nets into a stack."""
        optimizer = stack.load(number, self.nets.tensors(), self.optimizer_settings)
        is_kept = self.recipe.local_training.keep_optimizer
        self.memory = OptimizerMemory(self.context, is_kept=is_kept)
        self.memory.attach(optimizer, self.nets.moved)

    def finish(self, stack: NetStack, number: int, loss: float) -> ClientResult:
        """What the client sends; its loss is the mean over widths."""
        stack.copy_to(number, self.nets.tensors())
        self.nets.copy_shared()
        metrics = {"loss": loss / len(self.nets.modules), "examples": len(self.examples)}
        modules, state = self.nets.modules, self.memory.add_to(None)
        return self.recipe._make_result(self.task, self.context, modules, metrics, state)

    def make_step(self) -> Callable[[Batch, torch.Generator], object]:
        """What trains copies of the client's nets on a batch."""
        modules = copy.deepcopy(list(self.nets.modules))
        for module in modules if self.recipe.scale else ():
            hook_scale(module, self.context.structure)
        nets = _NestedNets(self.context.structure, self.task.subnets, modules)
        nested = _NestedStep(nets, self.optimizer_settings)
        return lambda batch, _: nested.step([self.loss.of_batch(m, batch) for m in modules])


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
