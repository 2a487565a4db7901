"""Tensors of models, inputs and outputs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

Example = Tensor | tuple[Any, ...]
Nested = TypeVar("Nested")  # a tensor, or tuples, lists and dicts of tensors and other values


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


def map_tensors(function: Callable[[Tensor], Any], value: Nested) -> Nested:
    """The same value with every tensor replaced: in tuples, lists and dicts, however deep.

    A tuple that has more to it than its items says itself what it is with others (``with_parts``).

    >>> map_tensors(torch.Tensor.neg, {"a": [torch.tensor(1), "b"]})
    {'a': [tensor(-1), 'b']}
    """
    if isinstance(value, Tensor):
        return cast(Nested, function(value))
    if isinstance(value, Mapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        return cast(Nested, changed if type(value) is dict else type(value)(changed))  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        if hasattr(value, "with_parts"):
            return cast(Nested, value.with_parts(*items))
        return cast(
            Nested, type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        )
    return value


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of a model.

    Most of what a module holds are empty dictionaries of hooks, and ``deepcopy`` takes longest for
    them: they are given to it as copied.

    Args:
        model: The model.
        memo: What stands for some of its tensors in the copy, by their ids.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            is_empty = type(value) in (dict, OrderedDict) and not value
            if is_empty and not getattr(value, "__dict__", None):
                memo[id(value)] = type(value)()
    return copy.deepcopy(model, memo)


def copy_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model on a device; tied tensors stay tied."""
    memo: dict[int, Any] = {}
    for tensor in named_tensors(model).values():
        moved = tensor.detach().to(device, copy=True)
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_weight else moved
    return copy_model(model, memo)


def move_to_host(model: nn.Module) -> nn.Module:
    """The model itself if it is on the host, else a copy of it there."""
    is_there = all(tensor.device.type == "cpu" for tensor in named_tensors(model).values())
    return model if is_there else copy_to_device(model, torch.device("cpu"))
