"""A subnet as bytes: the same subnet again, small, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import StructureError
from fedquilt.structure.groups import Group
from fedquilt.structure.packing import pack_subnet, unpack_subnet
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet

names = st.text(min_size=1, max_size=8)
structures = st.dictionaries(names, st.integers(1, 70), min_size=1, max_size=6).map(
    lambda sizes: Structure({n: Group(n, size) for n, size in sizes.items()}, {}, {})
)


@st.composite
def pairs(draw):
    """A structure, and a subnet of it that may name groups whole, in part, or not at all."""
    structure = draw(structures)
    chosen = {
        name: draw(st.one_of(st.just(range(group.size)), st.sets(st.integers(0, group.size - 1))))
        for name, group in structure.groups.items()
        if draw(st.booleans())
    }
    subnet = Subnet.from_channels(chosen).excluding(*draw(st.lists(names, max_size=2, unique=True)))
    if draw(st.booleans()):
        subnet = subnet.with_private(draw(names), *draw(st.lists(names, max_size=2)))
    return structure, subnet.without_blocks(*draw(st.lists(names, max_size=2)))


def channels(subnet, structure):
    """What is kept of every group, as sets: whether a whole group is named makes no difference."""
    return {
        name: set(range(group.size))
        if subnet.channels(name) is None
        else set(subnet.channels(name).tolist())
        for name, group in structure.groups.items()
    }


@given(pairs())
def test_what_is_unpacked_is_what_was_packed(pair):
    structure, subnet = pair
    again = unpack_subnet(pack_subnet(subnet, structure), structure)
    assert channels(again, structure) == channels(subnet, structure)
    assert (again.excluded, again.private, again.owner, again.skipped) == (
        subnet.excluded,
        subnet.private,
        subnet.owner,
        subnet.skipped,
    )
    assert unpack_subnet(pack_subnet(again, structure), structure) == again


@given(pairs())
def test_the_map_costs_at_most_a_bit_a_channel_and_one_byte(pair):
    structure, subnet = pair
    num_channels = sum(group.size for group in structure.groups.values())
    assert len(pack_subnet(Subnet(subnet.kept), structure)) <= 1 + -(-num_channels // 8)


def test_leading_channels_cost_a_few_bytes_however_many_there_are():
    structure = Structure({"a": Group("a", 4000), "b": Group("b", 30000)}, {}, {})
    assert len(pack_subnet(Subnet.from_channels({"a": range(1000)}), structure)) <= 4
    assert (
        len(pack_subnet(Subnet.from_channels({"a": range(0, 4000, 2)}), structure))
        == 1 + 4002 // 8 + 1
    )


@given(pairs(), st.binary(max_size=12))
def test_bytes_that_are_no_subnet_are_refused(pair, data):
    structure, _ = pair
    try:
        found = unpack_subnet(data, structure)
    except StructureError:
        return
    for name, group in structure.groups.items():
        kept = found.channels(name)
        assert kept is None or not len(kept) or int(kept.max()) < group.size


@given(pairs())
def test_bytes_that_are_too_few_or_too_many_are_refused(pair):
    structure, subnet = pair
    data = pack_subnet(Subnet(subnet.kept), structure)
    for wrong in (data[:-1], data + b"\0", b"\x10" + data[1:]):
        with pytest.raises(StructureError):
            unpack_subnet(wrong, structure)


def test_words_that_are_no_names_are_refused():
    structure = Structure({"a": Group("a", 7)}, {}, {})
    data = pack_subnet(Subnet(), structure)
    for words in (b"[[1],[],[],[]]", b'[["x"],[],3,[]]', b"{}", b"[[],[]]"):
        with pytest.raises(StructureError):
            unpack_subnet(bytes([data[0] | 2]) + data[1:] + words, structure)
