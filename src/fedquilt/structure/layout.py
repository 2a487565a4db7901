"""How images lie in memory: with their channels last, PyTorch trains narrow nets on CPUs faster."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.structure.trace import Example, arguments, tensors_in, training_inputs


def takes_channels_last(model: nn.Module, example: Example) -> bool:
    """Whether a model of images runs on them, forwards and backwards, with channels last in memory.

    The values are the same; but ``x.view(len(x), -1)`` refuses such images, where ``flatten`` and
    ``reshape`` copy them.
    """
    if not any(_is_image(value) for value in arguments(example)) or not is_safe(model):
        return False
    trial = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        runs = _runs(trial.eval(), channels_last(arguments(example)))
        for inputs in training_inputs(arguments(example)):
            if _runs(trial.train(), inputs):  # batch normalisation may need several examples
                return runs and _runs(trial, channels_last(inputs))
    return runs


def is_safe(model: nn.Module) -> bool:
    """Whether PyTorch survives training a net with channels last.

    The backward pass of a 1×1 convolution of stride 2 with fewer than 8 input channels writes
    beyond its memory if they lie last (oneDNN in PyTorch 2.13 on AVX2); all other shapes that were
    tried are sound, and so is this one with channels first.
    """
    return not any(
        set(layer.kernel_size) == {1} and max(layer.stride) > 1 and layer.in_channels < 8
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d)
    )


def _runs(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    try:
        for tensor in tensors_in(model(*inputs)):
            if tensor.requires_grad:
                tensor.sum().backward(retain_graph=True)
    except Exception:  # whatever a model may raise
        return False
    return True


def channels_last(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values, images laid out with their channels last."""
    return tuple(_laid_out(value) if _is_image(value) else value for value in values)


def _laid_out(image: Tensor) -> Tensor:
    count, channels, height, width = image.shape
    rows = image.permute(0, 2, 3, 1).contiguous()
    # spelled out, because with one channel the strides alone say which layout is meant
    strides = (height * width * channels, 1, width * channels, channels)
    return rows.as_strided((count, channels, height, width), strides)


def lay_out(module: nn.Module) -> None:
    """From now on the module sees images with their channels last, if it is safe with them."""
    if is_safe(module):
        module.register_forward_pre_hook(_hook)


def _hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return channels_last(inputs)


def _is_image(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()
