"""The papers' nets by name, and models of one's own from a file."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from fedquilt.errors import ConfigError, FedquiltError, describe_exception, describe_unknown
from fedquilt.models.adds import VGG, MobileNet, TextLSTM
from fedquilt.models.apfl import MobileNetV2
from fedquilt.models.heterofl import CNN, PreResNet
from fedquilt.models.mlp import MLP
from fedquilt.models.nefl import BasicBlock, ResNet, ViT, WideBottleneck
from fedquilt.models.splitmix import AlexNetBN, DigitsCNN
from fedquilt.models.transformer import MaskedTransformer
from fedquilt.user_code import is_function_path, load_function

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "heterofl-cnn": CNN,
    "heterofl-resnet18": partial(PreResNet, (1, 1, 1, 2)),
    "preresnet18": partial(PreResNet, (2, 2, 2, 2)),
    "digits-cnn": DigitsCNN,
    "alexnet-bn": AlexNetBN,
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet20": partial(ResNet, BasicBlock, (3, 3, 3), channels=(16, 32, 64), stem="plain"),
    "resnet56": partial(ResNet, BasicBlock, (9, 9, 9), channels=(16, 32, 64), stem="plain"),
    "resnet110": partial(ResNet, BasicBlock, (18, 18, 18), channels=(16, 32, 64), stem="plain"),
    "wideresnet101-2": partial(ResNet, WideBottleneck, (3, 4, 23, 3), stem="imagenet"),
    "vit-b16": ViT,
    "vit-small": partial(ViT, image_size=32, patch_size=4, dim=192, depth=6, heads=3, mlp_dim=768),
    "mobilenetv2": MobileNetV2,
    "adds-vgg": VGG,
    "adds-mobilenet": MobileNet,
    "char-lstm": TextLSTM,
    "sentiment-lstm": partial(TextLSTM, num_classes=2, vocabulary=10_000, embedding=300),
    "heterofl-transformer": MaskedTransformer,
}


MADE = "fedquilt_made"  # where a model says how it was made


def find_factory(name: str) -> Callable[..., nn.Module]:
    """What makes a model: by name, or ``file.py:function``."""
    factory = load_function(name, "model") if is_function_path(name) else MODELS.get(name)
    if factory is None:
        raise ConfigError(describe_unknown("model", name, MODELS) + ", or give file.py:function")
    return factory


def make_model(name: str, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Makes a model by name, or from ``file.py:function``.

    Args:
        name: A name in ``MODELS``, or a file of Python and a function in it that returns a module.
        options: What the model is called with; None: its defaults.

    >>> import fedquilt as fq
    >>> fq.make_model("mlp", {"image_size": 8, "hidden": [16], "num_classes": 3}).classifier
    Linear(in_features=16, out_features=3, bias=True)
    """
    options = options or {}
    factory = find_factory(name)
    _refuse_unknown_options(name, options, factory)
    is_own = is_function_path(name)
    try:
        with warnings.catch_warnings():
            if not is_own:
                warnings.simplefilter("ignore", UserWarning)  # of layers without channels
            model = factory(**options)
    except (FedquiltError, ValueError) as problem:
        raise ConfigError(f"model '{name}': {problem}") from problem
    except Exception as problem:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(
            f"model '{name}' cannot be made with {given or 'its defaults'}: "
            f"{describe_exception(problem)}"
        ) from problem
    if not isinstance(model, nn.Module):
        raise ConfigError(f"'{name}' must return an nn.Module, got {type(model).__name__}")
    if not is_own:
        empty = next((n for n, tensor in model.named_parameters() if not tensor.numel()), None)
        if empty is not None:
            raise ConfigError(
                f"model '{name}' has nothing in '{empty}'; every size that it is given is at "
                "least 1, and a width is above 0"
            )
        with suppress(TypeError):  # options that only Python has
            setattr(model, MADE, json.dumps({"name": name, "options": dict(options)}))
    return model


def _refuse_unknown_options(
    name: str, options: Mapping[str, Any], factory: Callable[..., nn.Module]
) -> None:
    accepted = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for option in options:
        if option not in accepted:
            raise ConfigError(f"model '{name}': {describe_unknown('option', option, accepted)}")


def get_factory_call(model: nn.Module) -> dict[str, Any] | None:
    """The name and options that ``make`` was called with; None for any other model."""
    made: Any = getattr(model, MADE, None)
    return None if made is None else json.loads(made)
