"""Count right answers on a client's test data; only the counts leave the client."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedquilt.federation.client import Task, Update
from fedquilt.training.losses import cross_entropy, label_mask
from fedquilt.training.recipe import Workbench


@dataclass(frozen=True)
class Evaluate:
    """The recipe: each subnet's hits and loss on a part of the test data.

    ``labels`` restricts answers to the client's own classes ("Local" accuracy); ``part`` of
    ``parts`` is the share of the data that this task looks at.
    """

    batch_size: int = 250
    labels: tuple[int, ...] | None = None
    part: int = 0
    parts: int = 1
    home: tuple[str, ...] = ()
    split: str = "test"
    of: int | None = None  # whose data, if not the client's own

    def run(self, task: Task, bench: Workbench) -> Update:
        """Evaluates each subnet of the task."""
        examples = bench.examples(self.split, task.client if self.of is None else self.of)
        everything = torch.arange(len(examples))
        rows = everything.tensor_split(self.parts)[self.part]
        metrics: dict[str, float] = {"examples": len(rows)}
        for i, subnet in enumerate(task.subnets):
            module = bench.module(subnet, task.params, self.home).eval()
            hits, loss = 0, 0.0
            with torch.inference_mode():
                for some in rows.split(self.batch_size):
                    x, y = examples.batch(some)
                    logits = module(x)
                    loss += float(cross_entropy(logits, y)) * len(some)
                    if self.labels is not None:  # zero probability for classes it does not have
                        foreign = label_mask(self.labels, logits.shape[-1])
                        logits = logits.masked_fill(foreign, -torch.inf)
                    hits += int((logits.argmax(-1) == y).sum())
            metrics[f"hits:{i}"], metrics[f"loss:{i}"] = hits, loss
        return Update(task.client, (), (), 0.0, metrics)
