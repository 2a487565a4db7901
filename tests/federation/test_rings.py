"""Rings, against sets of single cells."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.errors import StructureError
from fedquilt.federation.rings import find_rings
from fedquilt.structure.cut import copy_subnet_tensors, global_name
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet

GROUPS = {"h": 5, "k": 4, "y": 3}
EXAMPLES = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def holdings(draw) -> tuple[Subnet, ...]:
    """One subnet, scattered or not; or two that share nothing, as the bases of Split-Mix."""

    def channels(size: int) -> list[int]:
        if draw(st.booleans()):
            return list(range(draw(st.integers(1, size))))
        return sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))

    subnet = Subnet.from_channels(
        {g: channels(n) for g, n in GROUPS.items() if draw(st.booleans())}
    )
    if draw(st.booleans()):
        subnet = subnet.excluding(*draw(st.sets(st.sampled_from(["a", "b*", "out"]), max_size=2)))
    kind = draw(st.sampled_from(["shared", "private", "bases"]))
    if kind == "private":
        return (subnet.with_private(draw(st.sampled_from("xy")), draw(st.sampled_from("ab"))),)
    if kind == "bases":
        return tuple(subnet.with_private(owner, "*") for owner in "yx")
    return (subnet,)


cohorts = st.lists(holdings(), max_size=6)


def number_cells(structure: Structure) -> dict[str, torch.Tensor]:
    """Global tensors whose every cell is another number; those of owners are negative."""
    params, start = {}, 1
    for name, shape in structure.shapes.items():
        params[name] = torch.arange(start, start + math.prod(shape)).view(shape).double()
        params[f"{name}@x"], params[f"{name}@y"] = -params[name], -params[name] - 0.5
        start += math.prod(shape)
    return params


def list_cells(structure: Structure, holding: tuple[Subnet, ...]) -> set[tuple[str, float]]:
    params = number_cells(structure)
    return {
        (global_name(name, structure, subnet), value)
        for subnet in holding
        for name, tensor in copy_subnet_tensors(params, structure, subnet).items()
        for value in tensor.flatten().tolist()
    }


@given(cohort=cohorts)
@EXAMPLES
def test_cells_of_a_ring_have_its_holders_and_no_others(structure, cohort):
    rings = find_rings(structure, cohort)
    held = [list_cells(structure, holding) for holding in rings.holdings]
    params = number_cells(structure)
    for name in rings.names:
        pairs = zip(
            params[name].flatten().tolist(), rings.label_cells(name).flatten().tolist(), strict=True
        )
        for value, ring in pairs:
            holders = tuple(i for i, cells in enumerate(held) if (name, value) in cells)
            assert rings[ring].holders == holders
    sizes = Counter(int(r) for name in rings.names for r in rings.label_cells(name).flatten())
    assert [ring.num_cells for ring in rings] == [sizes[n] for n in range(len(rings))]
    assert len({ring.holders for ring in rings}) == len(rings)


@given(cohort=cohorts)
@EXAMPLES
def test_all_holders_of_a_ring_and_the_server_order_its_cells_alike(structure, cohort):
    rings, params = find_rings(structure, cohort), number_cells(structure)
    everywhere = rings.gather_global(params)
    for number, holding in enumerate(rings.holdings):
        tensors = tuple(copy_subnet_tensors(params, structure, subnet) for subnet in holding)
        vectors = rings.gather(holding, tensors)
        assert set(vectors) == {n for n, ring in enumerate(rings) if number in ring.holders}
        for ring, vector in vectors.items():
            assert vector.tolist() == everywhere[ring].tolist()
            assert len(vector) == rings[ring].num_cells


@given(cohort=cohorts, drawn=st.data())
@EXAMPLES
def test_what_is_scattered_replaces_its_rings_and_nothing_else(structure, cohort, drawn):
    rings, params = find_rings(structure, cohort), number_cells(structure)
    chosen = drawn.draw(st.sets(st.sampled_from(range(len(rings)))))
    before = {name: tensor.clone() for name, tensor in params.items()}
    moved = {n: 2 * v for n, v in rings.gather_global(params).items() if n in chosen}
    after = rings.scatter_global(moved, params)
    for name in rings.names:
        inside = torch.isin(rings.label_cells(name), torch.tensor(sorted(chosen)))
        assert torch.equal(after[name], torch.where(inside, 2 * before[name], before[name]))
        assert torch.equal(params[name], before[name])
    for holding in rings.holdings:
        tensors = tuple(copy_subnet_tensors(params, structure, subnet) for subnet in holding)
        own = {n: 2 * v for n, v in rings.gather(holding, tensors).items() if n in chosen}
        scattered = rings.scatter(holding, own, tensors)
        wanted = tuple(copy_subnet_tensors(after, structure, subnet) for subnet in holding)
        for part, expected in zip(scattered, wanted, strict=True):
            assert part.keys() == expected.keys()
            assert all(torch.equal(part[name], expected[name]) for name in part)


@given(cohort=cohorts)
@EXAMPLES
def test_labels_of_subnets_are_those_of_the_global_tensors(structure, cohort):
    rings, params = find_rings(structure, cohort), number_cells(structure)
    ring_of = {
        (name, value): ring
        for name in rings.names
        for value, ring in zip(
            params[name].flatten().tolist(), rings.label_cells(name).flatten().tolist(), strict=True
        )
    }
    for holding in rings.holdings:
        for subnet, labels in zip(holding, rings.label_subnets(holding), strict=True):
            tensors = copy_subnet_tensors(params, structure, subnet)
            for name, label in labels.items():
                target = global_name(name, structure, subnet)
                expected = [ring_of[target, v] for v in tensors[name].flatten().tolist()]
                assert label.flatten().tolist() == expected


@given(cohort=cohorts)
@EXAMPLES
def test_numbers_of_holders_are_those_of_every_cell(structure, cohort):
    rings = find_rings(structure, cohort)
    population = Counter(tuple(holding) for holding in cohort)
    counts = rings.count_holders(population)
    held = Counter(cell for holding in cohort for cell in list_cells(structure, holding))
    params = number_cells(structure)
    for name in rings.names:
        per_cell = rings.spread(counts, name).flatten().tolist()
        values = params[name].flatten().tolist()
        assert per_cell == [held[name, value] for value in values]


def test_seventy_clients_with_subnets_of_their_own_are_told_apart(structure):
    cohort = [
        (structure.subnet(channels={"h": [i % 5], "k": [i % 4]}).with_private("x", "a" * (i % 3)),)
        for i in range(70)
    ]
    rings = find_rings(structure, cohort)
    held = [list_cells(structure, holding) for holding in rings.holdings]
    for name, values in number_cells(structure).items():
        if name in rings.names:
            index = (-1,) * values.ndim
            ring = int(rings.label_cells(name)[index])
            value = float(values[index])
            assert rings[ring].holders == tuple(
                i for i, cells in enumerate(held) if (name, value) in cells
            )


def test_nested_widths_have_a_ring_for_each_width(structure):
    tiers = [(structure.subnet(width),) for width in (0.25, 0.5, 1.0)]
    rings = find_rings(structure, [*tiers, tiers[0]])
    assert [ring.holders for ring in rings] == [(0, 1, 2), (1, 2), (2,)]
    assert rings.common == 0
    assert find_rings(structure, tiers) is rings  # computed once


def test_skipped_blocks_are_held_by_those_that_do_not_skip_them():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.branch = torch.nn.Linear(2, 4), torch.nn.Linear(4, 4)
            self.last = torch.nn.Linear(4, 2)

        def forward(self, x):
            x = self.first(x)
            return self.last(x + self.branch(x))

    structure = fq.trace_structure(Net(), torch.ones(1, 2))
    rings = find_rings(structure, [(structure.subnet(),), (structure.subnet(blocks=[]),)])
    assert rings[int(rings.label_cells("branch.bias")[0])].holders == (0,)
    assert rings[int(rings.label_cells("first.bias")[0])].holders == (0, 1)


def test_named_tensors_alone_are_divided(structure, params):
    rings = find_rings(structure, [(structure.subnet(0.5),)], names=["a", "scalar"])
    assert rings.names == ("a", "scalar")
    assert set(rings.scatter_global(rings.gather_global(params), params)) == set(params)


def test_models_of_private_tensors_alone_have_no_shared_ones(structure, params):
    bases = {f"{name}@{owner}": tensor for name, tensor in params.items() for owner in "xy"}
    holdings = [(Subnet().with_private(owner, "*"),) for owner in "xy"]
    rings = find_rings(structure, holdings, names=["a", "b"])
    moved = {n: v + 1 for n, v in rings.gather_global(bases).items() if rings[n].holders}
    after = rings.scatter_global(moved, bases)
    assert after.keys() == bases.keys()
    assert all(after[f"{n}@{o}"].equal(bases[f"{n}@{o}"] + 1) for n in "ab" for o in "xy")


def test_a_cell_that_a_client_has_twice_is_refused(structure):
    with pytest.raises(StructureError, match="holds every cell once"):
        find_rings(structure, [(structure.subnet(1.0), structure.subnet(0.5))])


def test_a_holding_that_was_not_given_is_refused(structure):
    rings = find_rings(structure, [(structure.subnet(),)])
    with pytest.raises(StructureError, match="is another"):
        rings.layout((structure.subnet(0.5),))
