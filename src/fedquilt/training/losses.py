"""Losses that clients minimize."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedquilt.devices import CPU


@lru_cache(maxsize=1024)
def label_mask(labels: tuple[int, ...], num_classes: int, device: torch.device = CPU) -> Tensor:
    """True for the classes that a client does not have.

    >>> label_mask((0, 2), 3)
    tensor([False,  True, False])
    """
    with torch.inference_mode(False):  # it is kept, and may be asked for in evaluation first
        foreign = torch.ones(num_classes, dtype=torch.bool)
        foreign[list(labels)] = False
        return foreign.to(device)


def mask_logits(logits: Tensor, foreign: Tensor) -> Tensor:
    """The logits with those of foreign classes replaced by zero (HeteroFL, Sec. 4).

    Zero, not minus infinity: the paper found that this gives stable results.
    """
    return logits.masked_fill(foreign, 0.0)


def cross_entropy(logits: Tensor, labels: Tensor, own: tuple[int, ...] | None = None) -> Tensor:
    """Cross entropy, over the client's own classes if they are given.

    Logits may have any number of axes; classes are on the last.
    """
    if own is not None:
        logits = mask_logits(logits, label_mask(own, logits.shape[-1], logits.device))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
