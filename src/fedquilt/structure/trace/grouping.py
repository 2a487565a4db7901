"""From the channels of a trace to the width groups of a structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
from torch import nn

from fedquilt.structure.groups import Axis, Group, Span, UncutAxes
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import named_tensors
from fedquilt.structure.trace.channels import FROZEN, NO_REASON, NOT_FROZEN, Labels
from fedquilt.structure.trace.record import Trace

Owners = dict[int, tuple[str, int]]  # representative -> (group, channel)


def build_structure(model: nn.Module, trace: Trace) -> Structure:
    """Builds the structure that a trace shows, not yet verified."""
    tensors = named_tensors(model)
    roots = {
        (name, i): trace.channels.roots(labels)
        for name, dims in trace.tensors.items()
        for i, labels in enumerate(dims)
        if labels is not None
    }
    owners, groups = _form_groups(roots, trace.channels.pinned())
    axes = {
        name: tuple(_make_axis(roots.get((name, i)), owners) for i in range(tensor.ndim))
        for name, tensor in tensors.items()
    }
    return Structure(
        groups=groups,
        axes=axes,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        statistics=trace.statistics,
        classes=_find_classes(trace, owners),
        is_exact=not any(trace.across.values()),
        uncut_axes=tuple(_list_uncut_axes(model, trace)),
    )


def _find_classes(trace: Trace, owners: Owners) -> str | None:
    """The group of the outputs, if the last axis of the first output is that group in order."""
    if trace.outputs is None:
        return None
    places = [owners.get(int(c)) for c in trace.channels.roots(trace.outputs)]
    if places[0] is None:
        return None
    group = places[0][0]
    return group if places == [(group, i) for i in range(len(places))] else None


def _list_uncut_axes(model: nn.Module, trace: Trace) -> Iterator[UncutAxes]:
    """Axes of parameters by the operation through which their channels could not be followed."""
    by_reason: dict[int, list[tuple[str, int]]] = {}
    why = trace.channels.reasons()
    for name, parameter in model.named_parameters():
        for dim, labels in enumerate(trace.tensors[name]):
            if labels is not None and parameter.shape[dim] > 1:
                reasons = why[labels]
                reasons = reasons[(reasons != NO_REASON) & (reasons != NOT_FROZEN)]
                if len(reasons):
                    by_reason.setdefault(int(reasons.min()), []).append((name, dim))
    for reason, axes in sorted(by_reason.items()):
        cause = trace.causes[reason - 1]
        yield UncutAxes(cause.operation, cause.module, tuple(axes))
    parameters = dict(model.named_parameters())
    unused = [name for name in trace.unused if name in parameters]
    if unused:
        dims = [(name, dim) for name in unused for dim in range(parameters[name].ndim)]
        yield UncutAxes("", "", tuple(dims))


def _form_groups(
    roots: Mapping[tuple[str, int], Labels], pinned: frozenset[int]
) -> tuple[Owners, dict[str, Group]]:
    """Forms groups of channels that appear on the same axes equally often, in order."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for number, axis in enumerate(roots.values()):
        channels, first, counts = np.unique(axis, return_index=True, return_counts=True)
        order = np.argsort(first)
        for channel, count in zip(channels[order].tolist(), counts[order].tolist(), strict=True):
            if channel != FROZEN:
                seen.setdefault(channel, []).append((number, count))
    members: dict[tuple[bool, tuple[tuple[int, int], ...]], list[int]] = {}
    for channel, listed in seen.items():
        members.setdefault((channel in pinned, tuple(listed)), []).append(channel)
    names = list(roots)
    owners: Owners = {}
    groups: dict[str, Group] = {}
    for (is_pinned, places), alike in members.items():
        if len(alike) == 1 and not is_pinned:
            continue  # a single channel is never cut
        name = _choose_name(names[places[0][0]][0], groups)
        groups[name] = Group(name, len(alike), not is_pinned)
        owners.update({channel: (name, i) for i, channel in enumerate(alike)})
    return owners, groups


def _choose_name(tensor: str, taken: Mapping[str, Group]) -> str:
    base = tensor.rpartition(".")[0] if tensor.endswith((".weight", ".bias")) else tensor
    name, number = base, 2
    while name in taken:
        name, number = f"{base}:{number}", number + 1
    return name


def _make_axis(roots: Labels | None, owners: Owners) -> Axis | None:
    if roots is None:
        return None
    places = [owners.get(c, (None, i)) for i, c in enumerate(roots.tolist())]
    if all(group is None for group, _ in places):
        return None
    return _split_into_spans(tuple(places))


@lru_cache(maxsize=1024)
def _split_into_spans(places: tuple[tuple[str | None, int], ...]) -> Axis:
    spans: list[Span] = []
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end][0] != places[start][0]:
            run = places[start:end]
            spans.append(Span(run[0][0], tuple(channel for _, channel in run)))
            start = end
    return tuple(spans)


def find_axis(labels: Labels, trace: Trace, owners: Owners) -> Axis | None:
    """The axis that labels of a trace mean, given the owners of its channels."""
    return _make_axis(trace.channels.roots(labels), owners)


def map_owners(trace: Trace, structure: Structure) -> Owners:
    """The group of every channel of a traced tensor, and its number there."""
    owners: Owners = {}
    for name, dims in trace.tensors.items():
        for given, axis in zip(dims, structure.axes[name], strict=True):
            if given is not None and axis is not None:
                places = [(s.group, c) for s in axis for c in s.channels]
                for root, (group, channel) in zip(
                    trace.channels.roots(given).tolist(), places, strict=True
                ):
                    if group is not None:
                        owners[root] = (group, channel)
    return owners
