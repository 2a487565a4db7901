"""Initial values, drawn again: a method may need several nets that start apart."""

from __future__ import annotations

from torch import nn


def reinitialize(model: nn.Module) -> None:
    """Draws the initial values of every layer again, in the order in which they were made.

    Under one seed this gives the very values of PyTorch's constructors, running statistics
    included.
    """
    for layer in model.modules():
        reset = getattr(layer, "reset_parameters", None)
        if layer is not model and callable(reset):
            reset()
