"""Weights that layers compute anew in every call, as weight and spectral normalisation do.

PyTorch has two ways to do so. A parametrisation keeps what the weight is computed from in a module
inside the layer; the older hooks keep it in the layer, and the last result in an attribute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

MANY = 15  # steps of the power method, as PyTorch does when it starts


def computed_names(layer: nn.Module) -> list[str]:
    """The tensors of a layer that it computes."""
    by_module = list(layer.parametrizations) if is_parametrized(layer) else []  # type: ignore[arg-type]
    return [*by_module, *_hooks(layer)]


def _hooks(layer: nn.Module) -> dict[str, Any]:
    hooks = layer._forward_pre_hooks.values()
    return {h.name: h for h in hooks if isinstance(h, (WeightNorm, SpectralNorm))}


def stored_weight(layer: nn.Module, name: str = "weight") -> Tensor | None:
    """The parameter that a weight is: itself, or of those that it is computed from the largest.

    That one has the weight's axes; others are norms and the like.
    """
    if name not in computed_names(layer):
        weight = getattr(layer, name, None)
        return weight if isinstance(weight, Tensor) else None
    if is_parametrized(layer, name):
        parts = layer.parametrizations[name].parameters(recurse=False)  # type: ignore[union-attr,index]
    else:
        parts = (p for n, p in layer.named_parameters(recurse=False) if n.startswith(f"{name}_"))
    largest: Tensor = max(parts, key=Tensor.numel)
    return largest


@torch.no_grad()
def set_computed(layer: nn.Module, name: str, value: Tensor) -> None:
    """Sets what a tensor is computed from, so that it has a value, as far as it can have it."""
    hook = _hooks(layer).get(name)
    if isinstance(hook, WeightNorm):
        getattr(layer, f"{name}_v").copy_(value)
        getattr(layer, f"{name}_g").copy_(torch.norm_except_dim(value, 2, hook.dim))
    elif isinstance(hook, SpectralNorm):
        getattr(layer, f"{name}_orig").copy_(value)
    else:
        _invert(layer, name, value)
    _settle(layer, name)


def _invert(layer: nn.Module, name: str, value: Tensor) -> None:
    """Through a parametrisation backwards; one that goes only forwards is given the value."""
    try:
        setattr(layer, name, value)
    except (NotImplementedError, RuntimeError):
        stored = stored_weight(layer, name)
        if stored is not None and stored.shape == value.shape:
            stored.copy_(value)


def _settle(layer: nn.Module, name: str) -> None:
    """Lets what is estimated beside a tensor, its largest singular vectors, follow it."""
    hook, was_training = _hooks(layer).get(name), layer.training
    layer.train()
    for _ in range(MANY):
        getattr(layer, name) if hook is None else hook(layer, None)
    layer.train(was_training)


@torch.no_grad()
def refresh(layer: nn.Module) -> None:
    """Computes what hooks keep in attributes, for whoever asks before the next call."""
    for name, hook in _hooks(layer).items():
        how = {"do_power_iteration": False} if isinstance(hook, SpectralNorm) else {}
        setattr(layer, name, hook.compute_weight(layer, **how))


def detach_computed(model: nn.Module) -> None:
    """Lets go of the graph that the last call left in attributes, so that a model can be copied.

    The next call computes them anew.
    """
    for layer in model.modules():
        for name in _hooks(layer):
            setattr(layer, name, getattr(layer, name).detach())
