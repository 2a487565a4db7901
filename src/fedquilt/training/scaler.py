"""HeteroFL's Scaler: a narrow layer speaks as loudly as the whole one would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedquilt.structure.groups import Structure
from fedquilt.structure.trace import named_tensors


@contextmanager
def scaled(module: nn.Module, structure: Structure) -> Iterator[None]:
    """Divides the output of every cut layer by the share of its channels that is kept.

    HeteroFL, Sec. 3.3 and Eq. 4: y = φ(sBN(Scaler(x W + b))), Scaler(z) = z / r, in training only;
    r is kept / all channels of that layer. ``module`` is built; the hooks are gone afterwards.
    """
    whole = structure.origin or structure.shapes
    names = {id(tensor): name for name, tensor in named_tensors(module).items()}
    hooks = []
    for layer in module.modules():
        axis = _output_axis(layer)
        if axis is not None and isinstance(layer.weight, Tensor):
            rate = layer.weight.shape[axis] / whole[names[id(layer.weight)]][axis]
            if rate < 1:
                hooks.append(layer.register_forward_hook(_divide(rate)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _output_axis(layer: nn.Module) -> int | None:
    if isinstance(layer, (_ConvTransposeNd, nn.Embedding)):
        return 1
    if isinstance(layer, (_ConvNd, nn.Linear)):
        return 0
    return None


def _divide(rate: float) -> Any:
    def hook(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output / rate if layer.training else None

    return hook
