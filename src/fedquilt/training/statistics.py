"""Static batch normalization: ask clients for the statistics of their data (HeteroFL, Sec. 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.federation.client import Client, ClientResult, Task, Update
from fedquilt.federation.validation import ReplySpec
from fedquilt.learning.batch import Batch
from fedquilt.structure.structure import STATISTICS, TRACKED
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import to_arguments
from fedquilt.training.attack import PGD, frozen_model
from fedquilt.training.context import ClientContext
from fedquilt.training.dualnorm import has_dial, on_path
from fedquilt.training.loop import iterate_batches, run_batches, split_evenly
from fedquilt.training.scaler import scale_outputs
from fedquilt.training.tracking import cumulative_statistics, use_batch_statistics

ONLY_STATISTICS = ("*", f"!{STATISTICS}")  # as a subnet's ``excluded``
REFRESH_EPOCHS = 20  # over a client's training data, before it tests (Split-Mix, Appendix A.3)


@dataclass(frozen=True)
class QueryStatistics:
    """The recipe: passes over the client's data; its means and variances go back, nothing else.

    Every batch is normalized by itself, as in training, so the result does not depend on the
    statistics sent. Weighted by batches, the mean over clients is what one pass over all of their
    batches, one after another, would accumulate.

    Args:
        batch_size: Examples in a batch.
        epochs: Passes over the data, shuffled anew each time.
        scale: Whether to use HeteroFL's Scaler.
        personal: Whether the last subnet is the client's own, whose statistics stay on it.
        attack: With it the noise halves of dual normalization see every batch attacked, as in
            training. Nets without them see none.
    """

    batch_size: int
    epochs: int = 1  # passes over the data, shuffled anew each time
    scale: bool = False
    personal: bool = False
    attack: PGD | None = None

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Statistics of each subnet of the task."""
        examples = context.examples("train", task.client)
        batches = self._draw_batches(examples, task.seed)
        tensors, shared = [], self._shared_subnets(task)
        modules = context.modules(shared, task.params)
        self._accumulate(modules, examples, batches, context)
        for module, subnet in zip(modules, shared, strict=True):
            tensors.append(context.tensors(module, _only_statistics(subnet), subnet))
        personal = task.subnets[len(shared) :]
        own_modules = context.modules(personal, task.params, (TRACKED,))  # may be one of the others
        self._accumulate(own_modules, examples, batches, context)
        sent = self.sent_subnets(task)
        update = Update(task.client, sent, tuple(tensors), float(len(batches)), {})
        state = context.next_client_state(own_modules, personal, (TRACKED,))
        return ClientResult(update, state)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be; it weighs by batches."""
        batches_each = math.ceil(client.num_examples / self.batch_size)
        return ReplySpec(self._shared_subnets(task), float(self.epochs * batches_each), {})

    def to_refresh(self, batch_size: int) -> QueryStatistics:
        """The same as a client refreshes statistics before it tests, in batches of this size."""
        return replace(self, batch_size=batch_size, epochs=REFRESH_EPOCHS)

    def sent_subnets(self, task: Task) -> tuple[Subnet, ...]:
        """The statistics alone."""
        return tuple(map(_only_statistics, self._shared_subnets(task)))

    def _shared_subnets(self, task: Task) -> tuple[Subnet, ...]:
        """The subnets whose statistics are sent."""
        return task.subnets[: len(task.subnets) - self.personal]

    def refresh(
        self, modules: Sequence[nn.Module], examples: ClientData, seed: int, context: ClientContext
    ) -> None:
        """Takes the running statistics of modules from a client's examples.

        Args:
            modules: The nets, built in the context.
            examples: The examples.
            seed: Draws the order of the examples.
            context: What the client has at hand.
        """
        self._accumulate(modules, examples, self._draw_batches(examples, seed), context)

    def _draw_batches(self, examples: ClientData, seed: int) -> list[Tensor]:
        """The rows of each batch of all passes."""
        generator = torch.Generator().manual_seed(seed)
        return [
            rows
            for _ in range(self.epochs)
            for rows in iterate_batches(len(examples), self.batch_size, generator)
        ]

    def _accumulate(
        self,
        modules: Sequence[nn.Module],
        examples: ClientData,
        batches: list[Tensor],
        context: ClientContext,
    ) -> None:
        """Takes the running statistics of all modules from the batches, each loaded once."""
        attack = None if self.attack is None else self.attack.for_examples(examples)
        noises = [attack if has_dial(module) else None for module in modules]
        generators = [torch.Generator().manual_seed(0) for _ in modules]  # where attacks start

        def accumulate(batch: Batch) -> None:
            for module, generator, noise in zip(modules, generators, noises, strict=True):
                _see_batch(module, batch, noise, generator)

        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(cumulative_statistics(module))
                if self.scale:
                    stack.enter_context(scale_outputs(module, context.structure))
            run_batches(examples, batches if modules else (), accumulate)


def _see_batch(
    module: nn.Module, batch: Batch, attack: PGD | None, generator: torch.Generator
) -> None:
    """Lets a module see a batch, and its noise halves the batch under attack."""
    x, y = batch
    with on_path(module, 0.0):
        module(*to_arguments(x))
    if attack is not None:
        with on_path(module, 1.0):
            with use_batch_statistics(module), frozen_model(module):
                near = attack.perturb(module, x, y, generator)
            module(near)


def _only_statistics(subnet: Subnet) -> Subnet:
    return replace(subnet, excluded=ONLY_STATISTICS)


MAX_EXAMPLES = 1024  # enough to know means and variances


def calibrate(
    modules: Sequence[nn.Module], examples: ClientData, seed: int, batch_size: int = 128
) -> None:
    """Takes running statistics of modules from some of the examples; then they are in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(examples), generator=generator)[:MAX_EXAMPLES]

    def see(batch: Batch) -> None:
        for module in modules:
            module(*to_arguments(batch[0]))

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(cumulative_statistics(module))
        run_batches(examples, split_evenly(rows, batch_size), see)
    for module in modules:
        module.eval()
