"""Weights that layers compute in every call, as weight and spectral normalization do.

PyTorch has two ways to do so. A parametrization keeps the source of the weight in a module inside
the layer. The older hooks keep it in the layer, and the last result in an attribute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

NUM_POWER_ITERATIONS = 15  # as PyTorch does at the start


def list_computed_names(layer: nn.Module) -> list[str]:
    """Names of the tensors that a layer computes."""
    by_module = list(layer.parametrizations) if is_parametrized(layer) else []  # type: ignore[arg-type]
    return [*by_module, *_map_hooks(layer)]


def _map_hooks(layer: nn.Module) -> dict[str, Any]:
    hooks = layer._forward_pre_hooks.values()
    return {h.name: h for h in hooks if isinstance(h, (WeightNorm, SpectralNorm))}


def find_stored_weight(layer: nn.Module, name: str = "weight") -> Tensor | None:
    """The weight itself, or the largest parameter that it is computed from.

    The largest has the weight's axes; others are norms and the like.
    """
    if name not in list_computed_names(layer):
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
    """Sets the sources of a computed tensor so that it has a value, as far as possible."""
    hook = _map_hooks(layer).get(name)
    if isinstance(hook, WeightNorm):
        getattr(layer, f"{name}_v").copy_(value)
        getattr(layer, f"{name}_g").copy_(torch.norm_except_dim(value, 2, hook.dim))
    elif isinstance(hook, SpectralNorm):
        getattr(layer, f"{name}_orig").copy_(value)
    else:
        _assign_parametrized(layer, name, value)
    _converge_estimates(layer, name)


def _assign_parametrized(layer: nn.Module, name: str, value: Tensor) -> None:
    """Assigns through a parametrization; one without an inverse gets the value itself."""
    try:
        setattr(layer, name, value)
    except (NotImplementedError, RuntimeError):
        stored = find_stored_weight(layer, name)
        if stored is not None and stored.shape == value.shape:
            stored.copy_(value)


def _converge_estimates(layer: nn.Module, name: str) -> None:
    """Updates estimates that belong to a tensor, such as its largest singular vectors."""
    hook, was_training = _map_hooks(layer).get(name), layer.training
    layer.train()
    for _ in range(NUM_POWER_ITERATIONS):
        getattr(layer, name) if hook is None else hook(layer, None)
    layer.train(was_training)


@torch.no_grad()
def refresh_computed(layer: nn.Module) -> None:
    """Computes the tensors that hooks keep in attributes, before the next call does."""
    for name, hook in _map_hooks(layer).items():
        how = {"do_power_iteration": False} if isinstance(hook, SpectralNorm) else {}
        setattr(layer, name, hook.compute_weight(layer, **how))


def detach_computed(model: nn.Module) -> None:
    """Detaches the computed tensors in attributes from their graph, so that a model can be copied.

    The next call computes them again.
    """
    for layer in model.modules():
        for name in _map_hooks(layer):
            setattr(layer, name, getattr(layer, name).detach())
