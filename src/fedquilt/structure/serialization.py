"""A structure as JSON values and back, so that a finished model is opened without tracing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedquilt.structure.blocks.block import Block
from fedquilt.structure.groups import Axis, Group, SizeAttribute, Span, UncutAxes
from fedquilt.structure.structure import Structure


def to_json(structure: Structure) -> dict[str, Any]:
    """The structure as values for a JSON file; equal axes are written once."""
    axes: dict[Axis, int] = {}

    def number(axis: Axis | None) -> int | None:
        return None if axis is None else axes.setdefault(axis, len(axes))

    tensors = {
        name: {"shape": list(shape), "axes": [number(axis) for axis in structure.axes[name]]}
        for name, shape in structure.shapes.items()
    }
    sizes = [
        {
            "module": size.module,
            "attribute": size.attribute,
            "item": size.item,
            "axis": number(size.axis),
            "power": size.power,
        }
        for size in structure.size_attributes
    ]
    return {
        "groups": [asdict(group) for group in structure.groups.values()],
        "tensors": tensors,
        "sizes": sizes,
        "axes": [[[span.group, list(span.channels)] for span in axis] for axis in axes],
        "statistics": sorted(structure.statistics),
        "classes": structure.classes,
        "is_exact": structure.is_exact,
        "channels_last": structure.channels_last,
        "blocks": [asdict(block) for block in structure.blocks.values()],
        "whole": [asdict(whole) for whole in structure.uncut_axes],
        "origin": structure.origin and {n: list(shape) for n, shape in structure.origin.items()},
    }


def from_json(values: Mapping[str, Any]) -> Structure:
    """The structure that ``to_json`` wrote."""
    axes: list[Axis] = [
        tuple(Span(group, tuple(channels)) for group, channels in axis) for axis in values["axes"]
    ]
    tensors, origin = values["tensors"], values["origin"]
    return Structure(
        groups={group["name"]: Group(**group) for group in values["groups"]},
        axes={
            name: tuple(None if i is None else axes[i] for i in tensor["axes"])
            for name, tensor in tensors.items()
        },
        shapes={name: tuple(tensor["shape"]) for name, tensor in tensors.items()},
        statistics=frozenset(values["statistics"]),
        classes=values["classes"],
        size_attributes=tuple(
            SizeAttribute(**{**size, "axis": axes[size["axis"]]}) for size in values["sizes"]
        ),
        is_exact=values["is_exact"],
        channels_last=values["channels_last"],
        blocks={
            b["name"]: Block(**{**b, "tensors": tuple(b["tensors"])})
            for b in values.get("blocks", ())
        },
        uncut_axes=tuple(
            UncutAxes(w["operation"], w["module"], tuple((name, dim) for name, dim in w["axes"]))
            for w in values.get("whole", ())
        ),
        origin=origin and {name: tuple(shape) for name, shape in origin.items()},
    )
