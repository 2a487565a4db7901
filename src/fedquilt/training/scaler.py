"""HeteroFL's Scaler: a narrow layer speaks as loudly as the whole one would, also in use.

HeteroFL, Sec. 3.3 and Eq. 4: y = φ(sBN(Scaler(x W + b))), Scaler(z) = z / r, where r is the share
of a layer's channels that is kept. The paper has it in training only. Batch normalization right
behind hides the factor, so that there the net is the same without it; a net without such
normalization is another net, and answers wrongly. Here the factor is part of a subnet wherever it
runs: ``scaled`` for training, statistics and evaluation, ``fold_scale`` for a module that is taken
away.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedquilt.structure.computed import find_stored_weight
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import Example, named_tensors, to_arguments

TOLERANCE = 1e-4  # of the largest output, by which a folded net may differ from a scaled one


class OutputScale:
    """A forward hook that divides a layer's output by the share of its channels that is kept."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """The output as large as that of the whole layer."""
        return output / self.rate


@contextmanager
def scale_outputs(module: nn.Module, structure: Structure) -> Iterator[None]:
    """Divides the output of every cut layer by the share of its channels that is kept.

    ``module`` is built from ``structure``; the hooks are gone afterwards.
    """
    rates = compute_output_rates(module, structure)
    hooks = [layer.register_forward_hook(OutputScale(rate)) for layer, rate in rates.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compute_output_rates(module: nn.Module, structure: Structure) -> dict[nn.Module, float]:
    """For each layer of a built module that is cut, the share of its channels that is kept."""
    whole = structure.origin or structure.shapes
    names = {id(tensor): name for name, tensor in named_tensors(module).items()}
    rates = {}
    for layer in module.modules():
        axis = _output_axis(layer)
        stored = None if axis is None else find_stored_weight(layer)
        if axis is not None and stored is not None and id(stored) in names:
            rate = stored.shape[axis] / whole[names[id(stored)]][axis]
            if rate < 1:
                rates[layer] = rate
    return rates


def _output_axis(layer: nn.Module) -> int | None:
    if isinstance(layer, (_ConvTransposeNd, nn.Embedding)):
        return 1
    if isinstance(layer, (_ConvNd, nn.Linear)):
        return 0
    return None


@torch.no_grad()
def fold_scale(module: nn.Module, structure: Structure, example: Example) -> nn.Module:
    """A module that gives, by itself, the outputs that it gives within ``scale_outputs``.

    The factor goes into weights and biases, so that they can be stored and loaded like any others.
    A layer whose weight is computed, or tied to another layer's, keeps the factor as a hook. Both
    are compared on inputs like the example; where a weight turns out to be used in other ways than
    by its layer, all factors are hooks.
    """
    if not compute_output_rates(module, structure):
        return module
    with scale_outputs(module, structure), _record_calls(module) as called:
        expected = _compute_outputs(module, example)
    folded = copy.deepcopy(module)
    paths = {path for path, layer in module.named_modules() if layer in called}
    rates = compute_output_rates(folded, structure)
    _fold(
        folded,
        {
            layer: rates[layer]
            for path, layer in folded.named_modules()
            if path in paths and layer in rates
        },
    )
    if _is_close(_compute_outputs(folded, example), expected):
        return folded
    hook_scale(module, structure)
    return module


def hook_scale(module: nn.Module, structure: Structure) -> None:
    """Divides the outputs of a module's layers as ``scale_outputs`` does, from now on."""
    for layer, rate in compute_output_rates(module, structure).items():
        layer.register_forward_hook(OutputScale(rate))


@contextmanager
def _record_calls(module: nn.Module) -> Iterator[set[nn.Module]]:
    """The layers that are called: the weights of others are used by someone else, unscaled."""
    called: set[nn.Module] = set()

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        called.add(layer)

    hooks = [layer.register_forward_hook(note) for layer in module.modules()]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def has_hooked_scale(module: nn.Module) -> bool:
    """Whether some factor could not be folded, so that the weights alone are not the model."""
    return any(
        isinstance(hook, OutputScale)
        for layer in module.modules()
        for hook in layer._forward_hooks.values()
    )


def _fold(module: nn.Module, rates: dict[nn.Module, float]) -> None:
    places = Counter(id(p) for layer in module.modules() for p in layer._parameters.values())
    for layer, rate in rates.items():
        own = [layer._parameters.get(name) for name in ("weight", "bias")]
        is_plain = own[0] is not None and not layer._forward_pre_hooks  # which compute weights
        if is_plain and all(places[id(tensor)] == 1 for tensor in own if tensor is not None):
            for tensor in own:
                if tensor is not None:
                    tensor.div_(rate)
        else:
            layer.register_forward_hook(OutputScale(rate))


def _compute_outputs(module: nn.Module, example: Example) -> list[Tensor]:
    """What a module answers, in use, to inputs that are drawn alike each time."""
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.randn(x.shape, generator=generator).to(x)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in to_arguments(example)
    )
    was_training = module.training
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # a net may draw in use, such as a mask
            outputs = module(*inputs)
    finally:
        module.train(was_training)
    return [outputs] if isinstance(outputs, Tensor) else [t for t in outputs if t is not None]


def _is_close(outputs: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        bool((one - other).abs().max() <= TOLERANCE * max(float(other.abs().max()), 1.0))
        for one, other in zip(outputs, expected, strict=True)
    )
