"""Plain local training: epochs of mini-batch SGD on one subnet, or on several side by side."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fedquilt.federation.client import Client, ClientResult, Task, Update
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.learning.batch import Batch
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.client_loss import Masked
from fedquilt.training.context import ClientContext
from fedquilt.training.loop import run_epochs
from fedquilt.training.objectives import (
    Objective,
    PlainLoss,
    StackableObjective,
    bind_examples,
    is_stackable,
)
from fedquilt.training.optimizer_state import OptimizerMemory
from fedquilt.training.optimizers import WeightOptimizer, trainable_weights
from fedquilt.training.scaler import hook_scale, scale_outputs
from fedquilt.training.settings import LocalTraining
from fedquilt.training.stack.clients import StackableRecipe, require_program
from fedquilt.training.stack.layers import UnstackableError
from fedquilt.training.stack.nets import PLAIN, NetStack
from fedquilt.training.stack.program import StackedModel
from fedquilt.training.tokens import Seen, map_tokens_to_groups, record_tokens
from fedquilt.training.trainer import make_trainer


@dataclass(frozen=True)
class LocalSGD(StackableRecipe):
    """The recipe: train the task's subnets on the client's data, send them back.

    Several subnets are trained side by side on the same batches, each by its own loss. The
    optimizer is new each time, unless its state is kept.

    Args:
        local_training: Optimizer, epochs and batches.
        lr: The learning rate of this round.
        labels: The client's classes.
        masked: Whether the loss is over the client's classes only; ``batch``: over those of each
            batch.
        own_rows: Whether only the rows of the client's classes are sent of the output layer, and
            of embeddings only the rows of tokens that the client has.
        scale: Whether to use HeteroFL's Scaler.
        local_params: Patterns of tensors that never leave the client.
        weight: How much the update counts in the mean.
        objective: What is minimized on each batch.
        stacked: Whether subnets of one shape are trained in one pass.

    >>> import torch, fedquilt as fq
    >>> inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    >>> clients = fq.make_clients((inputs, labels), count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure = fq.trace_structure(model, inputs[:1])
    >>> recipe = fq.LocalSGD(fq.LocalTraining(epochs=1), lr=0.1, weight=6.0)
    >>> task = fq.Task(0, (structure.subnet(),), model.state_dict(), recipe, seed=0)
    >>> context = fq.ClientContext(model, structure, {"train": clients.train})
    >>> update = recipe.run(task, context).update
    >>> update.weight, sorted(update.metrics)
    (6.0, ['examples', 'loss'])
    """

    local_training: LocalTraining
    lr: float
    labels: tuple[int, ...] = ()
    masked: Masked = False
    own_rows: bool = False
    scale: bool = False
    local_params: tuple[str, ...] = ()
    weight: float = 1.0
    objective: Objective = field(default_factory=PlainLoss)
    stacked: bool = False

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains the subnets."""
        job = _Job(self, task, context)
        with ExitStack() as stack:
            for module in job.modules if self.scale else ():
                stack.enter_context(scale_outputs(module, context.structure))
            seen = [stack.enter_context(record_tokens(m)) for m in job.modules if self.own_rows]
            trainer = make_trainer(
                job.modules,
                job.optimizer_settings,
                job.objective,
                job.loss,
                program=job.find_program() if self.stacked else None,
            )
            memory = job.restore(trainer.optimizers)
            loops = self.local_training.loop
            loss = run_epochs(job.examples, trainer.step, loops, task.seed, context.report_progress)
            trainer.finish()
        own = [self._find_own_rows(context, rows) for rows in seen]
        return job.make_result(memory, loss, own)

    def stack_key(self, task: Task) -> str | None:
        """What must be equal for clients to train in one pass; None: each trains alone.

        A client with several subnets has a pass of its own for them, see ``stacked``.
        """
        if not is_stackable(self.objective) or len(task.subnets) != 1:
            return None
        return repr(replace(self, labels=(), weight=1.0))

    def make_job(self, task: Task, context: ClientContext) -> _Job:
        """The work of one client."""
        return _Job(self, task, context)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be."""
        least = getattr(self.objective, "least", -math.inf)
        return ReplySpec(task.subnets, self.weight, training_metrics(client.num_examples, least))

    def sent_subnets(self, task: Task) -> tuple[Subnet, ...]:
        """The task's subnets without what stays on the client."""
        return tuple(self._select_sent(subnet, {}) for subnet in task.subnets)

    def _find_own_rows(self, context: ClientContext, seen: Seen) -> dict[str, set[int]]:
        """The classes that the client has and the tokens that it has read, by their groups."""
        structure = context.structure
        own = map_tokens_to_groups(structure, seen)
        is_class = context.task.has_classes and bool(self.labels)
        if is_class and structure.classes is not None and structure.classes in structure.groups:
            own.setdefault(structure.classes, set()).update(self.labels)
        return own

    def _select_sent(self, subnet: Subnet, own: Mapping[str, Iterable[int]]) -> Subnet:
        """What of a subnet goes back."""
        sent = subnet.excluding(*self.local_params) if self.local_params else subnet
        for group, rows in own.items():
            sent = sent.restricted_to(group, rows)
        return sent


class _Job:
    """One client's local training: what it starts from, and what comes of it."""

    def __init__(self, recipe: LocalSGD, task: Task, context: ClientContext) -> None:
        self.recipe, self.task, self.context = recipe, task, context
        self.examples = context.examples("train", task.client)
        self.loop, self.seed = recipe.local_training.loop, task.seed
        built = context.modules(task.subnets, task.params, recipe.local_params)
        self.modules = [module.train() for module in built]
        self.loss = context.client_loss(recipe.labels, recipe.masked)
        self.optimizer_settings = recipe.local_training.optimizer_at(recipe.lr, len(self.examples))
        self.objective = bind_examples(recipe.objective, self.examples)

    def require_program(self) -> tuple[StackedModel, StackableObjective]:
        """What computes all nets in one pass, and what they minimize.

        Raises:
            UnstackableError: There is none.
        """
        recipe, module, objective = self.recipe, self.modules[0], self.objective
        if not is_stackable(objective):
            raise UnstackableError("its objective is that of one net")
        kinds = (nn.Embedding, nn.EmbeddingBag)
        if recipe.own_rows and any(isinstance(layer, kinds) for layer in module.modules()):
            raise UnstackableError("each client sends the rows of the tokens that it has read")
        is_attacked = objective != PLAIN
        program = require_program(self, module, scale=recipe.scale, in_evaluation=is_attacked)
        return program, objective

    def find_program(self) -> StackedModel | None:
        """What computes the client's nets in one pass; None if there is nothing.

        Nets that draw would do so in another order than one after another.
        """
        if len(self.modules) == 1:
            return None
        try:
            program, _ = self.require_program()
        except UnstackableError:
            return None
        return None if program.draws else program

    def restore(self, optimizers: Sequence[WeightOptimizer]) -> OptimizerMemory:
        """Gives optimizers the state of the client's last round, if it is kept."""
        memory = OptimizerMemory(self.context, is_kept=self.recipe.local_training.keep_optimizer)
        nets = zip(optimizers, self.modules, self.task.subnets, strict=True)
        for optimizer, module, subnet in nets:
            memory.attach(optimizer, ((name, subnet) for name in trainable_weights(module)))
        return memory

    def make_stack(self, count: int) -> NetStack:
        """Room for the nets of as many clients."""
        program, objective = self.require_program()
        return NetStack(program, named_tensors(self.modules[0]), count, objective)

    def load(self, stack: NetStack, number: int) -> None:
        """Copies the client's net into a stack."""
        if self.objective != stack.objective:
            raise UnstackableError("clients have inputs of other scales, which are attacked")
        tensors = named_tensors(self.modules[0])
        self.memory = self.restore([stack.load(number, tensors, self.optimizer_settings)])

    def finish(self, stack: NetStack, number: int, loss: float) -> ClientResult:
        """What the client sends of its trained net."""
        stack.copy_to(number, named_tensors(self.modules[0]))
        own = self.recipe._find_own_rows(self.context, {}) if self.recipe.own_rows else {}
        return self.make_result(self.memory, loss, [own])

    def make_step(self) -> Callable[[Batch, torch.Generator], object]:
        """What trains a copy of the client's net on a batch."""
        module, settings = copy.deepcopy(self.modules[0]), self.optimizer_settings
        if self.recipe.scale:
            hook_scale(module, self.context.structure)
        return make_trainer([module], settings, self.objective, self.loss).step

    def make_result(
        self, memory: OptimizerMemory, loss: float, own_rows: Sequence[Mapping[str, set[int]]]
    ) -> ClientResult:
        """What the client sends of its trained modules, and what it keeps."""
        task, context, recipe = self.task, self.context, self.recipe
        own_rows = own_rows or [{}] * len(self.modules)
        sent = tuple(map(recipe._select_sent, task.subnets, own_rows))
        update = Update(
            task.client,
            sent,
            tuple(map(context.tensors, self.modules, sent, task.subnets)),
            recipe.weight,
            {"loss": loss, "examples": len(self.examples)},
        )
        state = context.next_client_state(self.modules, task.subnets, recipe.local_params)
        return ClientResult(update, memory.add_to(state))
