"""What stays whole at every width is said, and why."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from fedquilt.errors import StructureError, StructureWarning
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import copy_subnet_tensors
from fedquilt.structure.serialization import from_json, to_json
from fedquilt.structure.tensors import named_tensors

from .nets import PARTLY_WHOLE, VECTOR, ZOO, structured
from .test_groups import PLACED, Middle

OPERATIONS = {
    "made places": "arange",
    "given places": "linspace",
    "sorted": "sort",
    "largest": "topk",
    "softmax": "softmax",
    "sum so far": "cumsum",
    "turned": "roll",
    "reversed": "flip",
    "picked": "a constant tensor",
    "place of the maximum": "argmax",
    "place beside the maximum": "max",
    "first of all": "add",
}
HIDDEN = {("hidden.weight", 0), ("hidden.bias", 0), ("last.weight", 1)}


@pytest.mark.parametrize("name", PLACED)
def test_the_operation_that_stops_channels_is_named_with_all_axes_it_keeps_whole(name):
    with pytest.warns(StructureWarning, match=f"through {OPERATIONS[name]} in the model itself"):
        structure = trace_structure(Middle(PLACED[name]), VECTOR)
    (whole,) = structure.uncut_axes
    assert (whole.operation, whole.module) == (OPERATIONS[name], "")
    assert set(whole.axes) == HIDDEN


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=1).values


def test_the_module_is_named():
    with pytest.warns(StructureWarning, match="through sort in module 'function'"):
        structure = trace_structure(Middle(Sorted()), VECTOR)
    line = "whole at every width, not followed through sort in module 'function': hidden.weight[0]"
    assert line in structure.describe()


def test_the_share_of_weights_that_a_half_net_keeps_is_true():
    model = Middle(Sorted())
    with pytest.warns(StructureWarning) as caught:
        structure = trace_structure(model, VECTOR)
    tensors = named_tensors(model)
    half = copy_subnet_tensors(tensors, structure, structure.subnet(0.5))
    kept, every = (sum(math.prod(t.shape) for t in some.values()) for some in (half, tensors))
    assert f"keeps {kept / every:.0%} of its weights" in str(caught[0].message)


def test_excluding_the_module_says_that_it_is_meant():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        structure = trace_structure(Middle(Sorted()), VECTOR, exclude=["function"])
    assert structure.cut_groups() == ["first"]
    assert structure.uncut_axes == ()


def test_layers_that_the_example_does_not_run_are_named():
    with pytest.warns(StructureWarning, match=r"spare \(not run on the example\)"):
        structure = trace_structure(ZOO["unused parameter"].make(), VECTOR)
    assert "not run on the example: spare[0], spare[1]" in structure.describe()


@pytest.mark.parametrize("name", ZOO)
def test_nets_that_can_be_followed_are_told_nothing(name):
    """Kernels, places, words, heads and classes are never cut, and no operation is to blame."""
    _, structure = structured(name)
    assert bool(structure.uncut_axes) == (name in PARTLY_WHOLE)
    for whole in structure.uncut_axes:
        for tensor, dim in whole.axes:
            axis = structure.axes[tensor][dim]
            assert axis is None or any(span.group is None for span in axis)


def test_a_hidden_layer_is_asked_for_where_there_is_none():
    with pytest.raises(StructureError, match="add a hidden layer"):
        trace_structure(nn.Linear(8, 3), VECTOR)


def test_a_hidden_layer_is_not_asked_for_where_there_is_one():
    net = nn.Sequential(nn.Linear(8, 6), Sorted(), nn.Linear(6, 3))
    with pytest.raises(StructureError, match="through sort in module '1'") as refusal:
        trace_structure(net, VECTOR)
    assert "hidden layer" not in str(refusal.value)
    with pytest.raises(StructureError, match="exclude less"):
        trace_structure(net, VECTOR, exclude=["1"])


def test_reasons_are_kept_with_a_structure_and_old_ones_have_none():
    _, structure = structured("shuffled")
    values = to_json(structure)
    assert from_json(values).uncut_axes == structure.uncut_axes != ()
    del values["whole"]
    assert from_json(values).uncut_axes == ()


def test_a_constant_that_channels_meet_is_named():
    places = torch.arange(8.0)
    with pytest.warns(StructureWarning, match="through a constant tensor in the model itself"):
        trace_structure(Middle(lambda x: x * places), VECTOR)


def test_a_misspelt_module_is_refused_with_the_nearest_name():
    net = nn.Sequential()
    net.add_module("body", nn.Linear(4, 8))
    net.add_module("classifier", nn.Linear(8, 3))
    with pytest.raises(StructureError, match=r"'classifer'.*did you mean 'classifier'\?"):
        trace_structure(net, torch.zeros(1, 4), exclude=("classifer",))
