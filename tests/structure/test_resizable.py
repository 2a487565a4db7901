"""One module in the shape of one subnet after another: always what would be built afresh."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.errors import StructureError
from fedquilt.structure.cut import build_module, copy_subnet_tensors, index_cells, view_cells
from fedquilt.structure.layout import is_safe
from fedquilt.structure.resizable import ResizableModule
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import find_tensors, named_tensors

from .nets import IMAGE, ZOO, inputs_for, structured

NETS = [
    "residual",
    "mobile",
    "dense",
    "grouped",
    "conv, flatten, linear",
    "zero-padded shortcut",
    "one group a channel",
    "generator",
    "attention with attributes",
    "attention to itself",
    "bare layer norm",
    "bidirectional lstm",
    "tied words",
]
KINDS = ("leading", "any", "one channel", "one group", "whole")

shapes = st.tuples(st.sampled_from(KINDS), st.integers(0, 10**6))


def subnet_of(structure: Structure, kind: str, seed: int) -> Subnet:
    """A random subnet: leading channels, any channels, one of every group; of one group only."""
    generator = torch.Generator().manual_seed(seed)
    groups = structure.cut_groups()
    if kind == "one group":
        groups = [groups[seed % len(groups)]]
    kept = {}
    for name in groups if kind != "whole" else ():
        size = structure.groups[name].size
        order = torch.randperm(size, generator=generator).tolist()
        count = 1 + int(torch.randint(size, (), generator=generator))
        chosen = {"leading": range(count), "one channel": order[:1]}.get(kind, order[:count])
        if len(chosen) < size:
            kept[name] = chosen
    return Subnet.from_channels(kept)


def given_params(model: nn.Module) -> dict[str, Tensor]:
    """Global tensors that are not the model's own."""
    return {
        name: tensor.detach() * 1.25 if tensor.is_floating_point() else tensor.detach().clone()
        for name, tensor in named_tensors(model).items()
    }


def adjustable(name: str) -> tuple[nn.Module, Structure, dict[str, Tensor], ResizableModule]:
    model, structure = structured(name)
    params = given_params(model)
    return model, structure, params, ResizableModule(model, structure, params)


@torch.no_grad()
def outputs(module: nn.Module, name: str, seed: int = 0) -> list[Tensor]:
    return find_tensors(module(*inputs_for(ZOO[name].example, seed)))


@pytest.mark.parametrize("name", NETS)
@given(asked=st.lists(shapes, min_size=1, max_size=4))
@settings(max_examples=5, deadline=None)
def test_it_is_what_would_be_built_whatever_it_was_before(name, asked):
    model, structure, params, net = adjustable(name)
    for kind, seed in asked:
        subnet = subnet_of(structure, kind, seed)
        net.resize_to(subnet)
        built = build_module(model, structure, subnet, params)
        assert str(net.module) == str(built)  # sizes, groups of convolutions
        held = named_tensors(net.module)
        assert held.keys() == named_tensors(built).keys()
        assert all(held[n].equal(t) for n, t in named_tensors(built).items())
        for found, expected in zip(
            outputs(net.module, name, seed), outputs(built, name, seed), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
def test_numbers_of_user_modules_follow_too(name):
    """Such as ``head_dim`` and a scale that depends on it."""
    model, structure, params, net = adjustable(name)
    for kind in ("one channel", "leading", "one channel", "whole"):
        subnet = subnet_of(structure, kind, 5)
        net.resize_to(subnet)
        built = build_module(model, structure, subnet, params)
        for size in structure.size_attributes:
            found, expected = (
                getattr(m.get_submodule(size.module), size.attribute) for m in (net.module, built)
            )
            assert found == expected


def test_some_net_here_has_numbers_that_follow():
    """So that the test above says something."""
    assert {n for n in NETS if structured(n)[1].size_attributes} >= {
        "generator",
        "attention with attributes",
    }


def test_depthwise_convolutions_come_back_from_a_single_channel():
    """Where one group of one channel might be taken for an ordinary convolution."""
    _, structure, _, net = adjustable("mobile")
    (inner,) = (
        s.group
        for axis in structure.axes["1.depthwise.weight"]
        for s in axis or ()
        if s.group is not None
    )
    size = structure.groups[inner].size
    for count in (size, 1, size // 2, 1, size):
        net.resize_to(Subnet.from_channels({inner: range(count)}))
        assert net.module[1].depthwise.groups == count
        outputs(net.module, "mobile")


def test_the_whole_net_comes_back_bit_for_bit():
    for name in NETS:
        model, structure, params, net = adjustable(name)
        before = outputs(net.module, name)
        for kind in KINDS:
            net.resize_to(subnet_of(structure, kind, 3))
        net.resize_to(Subnet())
        assert all(a.equal(b) for a, b in zip(outputs(net.module, name), before, strict=True))
        expected = outputs(build_module(model, structure, Subnet(), params), name)
        assert all(a.equal(b) for a, b in zip(before, expected, strict=True))


def storages(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["residual", "mobile", "tied words"])
@pytest.mark.parametrize("first", [0, 1])
def test_neighbouring_channels_are_looked_at_in_place(name, first):
    """Also those that do not begin with the first."""
    _, structure, params, net = adjustable(name)
    sizes = {g: structure.groups[g].size for g in structure.cut_groups()}
    net.resize_to(
        Subnet.from_channels({g: range(first, max(first + 1, n // 2)) for g, n in sizes.items()})
    )
    assert storages(named_tensors(net.module)) == storages(params)


def test_other_channels_are_copies():
    _, structure, params, net = adjustable("conv, flatten, linear")
    (first, *_) = structure.cut_groups()
    net.resize_to(Subnet.from_channels({first: [0, 2, 5]}))
    held = named_tensors(net.module)
    before = params["0.weight"].clone()
    with torch.no_grad():
        held["0.weight"].zero_()
    assert params["0.weight"].equal(before)


def test_who_changes_the_global_tensors_changes_the_module():
    model, structure, params, net = adjustable("residual")
    subnet = structure.subnet(0.5)
    net.resize_to(subnet)
    before = outputs(net.module, "residual")
    with torch.no_grad():
        for name in structure.axes:
            if params[name].is_floating_point():
                params[name].mul_(1.5)
    (after,), (built,) = (
        outputs(m, "residual") for m in (net.module, build_module(model, structure, subnet, params))
    )
    assert not after.allclose(before[0])
    torch.testing.assert_close(after, built)


@pytest.mark.parametrize("name", ["residual", "attention to itself", "tied words"])
def test_neither_params_nor_the_model_are_changed(name):
    model, structure, params, net = adjustable(name)
    own = {n: t.detach().clone() for n, t in named_tensors(model).items()}
    given, printed = {n: t.clone() for n, t in params.items()}, str(model)
    for kind in KINDS:
        net.resize_to(subnet_of(structure, kind, 1))
        outputs(net.module, name)
    assert str(model) == printed
    assert all(t.equal(own[n]) for n, t in named_tensors(model).items())
    assert all(t.equal(given[n]) for n, t in params.items())
    assert not any(t.requires_grad for t in params.values())


@pytest.mark.parametrize("name", ["residual", "dense", "conv, flatten, linear", "tied words"])
@given(asked=st.lists(shapes, min_size=2, max_size=4))
@settings(max_examples=5, deadline=None)
def test_taking_a_shape_names_the_tensors_that_are_others_now(name, asked):
    _, structure, _, net = adjustable(name)
    for kind, seed in asked:
        before, subnet = net.subnet, subnet_of(structure, kind, seed)
        old, new = index_cells(structure, before), index_cells(structure, subnet)
        shapes_before = {n: t.shape for n, t in named_tensors(net.module).items()}
        changed = net.resize_to(subnet)
        assert changed == {n for n in new if positions(old[n]) != positions(new[n])}
        now = {n: t.shape for n, t in named_tensors(net.module).items()}
        assert {n for n in now if now[n] != shapes_before[n]} <= changed
        assert net.subnet == subnet


def positions(index: tuple[slice | Tensor, ...]) -> list[list[int] | slice]:
    return [i.tolist() if isinstance(i, Tensor) else i for i in index]


@pytest.mark.parametrize("name", ["residual", "dense", "attention with attributes"])
@given(shape=shapes)
@settings(max_examples=5, deadline=None)
def test_where_tells_where_the_cells_lie(name, shape):
    _, structure, params, net = adjustable(name)
    subnet = subnet_of(structure, *shape)
    net.resize_to(subnet)
    for n, tensor in named_tensors(net.module).items():
        assert view_cells(params[n], net.index_of(n)).equal(tensor)
    assert all(
        view_cells(params[n], net.index_of(n)).equal(t)
        for n, t in copy_subnet_tensors(params, structure, subnet).items()
    )


def test_where_is_known_before_any_shape_is_taken():
    _, _, params, net = adjustable("residual")
    assert all(view_cells(t, net.index_of(n)).equal(t) for n, t in params.items())


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_stay_one_weight_with_one_gradient(kind):
    model, structure, params, net = adjustable("tied words")
    subnet = subnet_of(structure, kind, 2)
    net.resize_to(subnet)
    assert net.module.decode.weight is net.module.embed.weight
    assert list(dict(net.module.named_parameters())) == list(dict(model.named_parameters()))
    tokens = inputs_for(ZOO["tied words"].example)
    modules = net.module, build_module(model, structure, subnet, params)
    for module in modules:
        module(*tokens).square().sum().backward()
    found, expected = (m.embed.weight.grad for m in modules)
    torch.testing.assert_close(found, expected)


def test_frozen_weights_stay_frozen_and_others_are_leaves_of_their_own():
    model, structure = structured("residual")
    model = copy.deepcopy(model)
    model[0].weight.requires_grad_(False)
    net = ResizableModule(model, structure, given_params(model))
    for kind in KINDS:
        net.resize_to(subnet_of(structure, kind, 4))
        weights = dict(net.module.named_parameters())
        assert {n for n, w in weights.items() if not w.requires_grad} == {"0.weight"}
        assert all(w.is_leaf and w.grad is None for w in weights.values())


def test_blocks_cannot_be_skipped():
    _, structure, _, net = adjustable("residual")
    subnet = structure.subnet(0.5)
    net.resize_to(subnet)
    (block, *_) = structure.blocks
    with pytest.raises(StructureError, match="cannot skip blocks"):
        net.resize_to(structure.subnet(0.25).without_blocks(block))
    assert net.subnet == subnet
    outputs(net.module, "residual")


@pytest.mark.parametrize("kept", [{"neck": [0]}, {"0": [8]}, {"0": range(9)}, {"0": []}])
def test_shapes_of_another_model_are_refused(kept):
    _, _, _, net = adjustable("residual")
    with pytest.raises(StructureError, match=r"no width group|has channels 0 to 7"):
        net.resize_to(Subnet.from_channels(kept))
    assert net.subnet == Subnet()
    outputs(net.module, "residual")


def test_a_tensor_that_is_not_given_is_named():
    model, structure = structured("residual")
    params = given_params(model)
    del params["1.conv1.weight"]
    with pytest.raises(StructureError, match=r"no tensor '1\.conv1\.weight'"):
        ResizableModule(model, structure, params)


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_images_lie_with_channels_last_where_the_shape_of_the_moment_is_safe(width):
    """The shortcut's 1×1 convolution of stride 2 is, with 8 input channels, and is not with 4."""
    _, structure, _, net = adjustable("residual")
    assert structure.channels_last
    net.resize_to(structure.subnet(width))
    assert is_safe(net.module) == (width == 1)
    image = torch.randn_like(IMAGE)
    (laid_out,) = net.arrange_inputs(image)
    assert laid_out.equal(image)
    assert laid_out.is_contiguous(memory_format=torch.channels_last) == (width == 1)
