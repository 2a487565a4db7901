"""Whether the channels of a group are interchangeable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedquilt.errors import StructureError
from fedquilt.structure.groups import Axis, has_group
from fedquilt.structure.structure import Structure
from fedquilt.structure.trace.tracer import suggest_fix
from fedquilt.structure.verify.probe import Probe, is_close, run_model

Order = Callable[[int], list[int]]


def _rotate(size: int) -> list[int]:
    return [*range(1, size), 0]


def _swap_first(size: int) -> list[int]:
    return [1, 0, *range(2, size)] if size > 1 else [0]


def check_shuffles(structure: Structure, probe: Probe) -> None:
    """Raises unless channels are interchangeable (check 1).

    A rotation and a swap are tried: every permutation is made of these two.
    """
    groups = structure.cut_groups()
    for order in (_rotate, _swap_first):
        if is_close(_run_shuffled(structure, groups, order, probe), probe.outputs):
            continue
        wrong = next(
            (
                group
                for group in groups
                if not is_close(_run_shuffled(structure, [group], order, probe), probe.outputs)
            ),
            groups[0],
        )
        where = next(
            n for n, axes in structure.axes.items() if any(has_group(a, wrong) for a in axes)
        )
        raise StructureError(
            f"the channels of group '{wrong}' are not interchangeable: something the trace cannot "
            f"see depends on their place; {suggest_fix(where.rpartition('.')[0])}, or give the "
            "axes with declare_structure(...)"
        )


def _run_shuffled(
    structure: Structure, groups: Sequence[str], shuffle: Order, probe: Probe
) -> list[Tensor]:
    order = {group: shuffle(structure.groups[group].size) for group in groups}
    sources: dict[int, Tensor] = {}

    def shuffle_tensor(name: str, value: Tensor) -> Tensor:
        for dim, axis in enumerate(structure.axes[name]):
            if axis is not None and any(s.group in order for s in axis):
                if id(axis) not in sources:  # axes that are alike are one object, as a rule
                    sources[id(axis)] = _permute_positions(axis, order)
                value = value.index_select(dim, sources[id(axis)])
        return value

    return run_model(probe.model, probe.inputs, shuffle_tensor)


def _permute_positions(axis: Axis, order: dict[str, list[int]]) -> Tensor:
    """For every position of an axis, the position whose values it gets."""
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
