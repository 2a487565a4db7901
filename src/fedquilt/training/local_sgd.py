"""Plain local training: epochs of mini-batch SGD on one subnet, or on several side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from fedquilt.federation.client import Client, ClientResult, Task, Update
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext
from fedquilt.training.loop import run_epochs
from fedquilt.training.objectives import Objective, PlainLoss, bind_examples
from fedquilt.training.optimizer_state import OptimizerMemory
from fedquilt.training.optimizers import trainable_weights
from fedquilt.training.scaler import scale_outputs
from fedquilt.training.settings import LocalTraining
from fedquilt.training.tokens import Seen, map_tokens_to_groups, record_tokens
from fedquilt.training.trainer import make_trainer


@dataclass(frozen=True)
class LocalSGD:
    """The recipe: train the task's subnets on the client's data, send them back.

    Several subnets are trained side by side on the same batches, each by its own loss. The
    optimizer is new each time, unless its state is kept.

    Args:
        local_training: Optimizer, epochs and batches.
        lr: The learning rate of this round.
        labels: The client's classes.
        masked: Whether the loss is over the client's classes only.
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
    masked: bool = False
    own_rows: bool = False
    scale: bool = False
    local_params: tuple[str, ...] = ()
    weight: float = 1.0
    objective: Objective = field(default_factory=PlainLoss)
    stacked: bool = False

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains the subnets."""
        examples = context.examples("train", task.client)
        modules = [m.train() for m in context.modules(task.subnets, task.params, self.local_params)]
        with ExitStack() as stack:
            for module in modules if self.scale else ():
                stack.enter_context(scale_outputs(module, context.structure))
            seen = [stack.enter_context(record_tokens(m)) for m in modules if self.own_rows]
            settings = self.local_training
            trainer = make_trainer(
                modules,
                settings.optimizer_at(self.lr, len(examples)),
                bind_examples(self.objective, examples),
                context.client_loss(self.labels if self.masked else None),
                stacked=self.stacked and not settings.keep_optimizer,
            )
            memory = OptimizerMemory(context, is_kept=settings.keep_optimizer)
            nets = zip(trainer.optimizers, modules, task.subnets, strict=not self.stacked)
            for optimizer, module, subnet in nets:
                memory.attach(optimizer, ((name, subnet) for name in trainable_weights(module)))
            loss = run_epochs(
                examples, trainer.step, settings.loop, task.seed, context.report_progress
            )
            trainer.finish()
        own = [self._find_own_rows(context, rows) for rows in seen] or [{}] * len(modules)
        sent = tuple(map(self._select_sent, task.subnets, own))
        update = Update(
            task.client,
            sent,
            tuple(map(context.tensors, modules, sent, task.subnets)),
            self.weight,
            {"loss": loss, "examples": len(examples)},
        )
        state = context.next_client_state(modules, task.subnets, self.local_params)
        return ClientResult(update, memory.add_to(state))

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
