"""Losses that clients minimise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def label_mask(labels: tuple[int, ...], num_classes: int) -> Tensor:
    """True for the classes that a client does not have.

    >>> label_mask((0, 2), 3)
    tensor([False,  True, False])
    """
    foreign = torch.ones(num_classes, dtype=torch.bool)
    foreign[list(labels)] = False
    return foreign


def masked(logits: Tensor, foreign: Tensor) -> Tensor:
    """The logits with those of foreign classes replaced by zero (HeteroFL, Sec. 4).

    Zero, not minus infinity: the paper found that this gives stable results.
    """
    return logits.masked_fill(foreign, 0.0)


def cross_entropy(logits: Tensor, labels: Tensor, foreign: Tensor | None = None) -> Tensor:
    """Cross entropy, over the client's own classes if ``foreign`` is given.

    Logits may have any number of axes; classes are on the last.
    """
    if foreign is not None:
        logits = masked(logits, foreign)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
