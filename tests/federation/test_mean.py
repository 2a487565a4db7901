"""The one way in which updates come together, against a loop over single cells."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.federation.aggregation import FullMean, average
from fedquilt.federation.client import Update
from fedquilt.federation.state import State
from fedquilt.structure.create import declare_structure
from fedquilt.structure.cut import copy_subnet_tensors
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet

GROUPS = {"h": 5, "k": 4, "y": 3}
# which channel of which group every position of every axis is, written out by hand
PLACES: dict[str, list[tuple[str | None, list[int]]]] = {
    "a": [("h", [0, 1, 2, 3, 4]), (None, [0, 1, 2])],
    "b": [("k", [0, 1, 2, 3]), ("h", [0, 1, 2, 3, 4]), (None, [0, 1])],
    "c": [("k", [0, 0, 1, 1, 2, 2, 3, 3])],
    "out": [("y", [0, 1, 2]), ("k", [0, 1, 2, 3])],
    "free": [(None, [0, 1]), (None, [0, 1])],
    "scalar": [],
}


def channels(draw, group: str) -> list[int] | None:
    size = GROUPS[group]
    kind = draw(st.sampled_from(["all", "first", "some"]))
    if kind == "all":
        return None
    if kind == "first":
        return list(range(draw(st.integers(1, size))))
    return sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))


@st.composite
def subnets(draw) -> Subnet:
    kept = {g: channels(draw, g) for g in GROUPS}
    subnet = Subnet.from_channels({g: c for g, c in kept.items() if c is not None})
    if draw(st.booleans()):
        subnet = subnet.excluding(*draw(st.sets(st.sampled_from(["a", "b*", "out"]), max_size=2)))
    if draw(st.booleans()):
        subnet = subnet.with_private(
            draw(st.sampled_from(["x", "y"])), draw(st.sampled_from(["a", "b"]))
        )
    return subnet


@st.composite
def cohorts(draw) -> list[tuple[list[Subnet], float, int]]:
    weight = st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0, 600.0])
    one = st.tuples(st.lists(subnets(), min_size=1, max_size=2), weight, st.integers(0, 99))
    return draw(st.lists(one, max_size=5))


def made(structure: Structure, params: dict[str, Tensor], cohort) -> list[Update]:
    updates = []
    for number, (chosen, weight, seed) in enumerate(cohort):
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for subnet in chosen:
            taken = copy_subnet_tensors(params, structure, subnet)
            parts.append({
                n: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t + 1
                for n, t in taken.items()
            })  # fmt: skip
        updates.append(Update(number, tuple(chosen), tuple(parts), weight, {}))
    return updates


def holds(subnet: Subnet, group: str | None, channel: int) -> bool:
    kept = None if group is None else subnet.channels(group)
    return kept is None or channel in kept.tolist()


def cell_by_cell(
    params: dict[str, Tensor], updates: list[Update], *, over_all: bool = False
) -> dict[str, np.ndarray]:
    """Σ a_u w_u / Σ a_u over the updates that hold a cell, in a loop over single cells.

    Over all updates, those that do not hold the cell have the server's value.
    """
    sums: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
    names: dict[str, str] = {n: n for n in params}
    for update in updates:
        for subnet, tensors in zip(update.subnets, update.params, strict=True):
            for name, sent in tensors.items():
                if name not in PLACES:
                    continue  # integers and booleans are never averaged
                own = name in subnet.private or any(o.rstrip("*") == name for o in subnet.private)
                target = f"{name}@{subnet.owner}" if own else name
                names[target] = name
                kept = [
                    [i for i, channel in enumerate(where) if holds(subnet, group, channel)]
                    for group, where in PLACES[name]
                ]
                here = itertools.product(*kept)
                there = itertools.product(*(range(len(k)) for k in kept))
                for cell, local in zip(here, there, strict=True):
                    total, weight = sums.get((target, cell), (0.0, 0.0))
                    value = float(sent[local]) if local else float(sent)
                    sums[target, cell] = (
                        total + update.weight * value,
                        weight + update.weight,
                    )
    expected = {t: params.get(t, params[n]).double().numpy().copy() for t, n in names.items()}
    for (target, cell), (total, weight) in sums.items():
        if weight > 0 and not over_all:
            expected[target][cell] = total / weight
        elif weight > 0:
            everybody = sum(update.weight for update in updates)
            kept = expected[target][cell] * (everybody - weight)
            expected[target][cell] = (total + kept) / everybody
    return expected


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cohort=cohorts(), has_own=st.booleans())
def test_average_is_the_mean_over_holders_cell_by_cell(structure, params, cohort, has_own):
    if has_own:  # a tensor of a subnet's own that was trained before
        params = {**params, "a@x": params["a"] * 2}
    updates = made(structure, params, cohort)
    expected = cell_by_cell(params, updates)
    found = average(params, structure, iter(updates))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].double().numpy(), values, rtol=1e-4, atol=1e-5)


@st.composite
def cohorts_of_single_subnets(draw) -> list[tuple[list[Subnet], float, int]]:
    return [(chosen[:1], weight, seed) for chosen, weight, seed in draw(cohorts())]


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cohort=cohorts_of_single_subnets(), has_own=st.booleans())
def test_the_full_mean_is_over_all_updates_cell_by_cell(structure, params, cohort, has_own):
    if has_own:
        params = {**params, "a@x": params["a"] * 2}
    updates = made(structure, params, cohort)
    setup = SimpleNamespace(structure=structure)
    found = FullMean().aggregate(setup, State(0, "train", params), iter(updates))
    expected = cell_by_cell(params, updates, over_all=True)
    assert found.params.keys() == expected.keys()
    for name, values in expected.items():
        tensor = found.params[name].double().numpy()
        np.testing.assert_allclose(tensor, values, rtol=1e-4, atol=1e-5)


def test_what_all_clients_hold_has_the_same_full_mean_and_what_one_holds_its_share(
    structure, params
):
    whole, narrow = Subnet(), structure.subnet(0.5)
    updates = made(structure, params, [([whole], 1.0, 0), ([narrow], 3.0, 1)])
    setup = SimpleNamespace(structure=structure)
    full = FullMean().aggregate(setup, State(0, "train", params), updates).params["a"]
    plain, old = average(params, structure, updates)["a"], params["a"]
    torch.testing.assert_close(full[:3], plain[:3])
    torch.testing.assert_close(full[3:] - old[3:], (plain[3:] - old[3:]) / 4)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cohort=cohorts())
def test_integers_and_booleans_stay_the_servers(structure, params, cohort):
    found = average(params, structure, made(structure, params, cohort))
    assert found["count"].equal(params["count"])
    assert found["flag"].equal(params["flag"])
    assert {n for n in found if n.startswith(("count", "flag"))} == {"count", "flag"}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cohort=st.lists(
        st.tuples(
            st.sets(st.integers(0, 3), min_size=1),
            st.sampled_from([0.0, 1.0, 3.0, 600.0]),
            st.integers(0, 99),
        ),
        max_size=5,
    )
)
def test_owners_of_everything_are_averaged_each_on_its_own(structure, params, cohort):
    """Split-Mix's bases: no tensor is shared, and none but an owner's has an effect on it."""
    given = {
        f"{n}@{i}": t + i if t.is_floating_point() else t
        for i in range(4)
        for n, t in params.items()
    }
    updates = []
    for number, (owners, weight, seed) in enumerate(cohort):
        subnets = tuple(Subnet().with_private(str(i), "*") for i in sorted(owners))
        (like,) = made(structure, params, [([Subnet()] * len(subnets), weight, seed)])
        updates.append(Update(number, subnets, like.params, weight, {}))
    found = average(given, structure, iter(updates))
    assert found.keys() == given.keys()
    for i in range(4):
        own = {n: given[f"{n}@{i}"] for n in params}
        plain = [
            Update(u.client, (Subnet(),), (part,), u.weight, {})
            for u in updates
            for subnet, part in zip(u.subnets, u.params, strict=True)
            if subnet.owner == str(i)
        ]
        for name, values in cell_by_cell(own, plain).items():
            tensor = found[f"{name}@{i}"].double().numpy()
            np.testing.assert_allclose(tensor, values, rtol=1e-4, atol=1e-5)


def test_a_client_that_sends_a_cell_several_times_counts_as_often(structure, params):
    """As the public code of SHeteroFL adds a client once for each of its widths."""
    narrow = structure.subnet(0.5)
    sent = [
        {
            n: torch.full_like(t, value)
            for n, t in copy_subnet_tensors(params, structure, subnet).items()
        }
        for subnet, value in ((Subnet(), 1.0), (narrow, 1.0), (narrow, 0.0))
    ]
    updates = [
        Update(0, (Subnet(), narrow), (sent[0], sent[1]), 2.0, {}),
        Update(1, (narrow,), (sent[2],), 2.0, {}),
    ]
    found = average(params, structure, updates)["a"]
    torch.testing.assert_close(found[:3], torch.full((3, 3), 2 / 3))  # twice 1 and once 0
    torch.testing.assert_close(found[3:], torch.ones(2, 3))
    same = Update(0, (narrow, narrow), (sent[1], sent[1]), 2.0, {})
    found = average(params, structure, [same, updates[1]])["a"]
    torch.testing.assert_close(found[:3], torch.full((3, 3), 2 / 3))


def test_nobody_changes_nothing(structure, params):
    assert average(params, structure, []) == params


def test_an_update_of_weight_zero_counts_for_nothing_beside_others(structure, params):
    one, other = made(structure, params, [([Subnet()], 0.0, 1), ([Subnet()], 2.0, 2)])
    together, alone = (average(params, structure, u) for u in ([one, other], [other]))
    assert all(together[n].equal(alone[n]) for n in params)


def test_weights_of_any_size_give_the_mean(structure, params):
    """Numbers of examples reach the millions; a mean must not lose digits over it."""
    updates = made(structure, params, [([Subnet()], w, i) for i, w in enumerate([1e6, 3e6])])
    found = average(params, structure, updates)["a"]
    expected = 0.25 * updates[0].params[0]["a"] + 0.75 * updates[1].params[0]["a"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4))


def test_figure_1_of_heterofl_by_hand():
    """Six clients at three levels: Eqs. 1-3 for one 4 × 4 matrix, r = 1/2.

    The blue 1×1 corner is the mean of all six, the orange rest of the 2×2 corner of the four
    at levels 1 and 2, the red rest of the two at level 1.
    """
    structure = declare_structure(Square(), {"w": ("rows", "columns")})
    params = {"w": torch.full((4, 4), -9.0)}
    levels = {1: 4, 2: 2, 3: 1}
    sent = [(1, 1.0), (1, 3.0), (2, 5.0), (2, 7.0), (3, 10.0), (3, 40.0)]
    updates = [
        Update(
            i,
            (structure.subnet({"rows": levels[p] / 4, "columns": levels[p] / 4}),),
            ({"w": torch.full((levels[p], levels[p]), value)},),
            1.0,
            {},
        )
        for i, (p, value) in enumerate(sent)
    ]
    red, orange, blue = (1 + 3) / 2, (1 + 3 + 5 + 7) / 4, (1 + 3 + 5 + 7 + 10 + 40) / 6
    expected = torch.tensor([
        [blue, orange, red, red],
        [orange, orange, red, red],
        [red, red, red, red],
        [red, red, red, red],
    ])  # fmt: skip
    torch.testing.assert_close(average(params, structure, updates)["w"], expected)
    partly = average(params, structure, updates[2:])["w"]  # nobody at level 1 was active
    assert partly[2:].eq(-9).all()
    assert partly[:, 2:].eq(-9).all()
    assert partly[0, 0].item() == pytest.approx((5 + 7 + 10 + 40) / 4)
    assert partly[1, 1].item() == pytest.approx((5 + 7) / 2)


CUT = ("a", "b", "c", "out")


def merge_with_meshes(params: dict[str, Tensor], updates: list[Update]) -> dict[str, Tensor]:
    """Σ a_u (w_u - w) in the order of the updates, the first at the end, one index per axis."""
    found = {}
    for name in CUT:
        places = [
            (
                np.ix_(*(
                    [i for i, c in enumerate(where) if holds(update.subnets[0], group, c)]
                    for group, where in PLACES[name]
                )),
                update.params[0][name],
                update.weight,
            )
            for update in updates
        ]  # fmt: skip
        old, total = params[name], torch.zeros_like(params[name])
        weights = torch.zeros_like(old)
        for mesh, new, weight in (*places[1:], places[0]):
            total[mesh] = total[mesh].add(new - old[mesh], alpha=weight)
        for mesh, _, weight in places:
            weights[mesh] += weight
        found[name] = old + total / weights.masked_fill(weights == 0, 1.0)
    return found


@pytest.mark.parametrize("weights", [(7.0, 0.3, 11.0), (7.0, 3.0, 11.0), (0.0, 3.0, 0.0)])
@pytest.mark.parametrize("threads", [1, 2])
def test_scattered_cells_get_the_bits_of_sums_in_the_order_of_updates(
    structure, params, threads, weights, monkeypatch
):
    monkeypatch.setattr("fedquilt.federation.threads.MIN_PARALLEL_BYTES", 0)
    kept = [{"h": [0, 2, 3], "k": [1, 3]}, {"h": [1, 4], "k": [0, 1, 3]}, {"h": [0, 4], "k": [2]}]
    cohort = [
        ([Subnet.from_channels(some)], weight, seed)
        for seed, (some, weight) in enumerate(zip(kept, weights, strict=True))
    ]
    updates = made(structure, params, cohort)
    expected = merge_with_meshes(params, updates)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = average(params, structure, updates)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for name in CUT:
        assert torch.equal(found[name], expected[name]), name


def test_merging_in_chunks_and_threads_keeps_names_in_order_and_bits(
    structure, params, monkeypatch
):
    widths = (1.0, 0.5, 1.0, 0.25, 1.0)
    cohort = [
        ([structure.subnet(width).with_private(f"{seed % 2}", "a")], 1.0 + seed / 3, seed)
        for seed, width in enumerate(widths)
    ]
    updates = made(structure, params, cohort)
    expected = average(params, structure, updates)
    monkeypatch.setattr("fedquilt.federation.threads.MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr("fedquilt.federation.aggregation.mean.CHUNK_BYTES", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = average(params, structure, updates)
    finally:
        torch.set_num_threads(before)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
