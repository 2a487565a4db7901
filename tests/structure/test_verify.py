"""A wrong structure is caught before anything is trained."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fedquilt.errors import StructureError
from fedquilt.structure import memory
from fedquilt.structure.create import trace_structure
from fedquilt.structure.groups import Group, Span
from fedquilt.structure.structure import Structure
from fedquilt.structure.trace.tracer import trace_model
from fedquilt.structure.verify import checks, probe
from fedquilt.structure.verify.checks import verify_structure

from .nets import ZOO, structured

NAMES = ["plain cnn", "residual", "mobile", "dense", "mlp", "gru", "chunked attention", "encoder"]


def traced(name: str) -> tuple:
    return *structured(name), ZOO[name].example


def with_axis(
    structure: Structure, name: str, dim: int, axis: tuple[Span, ...] | None
) -> Structure:
    axes = list(structure.axes[name])
    axes[dim] = axis
    return replace(structure, axes={**structure.axes, name: tuple(axes)})


def cut_axes(structure: Structure) -> list[tuple[str, int]]:
    return [
        (name, dim)
        for name, axes in structure.axes.items()
        for dim, axis in enumerate(axes)
        if axis
        and all(s.group is not None and structure.groups[s.group].is_cut for s in axis)
        and not name.startswith("mask")
    ]


def swapped(span: Span) -> Span:
    """The first two channels in each other's place."""
    other = {span.channels[0]: 1, 1: span.channels[0]}
    assert span.channels[0] == 0
    return replace(span, channels=tuple(other.get(c, c) for c in span.channels))


def shifted(span: Span) -> Span:
    return replace(span, channels=(*span.channels[1:], span.channels[0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_right_structure_passes(name):
    verify_structure(*traced(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("breaking", [swapped, shifted])
def test_any_axis_with_channels_out_of_place_is_refused(name, breaking):
    model, structure, example = traced(name)
    for tensor, dim in cut_axes(structure):
        axis = structure.axes[tensor][dim]
        broken = with_axis(structure, tensor, dim, (breaking(axis[0]), *axis[1:]))
        with pytest.raises(StructureError):
            verify_structure(model, broken, example)


@pytest.mark.parametrize("name", ["residual", "encoder"])
def test_a_probe_that_shares_large_weights_sees_channels_out_of_place(name, monkeypatch):
    monkeypatch.setattr(probe, "MIN_OFFLOADED_BYTES", 256)
    monkeypatch.setattr(checks, "make_probe", partial(probe.make_probe, share=True))
    model, structure, example = traced(name)
    before = copy.deepcopy(model.state_dict())
    shared = probe.make_probe(model, example, share=True).model
    addresses = {tensor.data_ptr() for tensor in model.parameters()}
    assert {weight.data_ptr() in addresses for weight in shared.parameters()} == {True, False}
    verify_structure(model, structure, example)
    for tensor, dim in cut_axes(structure):
        axis = structure.axes[tensor][dim]
        broken = with_axis(structure, tensor, dim, (swapped(axis[0]), *axis[1:]))
        with pytest.raises(StructureError):
            verify_structure(model, broken, example)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("writes", [False, True])
def test_weights_of_a_large_model_are_shared_unless_it_writes_to_them(writes, monkeypatch):
    class Clamped(nn.Linear):
        def forward(self, x):
            if writes:
                self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    monkeypatch.setattr(memory, "MIN_LARGE_BYTES", 0)
    model = nn.Sequential(Clamped(4, 8), nn.ReLU(), Clamped(8, 2))
    before = copy.deepcopy(model.state_dict())
    assert trace_model(model, torch.zeros(1, 4)).keeps_weights != writes
    assert trace_structure(model, torch.zeros(1, 4)).cut_groups() == ["0"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_any_axis_that_is_forgotten_is_refused(name):
    model, structure, example = traced(name)
    for tensor, dim in cut_axes(structure):
        with pytest.raises(StructureError):
            verify_structure(model, with_axis(structure, tensor, dim, None), example)


@pytest.mark.parametrize("name", ["plain cnn", "residual", "mlp", "chunked attention"])
def test_two_groups_taken_for_one_are_refused(name):
    """The channels of the second group are counted on after those of the first."""
    model, structure, example = traced(name)
    first, second = structure.cut_groups()[:2]
    offset = structure.groups[first].size

    def merged(span: Span) -> Span:
        moved = tuple(c + offset for c in span.channels)
        return Span(first, moved) if span.group == second else span

    groups = {n: g for n, g in structure.groups.items() if n != second}
    groups[first] = Group(first, offset + structure.groups[second].size)
    axes = {
        n: tuple(axis and tuple(map(merged, axis)) for axis in dims)
        for n, dims in structure.axes.items()
    }
    with pytest.raises(StructureError):
        verify_structure(model, replace(structure, groups=groups, axes=axes), example)


def test_a_group_that_holds_the_classes_is_refused():
    model, structure, example = traced("plain cnn")
    classes = structure.groups[structure.classes]
    groups = {**structure.groups, classes.name: replace(classes, is_cut=True)}
    with pytest.raises(StructureError, match=r"not interchangeable|outputs of shape"):
        verify_structure(model, replace(structure, groups=groups), example)


def test_a_second_output_is_checked_as_the_first():
    model, structure, example = traced("two outputs")
    axis = structure.axes["box.2.weight"][1]
    broken = with_axis(structure, "box.2.weight", 1, (shifted(axis[0]),))
    with pytest.raises(StructureError, match=r"box\.0"):
        verify_structure(model, broken, example)


def test_a_number_read_as_a_size_that_it_is_not_is_refused():
    model, structure, example = traced("attention with attributes")
    wrong = tuple(
        replace(s, attribute="heads") if s.attribute == "head_dim" else s
        for s in structure.size_attributes
    )
    assert wrong != structure.size_attributes
    with pytest.raises(StructureError, match="does not run"):
        verify_structure(model, replace(structure, size_attributes=wrong), example)
