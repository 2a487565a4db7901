"""Batches of any form: one tensor or several, as tuples or by name, with targets of any kind.

Inputs are a tensor or a tuple of the model's positional arguments. Examples that come as a dict are
passed by the names of the arguments of the model's ``forward``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedquilt.errors import DataError, suggest_nearest
from fedquilt.structure.tensors import find_tensors

TARGET_NAMES = ("labels", "label", "targets", "target", "y")  # of a dict's entry, in this order


class Batch(tuple[Any, Any]):
    """Inputs and targets of some examples, as a pair.

    Args:
        inputs: A tensor, or a tuple or dict of several.
        targets: What the model should answer.
        target_name: The name of the targets, where an example is one dict with its targets in it.
        input_names: The names of the inputs, where they are a tuple that was made from a dict.

    >>> batch = Batch({"image": torch.zeros(2, 3)}, torch.ones(2), target_name="label")
    >>> sorted(batch.as_given()), len(batch)
    (['image', 'label'], 2)
    """

    target_name: str | None
    input_names: tuple[str, ...] | None

    def __new__(
        cls,
        inputs: Any,
        targets: Any,
        *,
        target_name: str | None = None,
        input_names: tuple[str, ...] | None = None,
    ) -> Batch:
        """A pair, with the names of its entries beside it."""
        batch = super().__new__(cls, (inputs, targets))
        batch.target_name, batch.input_names = target_name, input_names
        return batch

    def with_parts(self, inputs: Any, targets: Any) -> Batch:
        """A batch of the same form with other tensors."""
        names = {"target_name": self.target_name, "input_names": self.input_names}
        return Batch(inputs, targets, **names)  # type: ignore[arg-type]

    def as_given(self) -> Any:
        """The batch as the data set gives it: a pair, or one dict."""
        inputs, targets = self
        if self.input_names is not None:
            pairs = zip(self.input_names, inputs, strict=True)
            inputs = {name: value for name, value in pairs if value is not None}
        if self.target_name is None:
            return inputs, targets
        return {**inputs, self.target_name: targets}


def as_batch(pair: tuple[Any, Any]) -> Batch:
    """A pair of inputs and targets as a batch; a batch stays as it is."""
    return pair if isinstance(pair, Batch) else Batch(*pair)


def count_rows(value: Any) -> int:
    """The number of examples: of a list its length, else that of the first tensor.

    A list has an entry for each example, such as the boxes in each image.

    >>> count_rows({"a": torch.zeros(3, 4)}), count_rows([torch.zeros(5), torch.zeros(2)])
    (3, 2)
    """
    if isinstance(value, list):
        return len(value)
    tensors = find_tensors(value)
    return len(tensors[0]) if tensors and tensors[0].ndim else 0


def concatenate(values: Sequence[Any]) -> Any:
    """Values of the same form as one, their tensors joined along the first axis."""
    leaves, forms = zip(*(tree_flatten(value) for value in values), strict=True)
    joined = [
        torch.cat(part) if isinstance(part[0], Tensor) else part[0]
        for part in zip(*leaves, strict=True)
    ]
    return tree_unflatten(joined, forms[0])


def stack_values(values: Sequence[Any], axis: int = 0) -> Any:
    """Values of the same form as one, whose tensors have a new first axis.

    Args:
        values: Tensors, or tuples, lists and dicts of tensors of the same shapes.
        axis: Which axis the new one is in memory.
    """
    leaves, forms = zip(*(tree_flatten(value) for value in values), strict=True)
    stacked = [
        torch.stack(part, min(axis, part[0].ndim)).movedim(min(axis, part[0].ndim), 0)
        if isinstance(part[0], Tensor)
        else part[0]
        for part in zip(*leaves, strict=True)
    ]
    return tree_unflatten(stacked, forms[0])


def unstack_values(value: Any, count: int) -> list[Any]:
    """The parts of what ``stack_values`` made of as many values.

    >>> unstack_values((torch.tensor([1, 2]), "a"), 2)
    [(tensor(1), 'a'), (tensor(2), 'a')]
    """
    leaves, form = tree_flatten(value)
    parts = [x.unbind() if isinstance(x, Tensor) else [x] * count for x in leaves]
    return [tree_unflatten([part[k] for part in parts], form) for k in range(count)]


def mean_outputs(values: Iterable[Any]) -> Any:
    """The mean of outputs of the same form; one sum is held, however many there are.

    Split-Mix (Hong et al., ICLR 2022), Algorithm 1, line 11.

    >>> mean_outputs([{"a": torch.zeros(1)}, {"a": torch.ones(1)}])
    {'a': tensor([0.5000])}
    """
    total: list[Any] | None = None
    form: Any = None
    count = 0
    for value in values:
        leaves, form = tree_flatten(value)
        total = (
            leaves if total is None else [_add(a, b) for a, b in zip(total, leaves, strict=True)]
        )
        count += 1
    assert total is not None
    return tree_unflatten([leaf / count if _is_float(leaf) else leaf for leaf in total], form)


def _add(a: Any, b: Any) -> Any:
    return a + b if _is_float(a) else a


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def split_item(item: Any, target: str | None = None) -> Batch:
    """What a data set or a ``collate_fn`` gives, as inputs and targets.

    A pair is inputs and targets. In a dict the targets are the entry ``target``, or the first of
    ``labels``, ``label``, ``targets``, ``target`` and ``y``.

    >>> split_item({"image": torch.zeros(1), "label": 3})
    ({'image': tensor([0.])}, 3)
    """
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return Batch(*item)
    if not isinstance(item, Mapping):
        what = f"{len(item)} values" if isinstance(item, (tuple, list)) else f"a {_kind(item)}"
        raise DataError(
            f"an example is a pair (input, target) or a dict, got {what}; several inputs go into a "
            "tuple or a dict: ((image, text), label)"
        )
    names = TARGET_NAMES if target is None else (target,)
    name = next((name for name in names if name in item), None)
    if name is None:
        raise DataError(
            f"the targets of a dict are its entry {' or '.join(map(repr, names))}, got a dict with"
            f" {', '.join(map(repr, item))}; name it with target='...'"
        )
    return Batch({k: v for k, v in item.items() if k != name}, item[name], target_name=name)


def _kind(value: Any) -> str:
    return type(value).__name__


def bind_inputs(model: nn.Module, inputs: Any) -> Any:
    """Inputs as the model's positional arguments: a dict's entries in the order of ``forward``.

    Tensors and tuples stay as they are. Arguments between the given ones get their defaults.

    >>> class Sum(nn.Module):
    ...     def forward(self, a, scale=2.0, b=None):
    ...         return scale * (a + b)
    >>> bind_inputs(Sum(), {"b": torch.ones(1), "a": torch.zeros(1)})
    (tensor([0.]), 2.0, tensor([1.]))
    """
    if not isinstance(inputs, Mapping):
        return tuple(inputs) if isinstance(inputs, list) else inputs
    parameters = list_arguments(model)
    for name in inputs:
        if name not in parameters:
            hint = suggest_nearest(str(name), parameters)
            raise DataError(
                f"inputs that are a dict are passed by the names of the model's arguments, and "
                f"forward of {_kind(model)} has none called '{name}'{hint}; it has: "
                f"{', '.join(parameters)}"
            )
    last = max(list(parameters).index(name) for name in inputs)
    values = []
    for name, parameter in list(parameters.items())[: last + 1]:
        if name not in inputs and parameter.default is parameter.empty:
            raise DataError(
                f"forward of {_kind(model)} needs '{name}', and the inputs have: "
                f"{', '.join(map(str, inputs))}; add it to the examples"
            )
        values.append(inputs.get(name, parameter.default))
    return tuple(values)


def bind_batch(model: nn.Module, batch: Batch) -> Batch:
    """The batch with its inputs as the model's positional arguments."""
    inputs, targets = batch
    if not isinstance(inputs, Mapping):
        return batch.with_parts(bind_inputs(model, inputs), targets)
    bound = bind_inputs(model, inputs)
    names = tuple(list_arguments(model))[: len(bound)]
    return Batch(bound, targets, target_name=batch.target_name, input_names=names)


def list_arguments(model: nn.Module) -> dict[str, inspect.Parameter]:
    """The arguments of the model's ``forward`` that can be given by position.

    A module that passes what it is given to another names that one in ``called_module``.
    """
    signature = inspect.signature(getattr(model, "called_module", model).forward)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: p for name, p in signature.parameters.items() if p.kind in kinds}
