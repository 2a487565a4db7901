"""Structures of models that were made from another one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.structure.blocks.rewire import add_steps
from fedquilt.structure.groups import Axis, Span
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import named_tensors


def narrow_structure(structure: Structure, counts: Mapping[str, int]) -> Structure:
    """The structure of the subnet that has the first channels of each group."""

    def first(span: Span) -> Span:
        count = counts.get(span.group) if span.group is not None else None
        kept = (c for c in span.channels if count is None or c < count)
        return replace(span, channels=tuple(kept))

    def narrow(axis: Axis) -> Axis:
        return tuple(map(first, axis))

    return replace(
        structure,
        groups={n: replace(g, size=counts.get(n, g.size)) for n, g in structure.groups.items()},
        axes={
            name: tuple(axis and narrow(axis) for axis in axes)
            for name, axes in structure.axes.items()
        },
        size_attributes=tuple(
            replace(size, axis=narrow(size.axis)) for size in structure.size_attributes
        ),
    )


def add_block_steps(
    model: nn.Module, structure: Structure, *, learnable: bool = True
) -> tuple[nn.Module, Structure]:
    """Makes a copy of the model with a step of 1 for each block, x + s · F(x), and its structure.

    Modules built from the two use the steps. The copy alone does not.
    """
    stepped = copy.deepcopy(model)
    blocks = add_steps(stepped, structure.blocks, learnable=learnable)
    steps = [block.step for block in blocks.values() if block.step]
    return stepped, replace(
        structure,
        axes={**structure.axes, **dict.fromkeys(steps, ())},
        shapes={**structure.shapes, **dict.fromkeys(steps, ())},
        blocks=blocks,
    )


def make_uncut_structure(model: nn.Module, origin: Structure) -> Structure:
    """Makes the structure of a net that was cut from another one and has no width groups itself.

    The net may be narrower than the one of ``origin``, and may have other normalization layers.
    """
    tensors = named_tensors(model)
    statistics = {
        id(buffer)
        for layer in model.modules()
        if isinstance(layer, _BatchNorm)
        for buffer in (layer.running_mean, layer.running_var)
    }
    return Structure(
        groups={},
        axes={name: (None,) * tensor.ndim for name, tensor in tensors.items()},
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        statistics=frozenset(n for n, t in tensors.items() if id(t) in statistics),
        channels_last=origin.channels_last,
        origin=origin.origin or origin.shapes,
    )


def restrict_structure(structure: Structure, model: nn.Module) -> Structure:
    """The structure without tensors that the model does not have, such as running statistics."""
    names = named_tensors(model).keys()
    return replace(
        structure,
        axes={name: axes for name, axes in structure.axes.items() if name in names},
        shapes={name: shape for name, shape in structure.shapes.items() if name in names},
        statistics=structure.statistics & names,
    )
