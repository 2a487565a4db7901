"""Static batch normalisation: ask clients for the statistics of their data (HeteroFL, Sec. 3.2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.data import ClientData
from fedquilt.federation.boundary import Terms
from fedquilt.federation.client import Client, Task, Update
from fedquilt.structure.groups import STATISTICS
from fedquilt.training.recipe import Workbench
from fedquilt.training.sgd import batches

ONLY_STATISTICS = ("*", f"!{STATISTICS}")  # as a subnet's ``without``


@dataclass(frozen=True)
class Statistics:
    """The recipe: one pass over the client's data; its means and variances go back, nothing else.

    Every batch is normalised by itself, as in training, so what comes back does not depend on the
    statistics sent. Weighted by batches, the mean over clients is what one pass over all of
    their batches, one after another, would accumulate.
    """

    batch_size: int
    epochs: int = 1  # passes over the data, shuffled anew each time

    def run(self, task: Task, bench: Workbench) -> Update:
        """Statistics of each subnet of the task."""
        examples = bench.examples("train", task.client)
        generator = torch.Generator().manual_seed(task.seed)
        rows = [
            some
            for _ in range(self.epochs)
            for some in batches(len(examples), self.batch_size, generator)
        ]
        sent, found = [], []
        for subnet in task.subnets:
            module = bench.module(subnet, task.params)
            with torch.no_grad(), cumulative(module):
                for some in rows:
                    module(examples.batch(some)[0])
            only = replace(subnet, without=ONLY_STATISTICS)
            sent.append(only)
            found.append(bench.tensors(module, only, subnet))
        return Update(task.client, tuple(sent), tuple(found), float(len(rows)), {})

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be; it weighs by batches."""
        batches_each = math.ceil(client.num_examples / self.batch_size)
        return Terms(task.subnets, float(self.epochs * batches_each), {})


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


@contextmanager
def cumulative(module: nn.Module) -> Iterator[None]:
    """Normalisation layers in training mode that average their statistics over all batches."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    before = [layer.momentum for layer in layers]
    module.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    try:
        yield
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum


def untracked(model: nn.Module) -> nn.Module:
    """A copy of a model whose batch normalisation keeps no statistics: each batch has its own."""
    changed = copy.deepcopy(model)
    for layer in changed.modules():
        if isinstance(layer, _BatchNorm):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return changed
