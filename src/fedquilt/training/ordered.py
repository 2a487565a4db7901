"""Ordered dropout: nested widths of one net, one of them drawn for every batch (FjORD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.federation.boundary import Terms, training
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.training.descent import Optimiser
from fedquilt.training.losses import cross_entropy
from fedquilt.training.recipe import Workbench
from fedquilt.training.slimmable import train_nested


@dataclass(frozen=True)
class OrderedDropout:
    """The recipe: on every batch, one of the task's widths is drawn, each equally likely; one step.

    The task's subnets are nested, the widest first. The others have its weights, but for what they
    own, which travels with them and comes back only if they were trained. With ``distil`` the
    widest learns from the labels of every batch, and a narrower one that is drawn learns from the
    widest one's answers alone; without it the drawn one learns from the labels.
    """

    optimiser: Optimiser
    lr: float
    distil: bool = True
    weight: float = 1.0

    def run(self, task: Task, bench: Workbench) -> Update:
        """Trains the widths that are drawn."""
        draws = torch.Generator().manual_seed(seed_of(task.seed, 1))  # leaves the batches as is
        trained: set[int] = set()

        def losses(nets: list[nn.Module], x: Tensor, y: Tensor) -> list[Tensor | None]:
            drawn = int(torch.randint(len(nets), (), generator=draws))
            found = self._losses(nets, drawn, x, y)
            trained.update(found)
            return [found.get(number) for number in range(len(nets))]

        nets, metrics = train_nested(task, bench, self.optimiser, self.lr, losses)
        sent = tuple(
            subnet if number in trained else subnet.leaving(*subnet.own)
            for number, subnet in enumerate(task.subnets)
        )
        tensors = tuple(map(bench.tensors, nets, sent, task.subnets))
        return Update(task.client, sent, tensors, self.weight, metrics)

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be."""
        return Terms(task.subnets, self.weight, training(client.num_examples))

    def _losses(self, nets: list[nn.Module], drawn: int, x: Tensor, y: Tensor) -> dict[int, Tensor]:
        """The loss of each width that this batch trains."""
        if not self.distil or drawn == 0:
            return {drawn: cross_entropy(nets[drawn](x), y)}
        answers = nets[0](x)
        return {0: cross_entropy(answers, y), drawn: imitation(nets[drawn](x), answers)}


def imitation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy against a teacher's answers, from which the teacher learns nothing.

    Up to a constant, the divergence KL(softmax(teacher) ‖ softmax(logits)). Logits may have any
    number of axes; classes are on the last.

    >>> imitation(torch.zeros(1, 2), torch.tensor([[50.0, -50.0]]))  # ln 2: as from a label
    tensor(0.6931)
    """
    answers = teacher.detach().softmax(-1)
    return F.cross_entropy(logits.flatten(0, -2), answers.flatten(0, -2))
