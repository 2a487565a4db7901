"""The loss of one client: the task's, over the classes that the client has if it is masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedquilt.learning.batch import Batch
from fedquilt.learning.losses import CROSS_ENTROPY, Loss


@dataclass(frozen=True)
class ClientLoss:
    """A loss and the classes that it is over.

    Args:
        loss: The task's loss.
        labels: The client's classes, as in HeteroFL's masked loss; None: all.

    >>> import torch
    >>> ClientLoss()(torch.zeros(1, 2), torch.tensor([1]))
    tensor(0.6931)
    """

    loss: Loss = CROSS_ENTROPY
    labels: tuple[int, ...] | None = None

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """The loss of an output."""
        return self.loss.of_output(output, targets, self.labels)

    def of_batch(self, module: nn.Module, batch: Batch | tuple[Any, Any]) -> Tensor:
        """The loss of a module on a batch."""
        return self.loss.of_batch(module, batch, self.labels)
