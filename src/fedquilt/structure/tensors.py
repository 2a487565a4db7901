"""Tensors of models, inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Example = Tensor | tuple[Any, ...]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied tensor is listed once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def call_with_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], inputs: tuple[Any, ...]
) -> Any:
    """Calls the model with other tensors than its own, given under their first names.

    A tied tensor is replaced in all its places, once each. PyTorch's ``functional_call`` alone
    would do so twice in a module that has two names, and could not undo it.
    """
    first = {id(tensor): name for name, tensor in named_tensors(model).items()}
    filled = {}
    for path, module in model.named_modules():  # each under its first name
        how = {"recurse": False, "remove_duplicate": False}
        for own, tensor in (*module.named_parameters(**how), *module.named_buffers(**how)):
            if first[id(tensor)] in tensors:
                filled[f"{path}.{own}" if path else own] = tensors[first[id(tensor)]]
    return functional_call(model, filled, inputs, tie_weights=False)


def to_arguments(example: Example) -> tuple[Any, ...]:
    """The example as positional arguments of the model."""
    return example if isinstance(example, tuple) else (example,)


def make_training_inputs(inputs: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The inputs, and then the inputs twice: batch norm cannot train on one example."""
    yield inputs
    yield tuple(torch.cat([x, x]) if isinstance(x, Tensor) and x.ndim else x for x in inputs)


def find_tensors(value: Any) -> list[Tensor]:
    """All tensors in a value: itself, or those in its lists, dicts and dataclass fields."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in find_tensors(item)]
    return []
