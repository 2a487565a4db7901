"""The loss of a client: the task's, over the classes that the client has if it is masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedquilt.learning.batch import Batch, unstack_values
from fedquilt.learning.losses import CROSS_ENTROPY, IGNORED, Loss
from fedquilt.structure.tensors import to_arguments

Masked = bool | Literal["batch"]  # to the client's classes, or to those of each batch


@dataclass(frozen=True)
class ClientLoss:
    """A loss and the classes that it is over.

    Args:
        loss: The task's loss.
        labels: The client's classes, as in HeteroFL's masked loss; None: all.
        by_batch: Whether it is over the classes that a batch has, whatever ``labels`` are.

    >>> import torch
    >>> ClientLoss()(torch.zeros(1, 2), torch.tensor([1]))
    tensor(0.6931)
    """

    loss: Loss = CROSS_ENTROPY
    labels: tuple[int, ...] | None = None
    by_batch: bool = False

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """The loss of an output."""
        return self.loss.of_output(output, targets, self._find_classes(targets))

    def of_batch(self, module: nn.Module, batch: Batch | tuple[Any, Any]) -> Tensor:
        """The loss of a module on a batch."""
        labels = self._find_classes(batch[1]) if self.by_batch else self.labels
        return self.loss.of_batch(module, batch, labels)

    def for_batch(self, targets: Any) -> ClientLoss:
        """The loss of parts of a batch, over the classes that the whole batch has.

        Args:
            targets: Those of the whole batch.
        """
        return ClientLoss(self.loss, self._find_classes(targets))

    def _find_classes(self, targets: Any) -> tuple[int, ...] | None:
        if not self.by_batch:
            return self.labels
        present: list[int] = targets.unique().tolist()
        return tuple(label for label in present if label != IGNORED)


@dataclass(frozen=True)
class ClientLosses:
    """The losses of several nets side by side: one value for each.

    Args:
        losses: The loss of each. Outputs and targets have a first axis of nets.
    """

    losses: Sequence[ClientLoss]

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """The losses of their outputs."""
        count = len(self.losses)
        pairs = zip(unstack_values(output, count), unstack_values(targets, count), strict=True)
        return torch.stack([loss(*pair) for loss, pair in zip(self.losses, pairs, strict=True)])

    def of_batch(self, module: nn.Module, batch: tuple[Any, Any]) -> Tensor:
        """The losses of a module that computes all of them, each on its own batch."""
        inputs, targets = batch
        return self(module(*to_arguments(inputs)), targets)
