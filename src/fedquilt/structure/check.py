"""A trace is not believed but checked, on the example, before anything is trained.

Four checks, which a wrong structure fails:

1. Shuffling the channels of a group, on every axis that follows it, leaves the output as it was.
2. Built subnets run, forwards and backwards, and give outputs of the same shape.
3. Where nothing is computed across channels, a built subnet equals the masked supernet.
4. Tracing a built subnet finds the supernet's structure, cut: every axis means the same in both.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.errors import StructureError
from fedquilt.structure.cut import build, cells, mesh, positions
from fedquilt.structure.groups import Axis, Size, Structure, axis_of, traced
from fedquilt.structure.layers import knows
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import Example, Trace, arguments, named_tensors, plain_kernels

WIDTHS = (0.5, 0.3)  # one that divides most sizes, one that divides few
MOST_TRIES = 32


def traced_and_checked(model: nn.Module, example: Example, exclude: tuple[str, ...]) -> Structure:
    """Traces a model; where a choice was open, takes the first that passes the check."""
    first: StructureError | None = None
    for structure, again in itertools.islice(_candidates(model, example, exclude), MOST_TRIES):
        try:
            check(model, structure, example)
            _check_trace_of_subnet(model, structure, again)
        except StructureError as problem:
            first = first or problem
        else:
            return structure
    assert first is not None
    raise first


Retrace = Callable[[nn.Module], Structure]


def _candidates(
    model: nn.Module, example: Example, exclude: tuple[str, ...]
) -> Iterator[tuple[Structure, Retrace]]:
    """Structures that the open choices allow, each with the way to trace a subnet alike."""
    plain, trace = traced(model, example, exclude)
    splitting = frozenset(
        name for name, labels in trace.splits if not trace.channels.is_cut(labels)
    )
    if splitting:  # channels last came to nothing there: they may come first
        other, seen = traced(model, example, exclude, splitting)
        if _cut_channels(other) > _cut_channels(plain):
            plain, trace = other, seen
        else:
            splitting = frozenset()
    _require_something_to_cut(plain, model)
    for structure in _sized(model, plain, trace):
        yield structure, lambda small: traced(small, example, exclude, splitting)[0]
    heads = frozenset(name for name, _ in trace.splits)
    if heads:  # the module may compute the size of its heads from its input
        tied, trace = traced(model, example, exclude, splitting, heads)
        for structure in _sized(model, tied, trace):
            yield structure, lambda small: traced(small, example, exclude, splitting, heads)[0]


def _cut_channels(structure: Structure) -> int:
    return sum(structure.groups[name].size for name in structure.cut_groups())


def _require_something_to_cut(structure: Structure, model: nn.Module) -> None:
    if not structure.cut_groups():
        raise StructureError(
            f"no channels of {type(model).__name__} can be cut: every axis is tied to the input or the "
            "output; add a hidden layer, or give the axes with Structure.declare(...)"
        )


def _sized(model: nn.Module, structure: Structure, trace: Trace) -> Iterator[Structure]:
    """The structure with the numbers that modules keep, likely readings first."""
    options = [_readings(model, name, structure, trace) for name in trace.sizes]
    open_choices = [choices for module in options for choices in module]
    for chosen in itertools.product(*open_choices):
        yield replace(structure, sizes=tuple(s for s in chosen if s is not None))


def _readings(
    model: nn.Module, name: str, structure: Structure, trace: Trace
) -> list[list[Size | None]]:
    """For each number of a module that matches an axis it met: what it may mean, or nothing."""
    module = model.get_submodule(name)
    if knows(module) and any(True for _ in module.parameters(recurse=False)):
        return []
    axes: dict[Axis, int] = {}
    for count, labels in trace.sizes[name]:
        axis = axis_of(labels, trace, structure)
        if axis is not None and any(
            s.group is not None and structure.groups[s.group].is_cut for s in axis
        ):
            axes[axis] = count
    found: list[list[Size | None]] = []
    for attribute, item, value in _numbers(module):
        readings: list[Size | None] = [
            Size(name, attribute, item, axis, power)
            for axis, count in axes.items()
            for power in (1.0, -0.5, 0.5)
            if _is_power(value, count, power)
        ]
        if readings:
            found.append([*readings, None])
    return found


def _is_power(value: float, count: int, power: float) -> bool:
    if power == 1.0:
        return isinstance(value, int) and value == count
    return isinstance(value, float) and abs(value - count**power) < 1e-9


def _numbers(module: nn.Module) -> Iterator[tuple[str, int | None, float]]:
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)) and value not in (0, 1):
            yield attribute, None, value
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                if isinstance(item, int) and not isinstance(item, bool) and item > 1:
                    yield attribute, i, item


def check(model: nn.Module, structure: Structure, example: Example) -> None:
    """Raises, naming the place, unless the structure is right for this model and example."""
    rough = _roughened(model)
    inputs = _random_like(example)
    with torch.no_grad(), plain_kernels():
        expected = _first(rough(*inputs))
        _check_shuffles(rough, structure, inputs, expected)
    for width in WIDTHS:
        subnet = structure.subnet(width)
        small = _running(rough, structure, subnet, inputs, expected)
        if structure.is_exact:
            with torch.no_grad(), plain_kernels():
                _check_masked(rough, structure, subnet, inputs, _first(small(*inputs)))
    _check_training(model, structure, inputs)


def _roughened(model: nn.Module) -> nn.Module:
    """A copy in double precision in which no two channels are alike."""
    rough = copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in named_tensors(rough).values():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
                tensor.add_((tensor.abs() + (0.1 if _is_flat(tensor) else 0)) * noise)
    return rough


def _is_flat(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def _random_like(example: Example) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(x.shape, generator=generator, dtype=torch.float64)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in arguments(example)
    )


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def _is_close(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool(
        (left - right).abs().max() <= 1e-6 * right.abs().max() + 1e-12
    )


def _check_shuffles(
    model: nn.Module, structure: Structure, inputs: tuple[Any, ...], expected: Tensor
) -> None:
    groups = structure.cut_groups()
    if not _is_close(_shuffled_output(model, structure, groups, inputs), expected):
        wrong = next(
            (
                g
                for g in groups
                if not _is_close(_shuffled_output(model, structure, [g], inputs), expected)
            ),
            groups[0],
        )
        raise StructureError(
            f"the channels of group '{wrong}' are not interchangeable: something the trace cannot see "
            f"depends on their place; exclude the module (exclude=['{wrong}']) so that it is shared "
            "whole, or give the axes with Structure.declare(...)"
        )


def _shuffled_output(
    model: nn.Module, structure: Structure, groups: Sequence[str], inputs: tuple[Any, ...]
) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    order = {
        g: torch.randperm(structure.groups[g].size, generator=generator).tolist() for g in groups
    }
    tensors = named_tensors(model)
    shuffled = {}
    for name, axes in structure.axes.items():
        value = tensors[name].detach()
        for dim, axis in enumerate(axes):
            if axis is not None and any(s.group in order for s in axis):
                value = value.index_select(dim, _shuffled_positions(axis, order))
        shuffled[name] = value
    return _first(torch.func.functional_call(model, shuffled, inputs))


def _shuffled_positions(axis: Axis, order: dict[str, list[int]]) -> Tensor:
    places: dict[tuple[str | None, int], list[int]] = {}
    offset = 0
    for span in axis:
        for i, channel in enumerate(span.channels):
            places.setdefault((span.group, channel), []).append(offset + i)
        offset += len(span.channels)
    source = list(range(offset))
    for (group, channel), here in places.items():
        if group in order:
            for a, b in zip(here, places[(group, order[group][channel])], strict=True):
                source[a] = b
    return torch.tensor(source)


def _running(
    model: nn.Module,
    structure: Structure,
    subnet: Subnet,
    inputs: tuple[Any, ...],
    expected: Tensor,
) -> nn.Module:
    """The built subnet, once it has run on the example."""
    where: list[str] = [""]
    try:
        small = build(model, structure, subnet)
        hooks = [m.register_forward_pre_hook(_remember(where, n)) for n, m in small.named_modules()]
        with torch.no_grad(), plain_kernels():
            shape = _first(small(*inputs)).shape
        for hook in hooks:
            hook.remove()
    except Exception as problem:
        raise StructureError(
            f"a subnet of this model does not run: module '{where[0]}' says: {problem}. It may hold a size "
            f"in a number; exclude it (exclude=['{where[0]}']) so that it is shared whole, or name the "
            "number with Structure.declare(..., sizes=...)"
        ) from problem
    if shape != expected.shape:
        raise StructureError(
            f"a subnet of this model gives an output of shape {tuple(shape)}, the model itself "
            f"{tuple(expected.shape)}; give the axes with Structure.declare(...)"
        )
    return small


def _remember(where: list[str], name: str) -> Any:
    def hook(module: nn.Module, inputs: Any) -> None:
        where[0] = name

    return hook


def masked(model: nn.Module, structure: Structure, subnet: Subnet) -> nn.Module:
    """The full-size model in which every cell outside the subnet is zero."""
    full = copy.deepcopy(model)
    where = cells(structure, subnet)
    with torch.no_grad():
        for name, tensor in named_tensors(full).items():
            if tensor.ndim and any(axis is not None for axis in structure.axes[name]):
                keep = torch.zeros(tensor.shape, dtype=torch.bool)
                keep[mesh(tensor, where[name])] = True
                tensor.masked_fill_(~keep, 0)
    return full


def _check_masked(
    model: nn.Module,
    structure: Structure,
    subnet: Subnet,
    inputs: tuple[Any, ...],
    small_output: Tensor,
) -> None:
    expected = _first(masked(model, structure, subnet)(*inputs))
    if not _is_close(small_output, expected):
        raise StructureError(
            "a subnet of this model does not compute what the model computes with the other channels "
            "masked out; exclude the modules that mix channels in an unusual way, or give the axes "
            "with Structure.declare(...)"
        )


def _check_trace_of_subnet(model: nn.Module, structure: Structure, again: Retrace) -> None:
    few = {
        g: min(1.0, max(WIDTHS[0], 2 / structure.groups[g].size)) for g in structure.cut_groups()
    }
    subnet = structure.subnet(few)
    found = again(build(model, structure, subnet))
    for name, axes in structure.axes.items():
        for axis, seen in zip(axes, found.axes[name], strict=True):
            if _places(axis, structure, subnet) != _places(seen, found, Subnet()):
                raise StructureError(
                    f"a subnet of this model reads '{name}' differently from the model itself; exclude "
                    f"the module around it, or give the axes with Structure.declare(...)"
                )


def _places(axis: Axis | None, structure: Structure, subnet: Subnet) -> list[int] | None:
    """Which positions of a cut axis belong together, whatever the groups are called."""
    if axis is None:
        return None
    every = [
        (s.group, c) if s.group and structure.kept(subnet, s.group) > 1 else None
        for s in axis
        for c in s.channels
    ]
    index = positions(axis, subnet)
    kept = every[index] if isinstance(index, slice) else [every[i] for i in index.tolist()]
    if all(place is None for place in kept):
        return None
    order: dict[tuple[str, int], int] = {}
    return [-1 if place is None else order.setdefault(place, len(order)) for place in kept]


def _check_training(model: nn.Module, structure: Structure, inputs: tuple[Any, ...]) -> None:
    """A step of training must be possible for the subnet where it is for the whole model."""
    pair = tuple(torch.cat([x, x]) if isinstance(x, Tensor) and x.ndim else x for x in inputs)
    try:
        _backward(copy.deepcopy(model).double(), pair)
    except Exception:
        return  # this model cannot be trained on such a batch at any width
    try:
        _backward(build(model, structure, structure.subnet(WIDTHS[-1])).double(), pair)
    except Exception as problem:
        raise StructureError(
            f"a subnet of this model runs but cannot be trained: {problem}; exclude the modules that "
            "behave differently in training, or give the axes with Structure.declare(...)"
        ) from problem


def _backward(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    with torch.random.fork_rng(devices=[]):
        _first(model.train()(*inputs)).sum().backward()
