"""Ordered dropout: nested widths of one net, one of them drawn for every batch (FjORD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.federation.client import Client, ClientResult, Task, Update, derive_seed
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.training.context import ClientContext
from fedquilt.training.loop import Batch
from fedquilt.training.losses import cross_entropy
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

        def losses(nets: list[nn.Module], batch: Batch) -> list[Tensor | None]:
            drawn = int(torch.randint(len(nets), (), generator=draws))
            by_width = self._losses(nets, drawn, batch)
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

    def _losses(self, nets: list[nn.Module], drawn: int, batch: Batch) -> dict[int, Tensor]:
        """The loss of each width that this batch trains."""
        x, y = batch
        if not self.distil or drawn == 0:
            return {drawn: cross_entropy(nets[drawn](x), y)}
        answers = nets[0](x)
        return {0: cross_entropy(answers, y), drawn: distillation_loss(nets[drawn](x), answers)}


def distillation_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy against a teacher's answers, from which the teacher learns nothing.

    Up to a constant, the divergence KL(softmax(teacher) ‖ softmax(logits)). Logits may have any
    number of axes; classes are on the last.

    >>> distillation_loss(torch.zeros(1, 2), torch.tensor([[50.0, -50.0]]))  # ln 2: as from a label
    tensor(0.6931)
    """
    answers = teacher.detach().softmax(-1)
    return F.cross_entropy(logits.flatten(0, -2), answers.flatten(0, -2))
