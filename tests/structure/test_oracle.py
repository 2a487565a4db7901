"""The groups agree with torch-pruning's where it is right, and are right where it is not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_pruning as tp
from torch import nn

from fedquilt.structure.structure import Structure

from .nets import EXACT, structured

Cell = tuple[str, int, int]  # tensor, axis, position

AGREED = [
    "plain cnn",
    "conv, flatten, linear",
    "residual",
    "pre-activation",
    "mobile",
    "dense",
    "u-net",
    "mlp",
]


def our_channels(structure: Structure) -> set[frozenset[Cell]]:
    """For every channel that may be cut, all positions it has."""
    found: dict[tuple[str, int], set[Cell]] = {}
    for name, axes in structure.axes.items():
        for i, axis in enumerate(axes):
            places = [(s.group, c) for s in axis or () for c in s.channels]
            for position, place in enumerate(places):
                if place[0] is not None and structure.groups[place[0]].is_cut:
                    found.setdefault(place, set()).add((name, i, position))
    return {frozenset(cells) for cells in found.values()}


def their_channels(model: nn.Module, example: torch.Tensor, last: set[str]) -> set[frozenset[Cell]]:
    """The same from torch-pruning, layer by layer and channel by channel."""
    graph = tp.DependencyGraph().build_dependency(model, example)
    names = {module: name for name, module in model.named_modules()}
    found = set()
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)) or name in last:
            continue
        prune = graph.get_pruner_of_module(layer).prune_out_channels
        count = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        for channel in range(count):
            cells: set[Cell] = set()
            for dependency, positions in graph.get_pruning_group(layer, prune, [channel]):
                module = dependency.target.module
                if module in names:
                    is_output = graph.is_out_channel_pruning_fn(dependency.handler)
                    cells |= pruned_cells(names[module], module, positions, is_output=is_output)
            found.add(frozenset(cells))
    return found


def pruned_cells(
    name: str, layer: nn.Module, positions: list[int], *, is_output: bool
) -> set[Cell]:
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    cells = set()
    for tensor, value in tensors.items():
        if value.ndim == 0 or (tensor == "bias" and not is_output):
            continue
        is_transposed = isinstance(layer, nn.ConvTranspose2d) and tensor == "weight"
        axis = int(is_output) if is_transposed else int(not is_output)
        if value.ndim == 1:
            axis = 0
        cells |= {(f"{name}.{tensor}", axis, int(p)) for p in positions}
    return cells


@pytest.mark.filterwarnings("ignore")  # torch-pruning's own
@pytest.mark.parametrize("name", AGREED)
def test_groups_agree_with_torch_pruning(name):
    model, structure = structured(name)
    output = {"u-net": "out"}.get(name, structure.classes)
    assert our_channels(structure) == their_channels(
        copy.deepcopy(model), EXACT[name].example, {output}
    )


def test_both_directions_of_an_lstm_follow_one_group_in_its_consumer():
    _, structure = structured("bidirectional lstm")
    (axis,) = (a for a in structure.axes["fc.weight"] if a and a[0].group != structure.classes)
    assert [c for span in axis for c in span.channels] == [*range(6), *range(6)]
    assert {span.group for span in axis} == {"rnn.weight_ih_l0"}


def test_a_tied_tensor_is_listed_once_and_has_one_group_on_each_axis():
    _, structure = structured("tied words")
    assert "decode.weight" not in structure.axes
    words, features = structure.axes["embed.weight"]
    assert words[0].group == structure.classes
    assert features == structure.axes["hidden.weight"][1] == structure.axes["hidden.weight"][0]
