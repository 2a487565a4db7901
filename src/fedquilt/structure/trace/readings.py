"""The ways to read one model: choices that a trace leaves open, the likely ones first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from fedquilt.errors import StructureError, suggest_nearest
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import Example
from fedquilt.structure.trace.grouping import build_structure
from fedquilt.structure.trace.record import Choices, Trace
from fedquilt.structure.trace.tracer import trace_model

Reading = tuple[Choices, Structure, Trace]


def trace_once(
    model: nn.Module,
    example: Example,
    exclude: tuple[str, ...],
    choices: Choices | None = None,
) -> tuple[Structure, Trace]:
    """Traces the model with one set of choices; the structure is not yet verified."""
    modules = dict(model.named_modules())
    for name in exclude:
        if name not in modules:
            raise StructureError(
                f"exclude names module '{name}', which the model does not have"
                + suggest_nearest(name, modules)
            )
    trace = trace_model(model, example, exclude, choices)
    return build_structure(model, trace), trace


def list_readings(
    model: nn.Module, example: Example, exclude: tuple[str, ...]
) -> Iterator[Reading]:
    """Traces the model with each way to settle the open choices; most to cut first."""
    first, structure, trace = _choose_splits(model, example, exclude)
    yield first, structure, trace
    for from_input in (False, True):
        choices = replace(first, one_number=True, from_input=from_input)
        yield choices, *trace_once(model, example, exclude, choices)
    for reshapes in _group_splits(model, trace):
        choices = replace(first, split_first=first.split_first ^ reshapes)
        yield choices, *trace_once(model, example, exclude, choices)


def _choose_splits(model: nn.Module, example: Example, exclude: tuple[str, ...]) -> Reading:
    """Decides for each split axis whether its last part carries the channels, or its first.

    The last part is usual, as in attention heads. The first is tried where nothing could be cut
    otherwise, and kept if that leaves more to cut.
    """
    choices = Choices()
    structure, trace = trace_once(model, example, exclude, choices)
    frozen = [split for split in trace.splits if not trace.channels.is_cut(split.labels)]
    for reshapes in reversed(_group_splits(model, replace(trace, splits=frozen))):
        other = replace(choices, split_first=choices.split_first | reshapes)
        other_structure, other_trace = trace_once(model, example, exclude, other)
        if _count_cut_channels(other_structure) > _count_cut_channels(structure):
            choices, structure, trace = other, other_structure, other_trace
    return choices, structure, trace


def _group_splits(model: nn.Module, trace: Trace) -> list[set[tuple[str, int]]]:
    """Reshapes that had a choice; one set for modules of one class that split into equal sizes."""
    alike: dict[tuple[type, tuple[int, ...]], set[tuple[str, int]]] = {}
    for split in trace.splits:
        kind = type(model.get_submodule(split.module))
        alike.setdefault((kind, split.sizes), set()).add((split.module, split.number))
    return list(alike.values())


def _count_cut_channels(structure: Structure) -> int:
    return sum(structure.groups[name].size for name in structure.cut_groups())
