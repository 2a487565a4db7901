"""Memory layout of images: PyTorch trains narrow nets on CPUs faster with channels last."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.structure.tensors import Example, find_tensors, make_training_inputs, to_arguments


def supports_channels_last(model: nn.Module, example: Example) -> bool:
    """Whether an image model runs, forward and backward, with channels last in memory.

    The values are the same. But ``x.view(len(x), -1)`` raises for such images, where ``flatten``
    and ``reshape`` copy them.
    """
    if not any(_is_image(value) for value in to_arguments(example)) or not is_safe(model):
        return False
    trial = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        runs = _can_train(trial.eval(), to_channels_last(to_arguments(example)))
        for inputs in make_training_inputs(to_arguments(example)):
            if _can_train(trial.train(), inputs):  # batch normalisation may need several examples
                return runs and _can_train(trial, to_channels_last(inputs))
    return runs


def is_safe(model: nn.Module) -> bool:
    """Whether PyTorch can train a net with channels last without crashing.

    The backward pass of a 1×1 convolution of stride 2 with fewer than 8 input channels writes
    beyond its memory if they are last (oneDNN in PyTorch 2.13 on AVX2). All other shapes that were
    tried work, and so does this one with channels first.
    """
    return not any(
        set(layer.kernel_size) == {1} and max(layer.stride) > 1 and layer.in_channels < 8
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d)
    )


def _can_train(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    try:
        for tensor in find_tensors(model(*inputs)):
            if tensor.requires_grad:
                tensor.sum().backward(retain_graph=True)
    except Exception:  # whatever a model may raise
        return False
    return True


def to_channels_last(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values, with channels last in memory for images."""
    return tuple(_move_channels_last(value) if _is_image(value) else value for value in values)


def _move_channels_last(image: Tensor) -> Tensor:
    count, channels, height, width = image.shape
    rows = image.permute(0, 2, 3, 1).contiguous()
    # spelled out, because with one channel the strides alone say which layout is meant
    strides = (height * width * channels, 1, width * channels, channels)
    return rows.as_strided((count, channels, height, width), strides)


def use_channels_last(module: nn.Module) -> None:
    """Gives the module images with channels last from now on, if that is safe.

    So are gradients of images that it flattens: else what comes before, such as an activation,
    would go through images of one layout and gradients of the other, which takes ten times as long.
    """
    if not is_safe(module):
        return
    module.register_forward_pre_hook(_convert_inputs)
    for layer in module.modules():
        if isinstance(layer, nn.Flatten):
            layer.register_forward_pre_hook(_convert_gradient)


def _convert_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return to_channels_last(inputs)


def _convert_gradient(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    image = inputs[0]
    if _is_image(image) and image.requires_grad and not image.is_contiguous():
        image.register_hook(lambda g: g.contiguous(memory_format=torch.channels_last))


def _is_image(value: object) -> bool:
    if not isinstance(value, Tensor) or value.device.type != "cpu":  # where this is quicker
        return False
    return value.ndim == 4 and value.is_floating_point()
