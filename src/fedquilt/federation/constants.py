"""Values of a model that are not finite, such as the -inf of a causal mask.

They are no result of training but constants: arithmetic leaves them out, and they come back as they
were sent.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_constant(new: Tensor, old: Tensor) -> Tensor:
    """Where the old values are not finite and the new ones are the same."""
    return ~old.isfinite() & (new == old)


def keep_constants(new: Tensor, old: Tensor) -> Tensor:
    """What was computed of old values; where those are not finite, themselves."""
    if bool(new.isfinite().all()):
        return new
    return torch.where(old.isfinite(), new, old)
