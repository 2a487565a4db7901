"""Running statistics of normalization layers: gathered, left out, or not looked at."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


@contextmanager
def cumulative_statistics(module: nn.Module) -> Iterator[None]:
    """Normalization layers in training mode that average their statistics over all batches."""
    layers = _list_tracking_norms(module)
    before = [layer.momentum for layer in layers]
    hooks = []
    module.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
        if not isinstance(layer, _BatchNorm):  # PyTorch knows no such average there
            hooks.append(layer.register_forward_pre_hook(_make_momentum_hook()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum


def _make_momentum_hook() -> Callable[[nn.Module, Any], None]:
    counter = itertools.count(1)

    def set_momentum(layer: nn.Module, inputs: Any) -> None:
        layer.momentum = 1 / next(counter)  # type: ignore[assignment]

    return set_momentum


def without_running_stats(model: nn.Module) -> nn.Module:
    """A copy of a model whose batch normalization keeps no statistics: each batch has its own."""
    changed = copy.deepcopy(model)
    for layer in _list_tracking_norms(changed):
        _untrack(layer)
    return changed


@contextmanager
def use_batch_statistics(module: nn.Module) -> Iterator[None]:
    """Every batch is normalized by itself, whatever statistics there are; these stay as they are.

    It is how papers score nets that keep no statistics: the answer to an example depends on the
    others in its batch.
    """
    layers = _list_tracking_norms(module)
    before = [dict(layer._buffers) for layer in layers]
    for layer in layers:
        _untrack(layer)
    try:
        yield
    finally:
        for layer, buffers in zip(layers, before, strict=True):
            layer.track_running_stats = True
            layer._buffers.update(buffers)


def needs_batches(module: nn.Module) -> bool:
    """Whether some layer normalizes a batch by itself, so that one example means nothing to it."""
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in module.modules())


def _list_tracking_norms(module: nn.Module) -> list[_NormBase]:
    return [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]


def _untrack(layer: _NormBase) -> None:
    layer.track_running_stats = False
    layer.running_mean = layer.running_var = layer.num_batches_tracked = None
