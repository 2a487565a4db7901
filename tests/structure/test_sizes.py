"""A number that happens to equal a width stays as it is; one that is a width follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import StructureError
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import build_structure
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.groups import SizeAttribute, Span
from fedquilt.structure.structure import Structure
from fedquilt.structure.trace.readings import trace_once
from fedquilt.structure.trace.sizes import find_mismatch

from .nets import CHANCES, CLASSES, SCALES, TOKENS, VECTOR, ZOO, roughened, structured

BY_CHANCE = [*(f"{use} by chance" for use in CHANCES), "temperature by chance"]
OF_A_WIDTH = [f"{use} of a width" for use in SCALES]


@pytest.mark.parametrize("name", [*BY_CHANCE, "windows and grid"])
def test_a_number_that_equals_a_width_by_chance_stays(name):
    model, structure = structured(name)
    assert structure.size_attributes == ()
    assert build_module(model, structure, structure.subnet(0.3)).__dict__.get("number") == getattr(
        model, "number", None
    )


class Reader(nn.Module):
    """The issue's own: as many places as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.max_len = self.d_model = 64
        self.embed, self.norm = nn.Linear(3, self.d_model), nn.LayerNorm(self.d_model)
        self.places = nn.Parameter(torch.randn(self.max_len, self.d_model))
        self.fc = nn.Linear(self.d_model, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : self.max_len]
        return self.fc(self.norm(self.embed(x) + self.places[: x.shape[1]]).mean(1))


def test_a_half_net_reads_every_word():
    torch.manual_seed(0)
    model, words = roughened(Reader()), torch.zeros(1, 64, 3)
    structure = trace_structure(model, words)
    small = build_module(model, structure, structure.subnet(0.5))
    assert small.embed.out_features == 32
    words.requires_grad_()
    small(words).square().sum().backward()
    assert (words.grad.abs().sum(-1) > 0).all()


def wrongly_sized(name: str) -> tuple[nn.Module, Structure]:
    """A net of chance, its number read as the width that it equals."""
    model, structure = structured(name)
    group = structure.groups["embed:2"]
    axis = (Span(group.name, tuple(range(group.size))),)
    power = 0.5 if isinstance(model.number, float) else 1.0
    return model, replace(
        structure, size_attributes=(SizeAttribute("", "number", None, axis, power),)
    )


@pytest.mark.parametrize("name", [n for n in BY_CHANCE if n != "limit by chance"])
def test_a_number_wrongly_read_as_a_width_is_seen_in_what_a_subnet_calls(name):
    model, structure = wrongly_sized(name)
    counts = {group: range(3) for group in structure.cut_groups()}
    small = build_module(model, structure, structure.subnet(channels=counts))
    example = ZOO[name].example
    whole, cut = (trace_once(net, example, ())[1] for net in (model, small))
    assert find_mismatch(structure, whole, cut) is not None


@pytest.mark.parametrize("name", [*OF_A_WIDTH, "attention with attributes", "encoder"])
def test_what_a_subnet_calls_differs_in_widths_alone(name):
    model, structure = structured(name)
    assert structure.size_attributes
    small = build_module(model, structure, structure.subnet(0.5))
    example = ZOO[name].example
    whole, cut = (trace_once(net, example, ())[1] for net in (model, small))
    assert find_mismatch(structure, whole, cut) is None


@pytest.mark.parametrize("patterns", [["root"], ["r*"]])
def test_a_number_can_be_kept(patterns):
    model = ZOO["score of a width"].make()
    structure = trace_structure(model, TOKENS, keep_numbers=patterns)
    assert structure.size_attributes == ()
    assert build_module(model, structure, structure.subnet(0.5)).root == model.root


def test_keeping_what_is_no_number_is_refused():
    with pytest.raises(StructureError, match=r"'neck\.size', which is no number of a module"):
        trace_structure(structured("mlp")[0], VECTOR, keep_numbers=["neck.size"])


def test_training_and_settings_take_it_too():
    net, data = structured("mlp")[0], (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(StructureError, match=r"keep_numbers names 'no\.number'"):
        fq.train(net, VECTOR, fq.FedAvg(), fq.make_clients([data]), 1, keep_numbers=("no.number",))
    config = load_config({"model": {"name": "mlp", "keep_numbers": ["no.number"]}})
    with pytest.raises(StructureError, match=r"keep_numbers names 'no\.number'"):
        build_structure(config, net, VECTOR)


def test_a_description_lists_the_numbers_that_follow_a_width():
    _, structure = structured("attention with attributes")
    line = next(x for x in structure.describe().splitlines() if x.startswith("numbers that follow"))
    assert "layers.0.attention.head_dim (8 of layers.0.attention.q)" in line
    assert "layers.1.attention.scale (8^-0.5 of layers.1.attention.q)" in line
