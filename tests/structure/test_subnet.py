"""A subnet as a value, its tensors, and the module that is built of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedquilt.errors import StructureError
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import (
    build_module,
    compute_offsets,
    copy_subnet_tensors,
    index_cells,
    load_tensors,
    view_cells,
    write_cells,
)
from fedquilt.structure.structure import STATISTICS, Structure
from fedquilt.structure.subnet import Subnet, unpack_bits
from fedquilt.structure.tensors import call_with_tensors, named_tensors

from .nets import EXACT, IMAGE, TOKENS, ZOO, inputs_for, plain_cnn, roughened, structured

names = st.text(min_size=1, max_size=12)
channels = st.sets(st.integers(0, 300), min_size=1, max_size=40)
subnets = st.builds(
    lambda kept, without, own, owner: (
        Subnet.from_channels(kept).excluding(*without).with_private(owner, *own)
    ),
    st.dictionaries(names, channels, max_size=4),
    st.lists(names, max_size=3),
    st.lists(names, max_size=3),
    st.text(max_size=5),
)


@settings(max_examples=40, deadline=None)
@given(channels, st.integers(0, 60))
def test_a_mask_has_one_bit_for_each_channel_whatever_their_order(chosen, more):
    subnet = Subnet.from_channels({"g": [*reversed(sorted(chosen)), *chosen]})
    mask = sum(1 << channel for channel in chosen)
    assert subnet.kept == (("g", mask),)
    assert subnet.channels("g").tolist() == sorted(chosen)
    size = max(chosen) + 1 + more
    assert unpack_bits(mask, size).nonzero()[0].tolist() == sorted(chosen)
    assert len(unpack_bits(mask, size)) == size


@settings(max_examples=40, deadline=None)
@given(st.lists(channels, min_size=1, max_size=5), st.integers(1, 5))
def test_shared_channels_are_those_of_enough_others(sets, holders):
    others = [Subnet.from_channels({"g": some}) for some in sets]
    shared = Subnet().shared_by(*others, holders=holders)
    enough = [c for c in range(301) if sum(c in some for some in sets) >= holders]
    assert shared.channels("g").tolist() == enough


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_offsets_are_the_places_of_cells_in_the_flat_tensor(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    kept = [sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))) for n in shape]
    index = tuple(torch.tensor(some) for some in kept)
    places = torch.arange(math.prod(shape)).view(shape)
    expected = places[torch.meshgrid(*index, indexing="ij")]
    assert torch.equal(compute_offsets(shape, index), expected.flatten())
    for tensor in (torch.zeros(shape), torch.zeros(shape[::-1]).permute(*range(len(shape))[::-1])):
        write_cells(tensor, index, expected + 1.0)
        assert torch.equal(view_cells(tensor, index), expected + 1.0)
        assert int((tensor != 0).sum()) == expected.numel()


@pytest.fixture
def cnn() -> nn.Module:
    torch.manual_seed(0)
    return roughened(plain_cnn())


@pytest.fixture
def structure(cnn) -> Structure:
    return trace_structure(cnn, IMAGE)


@given(subnet=subnets)
def test_encoding_and_decoding_a_subnet_is_the_identity(subnet):
    decoded = Subnet.decode(subnet.encode())
    assert decoded == subnet
    assert hash(decoded) == hash(subnet)


@given(kept=st.dictionaries(names, channels, min_size=1, max_size=4))
def test_a_subnet_gives_back_its_channels_in_order(kept):
    subnet = Subnet.from_channels(kept)
    assert {group: subnet.channels(group).tolist() for group in kept} == {
        group: sorted(some) for group, some in kept.items()
    }
    assert all(subnet.count(group) == len(some) for group, some in kept.items())


def test_subnets_of_the_same_channels_are_equal_however_they_were_made():
    assert Subnet.from_channels({"b": [2, 0], "a": [1]}) == Subnet.from_channels(
        {"a": [1]}
    ).restricted_to("b", [0, 2])
    assert Subnet.from_channels({"a": [1]}) != Subnet.from_channels({"a": [1]}).excluding("x")
    assert Subnet.from_channels({"a": [1]}) != Subnet.from_channels({"a": [0]})


def test_leading_channels_need_few_bytes_and_others_a_bit_each():
    assert len(Subnet.from_channels({"a": range(4000)}).encode()) < 40
    assert len(Subnet.from_channels({"a": range(0, 4000, 2)}).encode()) < 1100


def test_a_subnet_prints_what_it_is():
    subnet = (
        Subnet.from_channels({"a": range(3), "b": [0, 2]})
        .excluding("*.bias")
        .with_private("half", STATISTICS)
    )
    expected = "Subnet(a: first 3; b: 0,2; without *.bias; own :statistics of half)"
    assert repr(subnet) == expected


def test_negative_channels_are_refused():
    with pytest.raises(ValueError, match="counted from 0"):
        Subnet.from_channels({"a": [-1]})


@pytest.mark.parametrize("kept", [{"neck": [0]}, {"0": [8]}, {"0": []}])
def test_a_subnet_of_another_model_is_refused(structure, kept):
    with pytest.raises(StructureError, match=r"no width group|has channels 0 to 7"):
        index_cells(structure, Subnet.from_channels(kept))


def test_the_whole_subnet_takes_everything(cnn, structure):
    taken = copy_subnet_tensors(cnn.state_dict(), structure, structure.subnet(1))
    assert taken.keys() == cnn.state_dict().keys()
    assert all(torch.equal(taken[name], value) for name, value in cnn.state_dict().items())


def test_taken_tensors_are_the_chosen_cells(cnn, structure):
    taken = copy_subnet_tensors(
        cnn.state_dict(), structure, structure.subnet(channels={"0": [1, 5], "4": [2]})
    )
    assert torch.equal(taken["4.weight"], cnn[4].weight[[2]][:, [1, 5]])
    assert torch.equal(taken["1.running_var"], cnn[1].running_var[[1, 5]])
    assert torch.equal(taken["9.weight"], cnn[9].weight[:, [2]])
    assert torch.equal(taken["9.bias"], cnn[9].bias)


@pytest.mark.parametrize("width", [1, 0.5])
def test_taking_copies_and_leaves_its_argument_as_it_was(cnn, structure, width):
    params = {name: value.clone() for name, value in cnn.state_dict().items()}
    for value in copy_subnet_tensors(params, structure, structure.subnet(width)).values():
        value.add_(1)
    assert all(torch.equal(params[name], value) for name, value in cnn.state_dict().items())


@pytest.mark.parametrize("name", ZOO)
def test_a_built_subnet_is_smaller_and_shares_no_memory_with_the_model(name):
    model, structure = structured(name)
    small = build_module(model, structure, structure.subnet(0.5))
    count, whole = (sum(p.numel() for p in m.parameters()) for m in (small, model))
    assert count < whole
    memory = {t.untyped_storage().data_ptr() for t in named_tensors(model).values()}
    assert not memory & {t.untyped_storage().data_ptr() for t in named_tensors(small).values()}


def test_half_the_width_has_the_parameters_of_the_net_constructed_so(cnn, structure):
    small = build_module(cnn, structure, structure.subnet(0.5))
    constructed = plain_cnn(a=4, b=6)
    assert {n: t.shape for n, t in small.state_dict().items()} == {
        n: t.shape for n, t in constructed.state_dict().items()
    }
    assert str(small) == str(constructed)


@pytest.mark.parametrize("name", ["plain cnn", "tied words", "bidirectional lstm", "mlp"])
@pytest.mark.parametrize("is_training", [True, False])
def test_tracing_leaves_model_and_random_numbers_as_they_were(name, is_training):
    model = EXACT[name].make().train(is_training)
    next(model.children()).eval()
    flags = [m.training for m in model.modules()]
    before = {n: t.clone() for n, t in named_tensors(model).items()}
    identities = [id(p) for p in model.parameters()]
    numbers = torch.get_rng_state()
    trace_structure(model, EXACT[name].example)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert [m.training for m in model.modules()] == flags
    assert [id(p) for p in model.parameters()] == identities
    assert all(torch.equal(t, before[n]) for n, t in named_tensors(model).items())
    assert all(p.grad is None for p in model.parameters())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_tied_weights_stay_tied_in_the_built_module():
    model = EXACT["tied words"].make()
    structure = trace_structure(model, TOKENS)
    small = build_module(model, structure, structure.subnet(0.5))
    assert small.decode.weight is small.embed.weight
    assert small.decode.weight.shape == (20, 4)


def test_a_module_with_two_names_is_one_module_in_the_built_one():
    model = EXACT["shared modules"].make()
    structure = trace_structure(model, IMAGE)
    assert not [name for name in structure.axes if name.startswith(("second", "again"))]
    small = build_module(model, structure, structure.subnet(0.5))
    assert small.again is small.mixed
    assert small.second[0] is small.first[1]
    assert small.second[0].weight.shape == (4, 4, 3, 3)


@pytest.mark.parametrize("name", ["tied words", "shared modules"])
def test_a_call_with_other_tensors_uses_them_in_all_places_and_leaves_the_model(name):
    torch.manual_seed(0)
    case = EXACT[name]
    model, other = case.make().eval(), case.make().eval()
    inputs = inputs_for(case.example)
    own = dict(model.named_parameters(remove_duplicate=False))
    before = model(*inputs)
    assert call_with_tensors(model, named_tensors(other), inputs).equal(other(*inputs))
    some = {next(iter(own)): next(other.parameters())}  # the rest stay the model's
    with torch.no_grad():
        one, first = case.make().eval(), next(iter(own))
        one.load_state_dict(model.state_dict())
        one.get_parameter(first).copy_(some[first])
    assert call_with_tensors(model, some, inputs).equal(one(*inputs))
    assert all(model.get_parameter(n) is p for n, p in own.items())
    assert model(*inputs).equal(before)


def test_frozen_parameters_stay_frozen_in_the_built_module(cnn, structure):
    cnn[0].weight.requires_grad_(False)
    small = build_module(cnn, structure, structure.subnet(0.5))
    assert not small[0].weight.requires_grad
    assert small[4].weight.requires_grad


def test_own_tensors_come_from_their_owner_and_start_from_the_shared_ones(cnn, structure):
    params = dict(cnn.state_dict())
    params["1.running_mean@0.5"] = torch.arange(8.0)
    subnet = structure.subnet(0.5).with_private("0.5", STATISTICS)
    taken = copy_subnet_tensors(params, structure, subnet)
    assert taken["1.running_mean"].tolist() == [0, 1, 2, 3]
    assert torch.equal(taken["1.running_var"], params["1.running_var"][:4])
    assert torch.equal(
        build_module(cnn, structure, subnet, params)[1].running_mean, torch.arange(4.0)
    )
    other = copy_subnet_tensors(
        params, structure, structure.subnet(0.5).with_private("0.25", STATISTICS)
    )
    assert torch.equal(other["1.running_mean"], params["1.running_mean"][:4])


def test_tensors_that_a_pattern_leaves_out_are_not_taken_but_built(cnn, structure):
    subnet = structure.subnet(0.5).excluding("*.bias", STATISTICS)
    taken = copy_subnet_tensors(cnn.state_dict(), structure, subnet)
    left_out = {n for n in cnn.state_dict() if n.endswith(".bias") or ".running_" in n}
    assert left_out
    assert taken.keys() == cnn.state_dict().keys() - left_out
    assert torch.equal(build_module(cnn, structure, subnet)[0].bias, cnn[0].bias[:4])


def test_loading_writes_the_given_tensors_and_no_others(cnn, structure):
    subnet = structure.subnet(0.5)
    small = build_module(cnn, structure, subnet)
    load_tensors(small, {"0.bias": torch.arange(4.0)})
    assert small[0].bias.tolist() == [0, 1, 2, 3]
    assert torch.equal(small[4].bias, cnn[4].bias[:6])


GROUPS, SIZE, BLOCKS = "abc", 6, "xyz"
parts = st.builds(
    lambda kept, skipped: Subnet.from_channels(kept).without_blocks(*skipped),
    st.dictionaries(st.sampled_from(GROUPS), st.sets(st.integers(0, SIZE - 1), min_size=1)),
    st.sets(st.sampled_from(BLOCKS)),
)


def channels_of(subnet: Subnet, group: str) -> set[int]:
    listed = subnet.channels(group)
    return set(range(SIZE)) if listed is None else set(listed.tolist())


@given(subnet=parts, others=st.lists(parts, min_size=1, max_size=4), data=st.data())
def test_within_others_a_subnet_has_what_it_has_and_enough_of_them_have(subnet, others, data):
    holders = data.draw(st.integers(1, len(others)))
    found = subnet.shared_by(*others, holders=holders)
    for group in GROUPS:
        held = {
            channel
            for channel in channels_of(subnet, group)
            if sum(channel in channels_of(other, group) for other in others) >= holders
        }
        assert channels_of(found, group) == held
    for block in BLOCKS:
        count = sum(block not in other.skipped for other in others)
        assert (block not in found.skipped) == (block not in subnet.skipped and count >= holders)
    assert found == subnet.shared_by(*reversed(others), holders=holders)
    assert holders > 1 or found == subnet.shared_by(*others)


def test_within_narrow_and_wide_nets_the_widest_of_each_group_stays():
    narrow = Subnet.from_channels({"a": range(2), "b": range(5)}).without_blocks("x", "y")
    wide = Subnet.from_channels({"a": range(3)}).without_blocks("y")
    assert Subnet().shared_by(narrow, wide) == wide
    assert Subnet.from_channels({"c": range(4)}).shared_by(narrow, wide) == wide.restricted_to(
        "c", range(4)
    )
    assert Subnet.from_channels({"a": [0]}).shared_by(narrow, wide) == Subnet.from_channels(
        {"a": [0]}
    ).without_blocks("y")


def test_within_others_what_is_left_out_and_owned_stays():
    subnet = (
        Subnet.from_channels({"a": range(4)}).excluding("*.bias").with_private("half", STATISTICS)
    )
    found = subnet.shared_by(
        Subnet.from_channels({"a": [1, 5]}).excluding("*"), Subnet.from_channels({"a": [2]})
    )
    assert found == subnet.restricted_to("a", [1, 2])
