"""Structures from axes that a user states, instead of tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedquilt.errors import StructureError
from fedquilt.structure.groups import Axis, Group, SizeAttribute, Span
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import named_tensors


def build_declared(
    model: nn.Module,
    axes: Mapping[str, Sequence[str | None]],
    sizes: Mapping[str, str],
    classes: str | None,
) -> Structure:
    """Builds the structure that ``declare_structure`` describes, without verifying it."""
    tensors = named_tensors(model)
    groups: dict[str, Group] = {}
    declared: dict[str, tuple[Axis | None, ...]] = {n: (None,) * t.ndim for n, t in tensors.items()}
    for name, given in axes.items():
        if name not in tensors:
            raise StructureError(
                f"the model has no tensor '{name}'; its tensors are: {', '.join(tensors)}"
            )
        declared[name] = _declare_axes(name, given, tuple(tensors[name].shape), groups)
    numbers = tuple(_declare_size(name, group, groups) for name, group in sizes.items())
    if classes is not None:
        if classes not in groups:
            raise StructureError(f"classes names group '{classes}', which no axis follows")
        groups[classes] = Group(classes, groups[classes].size, is_cut=False)
    return Structure(
        groups=groups,
        axes=declared,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        statistics=_list_running_statistics(model),
        classes=classes,
        size_attributes=numbers,
        is_exact=False,  # only a trace shows that nothing is computed across channels
    )


def _declare_axes(
    tensor: str, given: Sequence[str | None], shape: tuple[int, ...], groups: dict[str, Group]
) -> tuple[Axis | None, ...]:
    if len(given) != len(shape):
        raise StructureError(
            f"the axes {tuple(given)} of '{tensor}' name {len(given)} dimensions but the tensor "
            f"has shape {shape}; give one width group (or None) per dimension"
        )
    return tuple(_declare_axis(g, n, tensor, groups) for g, n in zip(given, shape, strict=True))


def _declare_axis(
    group: str | None, size: int, tensor: str, groups: dict[str, Group]
) -> Axis | None:
    if group is None:
        return None
    known = groups.setdefault(group, Group(group, size))
    if size % known.size:
        raise StructureError(
            f"group '{group}' has {known.size} channels but an axis of '{tensor}' has {size} "
            "positions; an axis has the same number of positions for every channel"
        )
    repeats = size // known.size  # as conv -> flatten -> linear lays them: a channel's together
    return (Span(group, tuple(c for c in range(known.size) for _ in range(repeats))),)


def _declare_size(name: str, group: str, groups: Mapping[str, Group]) -> SizeAttribute:
    module, _, attribute = name.rpartition(".")
    if group not in groups:
        raise StructureError(f"sizes['{name}'] names group '{group}', which no axis follows")
    return SizeAttribute(module, attribute, None, (Span(group, tuple(range(groups[group].size))),))


def _list_running_statistics(model: nn.Module) -> frozenset[str]:
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    return frozenset(
        names[id(statistic)]
        for layer in model.modules()
        if isinstance(layer, _NormBase)
        for statistic in (layer.running_mean, layer.running_var)
        if statistic is not None
    )
