"""Ordered dropout: nested widths of one net, one of them drawn for every batch (FjORD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.federation.client import Client, ClientResult, Task, Update, derive_seed
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.learning.batch import Batch
from fedquilt.structure.tensors import to_arguments
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.context import ClientContext
from fedquilt.training.settings import LocalTraining
from fedquilt.training.slimmable import train_nested


@dataclass(frozen=True)
class OrderedDropout:
    """The recipe: on every batch, one of the task's widths is drawn, each equally likely; one step.

    The task's subnets are nested, the widest first. The others share its weights, but for what they
    own, which travels with them and is sent back only if they were trained.

    Args:
        local_training: Optimizer, epochs and batches.
        lr: The learning rate of this round.
        distil: Whether the widest net learns from the labels of every batch, and a narrower one
            that is drawn from the widest one's logits alone; else the drawn one learns from labels.
        weight: How much the update counts in the mean.
    """

    local_training: LocalTraining
    lr: float
    distil: bool = True
    weight: float = 1.0

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains the widths that are drawn."""
        draws = torch.Generator().manual_seed(derive_seed(task.seed, 1))  # leaves the batches as is
        trained: set[int] = set()
        loss = context.client_loss()

        def losses(nets: list[nn.Module], batch: Batch) -> list[Tensor | None]:
            drawn = int(torch.randint(len(nets), (), generator=draws))
            by_width = self._losses(nets, drawn, batch, loss)
            trained.update(by_width)
            return [by_width.get(number) for number in range(len(nets))]

        nets, metrics, state = train_nested(task, context, self.local_training, self.lr, losses)
        sent = tuple(
            subnet if number in trained else subnet.excluding(*subnet.private)
            for number, subnet in enumerate(task.subnets)
        )
        tensors = tuple(map(context.tensors, nets, sent, task.subnets))
        return ClientResult(Update(task.client, sent, tensors, self.weight, metrics), state)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be."""
        return ReplySpec(task.subnets, self.weight, training_metrics(client.num_examples))

    def _losses(
        self, nets: list[nn.Module], drawn: int, batch: Batch, loss: ClientLoss
    ) -> dict[int, Tensor]:
        """The loss of each width that this batch trains."""
        if not self.distil or drawn == 0:
            return {drawn: loss.of_batch(nets[drawn], batch)}
        x, y = batch
        inputs = to_arguments(x)
        answers = nets[0](*inputs)
        imitated = loss.loss.distil(nets[drawn](*inputs), answers, y)
        return {0: loss(answers, y), drawn: imitated}
