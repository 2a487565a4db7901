"""Static batch normalisation: ask clients for the statistics of their data (HeteroFL, Sec. 3.2)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.federation.boundary import Terms
from fedquilt.federation.client import Client, Task, Update
from fedquilt.structure.groups import STATISTICS, TRACKED
from fedquilt.structure.subnet import Subnet
from fedquilt.training.attack import PGD, frozen
from fedquilt.training.dualnorm import with_path
from fedquilt.training.recipe import Workbench
from fedquilt.training.scaler import scaled
from fedquilt.training.sgd import batches
from fedquilt.training.tracking import batch_statistics, cumulative

ONLY_STATISTICS = ("*", f"!{STATISTICS}")  # as a subnet's ``without``


@dataclass(frozen=True)
class Statistics:
    """The recipe: one pass over the client's data; its means and variances go back, nothing else.

    Every batch is normalised by itself, as in training, so what comes back does not depend on the
    statistics sent. Weighted by batches, the mean over clients is what one pass over all of
    their batches, one after another, would accumulate. ``scale`` is HeteroFL's Scaler. With
    ``personal`` the last subnet is the client's own: its statistics stay on the client. With an
    ``attack`` the noise halves of dual normalisation see every batch attacked, as in training.
    """

    batch_size: int
    epochs: int = 1  # passes over the data, shuffled anew each time
    scale: bool = False
    personal: bool = False
    attack: PGD | None = None

    def run(self, task: Task, bench: Workbench) -> Update:
        """Statistics of each subnet of the task."""
        examples = bench.examples("train", task.client)
        generator = torch.Generator().manual_seed(task.seed)
        rows = [
            some
            for _ in range(self.epochs)
            for some in batches(len(examples), self.batch_size, generator)
        ]
        sent, found, shared = [], [], self._shared(task)
        for subnet in shared:
            module = bench.module(subnet, task.params)
            self._accumulate(module, examples, rows, bench)
            only = replace(subnet, without=ONLY_STATISTICS)
            sent.append(only)
            found.append(bench.tensors(module, only, subnet))
        for own in task.subnets[len(shared) :]:
            module = bench.module(own, task.params, (TRACKED,))
            self._accumulate(module, examples, rows, bench)
            bench.keep(module, own, (TRACKED,))
        return Update(task.client, tuple(sent), tuple(found), float(len(rows)), {})

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be; it weighs by batches."""
        batches_each = math.ceil(client.num_examples / self.batch_size)
        return Terms(self._shared(task), float(self.epochs * batches_each), {})

    def _shared(self, task: Task) -> tuple[Subnet, ...]:
        """The subnets whose statistics are sent."""
        return task.subnets[: len(task.subnets) - self.personal]

    def _accumulate(
        self, module: nn.Module, examples: ClientData, rows: list[Tensor], bench: Workbench
    ) -> None:
        scale = scaled(module, bench.structure) if self.scale else nullcontext()
        attack = None if self.attack is None else self.attack.on(examples)
        generator = torch.Generator().manual_seed(0)  # where attacks start
        with torch.no_grad(), cumulative(module), scale:
            for some in rows:
                x, y = examples.batch(some)
                with with_path(module, 0.0):
                    module(x)
                if attack is not None:
                    with with_path(module, 1.0):
                        with batch_statistics(module), frozen(module):
                            near = attack.perturbed(module, x, y, generator)
                        module(near)


ENOUGH = 1024  # examples, to know means and variances


def calibrate(module: nn.Module, examples: ClientData, seed: int, batch_size: int = 128) -> None:
    """Takes a module's running statistics from examples; back to how it answers in use."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(examples), generator=generator)[:ENOUGH]
    parts = max(1, math.ceil(len(rows) / batch_size))
    with torch.no_grad(), cumulative(module):
        for some in rows.tensor_split(parts):
            module(examples.batch(some)[0])
    module.eval()
