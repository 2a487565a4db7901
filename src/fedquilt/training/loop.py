"""The loop over epochs and batches in which recipes train, and the one in which they evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt.data import ClientData
from fedquilt.devices import seed_generators
from fedquilt.learning.batch import Batch, as_batch
from fedquilt.training.device_data import get_device
from fedquilt.training.settings import LoopSettings, Precision

Step = Callable[[Batch, torch.Generator], Tensor]  # trains on a batch; returns its mean loss


def run_epochs(
    examples: ClientData,
    step: Step,
    settings: LoopSettings,
    seed: int,
    report_progress: Callable[[float], None],
    *,
    rows: Tensor | None = None,
    before_epoch: Callable[[], None] | None = None,
    before_batch: Callable[[torch.Generator], None] | None = None,
) -> float:
    """Runs a training step on shuffled batches of a client's examples, epoch after epoch.

    PyTorch's default generator, from which dropout and the like draw, and the generator of batches
    both start from the seed. So the same seed gives the same batches and the same draws.

    Args:
        examples: The client's data.
        step: Trains on one batch, and returns the mean loss of its examples. Its second argument
            is the generator of batches, for what else is drawn with them, such as attacks.
        settings: The number of epochs, the size of batches, and the precision of the step.
        seed: Of all randomness.
        report_progress: Is called after each batch with the part that is done, from 0 to 1.
        rows: The examples to train on; None: all of them.
        before_epoch: Is called before each epoch is shuffled.
        before_batch: Is called before each batch is drawn. Training that alternates between two
            streams of data draws its other batch here.

    Returns:
        The mean loss of the examples of the last epoch.
    """
    seed_generators(seed, get_device(examples))
    mean = MeanLoss(get_device(examples))
    drawn = draw_batches(
        examples, settings, seed, rows=rows, before_epoch=before_epoch, before_batch=before_batch
    )
    for batch, part in drawn:
        with autocast(get_device(examples), settings.precision):
            mean.add(step(batch, part.generator), part)
        report_progress(part.done)
    return float(mean)


@dataclass(frozen=True)
class BatchInfo:
    """Where a batch is among those of a round.

    Args:
        size: The number of its examples.
        epoch: The epoch, from 0 on.
        done: The part of the work that is done after it.
        generator: Draws batches, and what else is drawn with them.
    """

    size: int
    epoch: int
    done: float
    generator: torch.Generator


def draw_batches(
    examples: ClientData,
    settings: LoopSettings,
    seed: int,
    *,
    rows: Tensor | None = None,
    before_epoch: Callable[[], None] | None = None,
    before_batch: Callable[[torch.Generator], None] | None = None,
) -> Iterator[tuple[Batch, BatchInfo]]:
    """The batches of a round, each drawn when it is asked for; arguments as in ``run_epochs``."""
    generator = torch.Generator().manual_seed(seed)
    count = len(examples) if rows is None else len(rows)
    for epoch in range(settings.epochs):
        if before_epoch is not None:
            before_epoch()
        done = 0
        for drawn in iterate_batches(count, settings.batch_size, generator):
            if before_batch is not None:
                before_batch(generator)
            batch = as_batch(examples.batch(drawn if rows is None else rows[drawn], generator))
            done += len(drawn)
            part = (epoch + done / count) / settings.epochs
            yield batch, BatchInfo(len(drawn), epoch, part, generator)


class MeanLoss:
    """The mean loss of the examples of the last epoch.

    Args:
        device: Where losses are; they are read at the end only.
    """

    def __init__(self, device: torch.device) -> None:
        self._total, self._count, self._epoch = torch.zeros((), device=device), 0, 0

    def add(self, loss: Tensor, batch: BatchInfo) -> None:
        """Adds the mean loss of a batch."""
        if batch.epoch != self._epoch:
            self._total, self._count = torch.zeros_like(self._total), 0
            self._epoch = batch.epoch
        self._total += loss * batch.size
        self._count += batch.size

    def __float__(self) -> float:
        """The mean; NaN if there was no batch."""
        return float(self._total / self._count)


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Mixed precision on a device: layers compute in bfloat16, weights stay in float32."""
    is_mixed = precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16) if is_mixed else nullcontext()


def iterate_batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of each batch of one epoch, shuffled.

    A last batch of one example is left out when there are others: batch normalization cannot
    train on it, and another epoch's shuffle brings the example back.

    >>> [len(rows) for rows in iterate_batches(7, 3, torch.Generator())]
    [3, 3]
    """
    for rows in torch.randperm(count, generator=generator).split(size):
        if len(rows) > 1 or count == 1 or size == 1:
            yield rows


def run_batches(
    examples: ClientData, batches: Iterable[Tensor], step: Callable[[Batch], object]
) -> None:
    """Runs a step on batches of examples as they are: no gradients, no augmentation.

    Args:
        examples: The data.
        batches: The rows of each batch.
        step: Is called with each batch.
    """
    with torch.no_grad():
        for rows in batches:
            step(as_batch(examples.batch(rows)))


def split_evenly(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    """Rows in as few batches of at most ``size`` as possible, nearly equal in length.

    >>> [len(part) for part in split_evenly(torch.arange(10), 4)]
    [4, 3, 3]
    """
    return rows.tensor_split(max(1, math.ceil(len(rows) / size)))
