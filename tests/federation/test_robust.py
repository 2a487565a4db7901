"""Robust rules, against byzfl where all clients hold everything, and against loops where not."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import average, chain, change_store
from fedquilt.federation.aggregation.coordinate_rules import sort_rows
from fedquilt.federation.aggregation.robust import BUCKETS
from fedquilt.federation.client import Update, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.structure.cut import copy_subnet_tensors, global_name
from fedquilt.structure.subnet import Subnet

BYZFL = json.loads((Path(__file__).parent / "data" / "byzfl.json").read_text())
GROUPS = {"h": 5, "k": 4, "y": 3}
EXAMPLES = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
RULES = {
    "trimmed-mean": fq.TrimmedMean(hostile=2),
    "median": fq.Median(hostile=2),
    "geometric-median": fq.GeometricMedian(hostile=2, iterations=20, smoothing=0.1),
    "centered-clipping": fq.CenteredClipping(hostile=2, radius=2.0, iterations=3),
    "krum": fq.Krum(hostile=2, scope="ring"),
    "multi-krum": fq.MultiKrum(hostile=2, scope="ring"),
}
EVERY_RULE = [
    *(replace(rule, hostile=1) for rule in RULES.values()),
    fq.TrimmedMean(hostile=1, mixing="nnm"),
    fq.GeometricMedian(hostile=1, mixing="nnm"),
    fq.Median(hostile=1, mixing="buckets"),
    fq.CenteredClipping(hostile=1, mixing="buckets"),
    fq.Krum(hostile=1),
    fq.MultiKrum(hostile=1),
]


@pytest.fixture
def setup(structure, table) -> Setup:
    return Setup(table, structure, torch.zeros(1), (), rounds=1, seed=3)


# ------------------------------------------------------------------ against byzfl


@pytest.mark.parametrize("mixing", ["none", "nnm"])
@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_byzfl_where_everyone_holds_everything(name, mixing):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    params = {n: t.detach().double() for n, t in model.double().state_dict().items()}
    setup = Setup(
        model, fq.trace_structure(model, torch.ones(1, 2).double()), torch.ones(1, 2), (), 1, 0
    )
    whole, updates = (Subnet(),), []
    for client, vector in enumerate(torch.tensor(BYZFL["vectors"], dtype=torch.float64)):
        parts = vector.split([t.numel() for t in params.values()])
        sent = {
            n: t + part.view(t.shape) for (n, t), part in zip(params.items(), parts, strict=True)
        }
        updates.append(Update(client, whole, (sent,), 1.0, {}))
    rule = replace(RULES[name], mixing=mixing)
    merged = rule.aggregate(setup, State(0, "train", params), updates).params
    change = torch.cat([(merged[n] - t).flatten() for n, t in params.items()])
    expected = BYZFL["results"][name if mixing == "none" else f"nnm {name}"]
    np.testing.assert_allclose(change.numpy(), expected, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------ against slow loops


@st.composite
def holdings(draw) -> tuple[Subnet, ...]:
    def channels(size: int) -> list[int]:
        if draw(st.booleans()):
            return list(range(draw(st.integers(1, size))))
        return sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))

    subnet = Subnet.from_channels(
        {g: channels(n) for g, n in GROUPS.items() if draw(st.integers(0, 3)) == 0}
    )
    if draw(st.integers(0, 4)) == 0:
        return tuple(subnet.with_private(owner, "*") for owner in "yx")
    return (subnet,)


@st.composite
def cohorts(draw) -> list[tuple[tuple[Subnet, ...], float]]:
    weight = st.sampled_from([0.0, 1.0, 3.0, 600.0, 1.0])
    return draw(st.lists(st.tuples(holdings(), weight), min_size=1, max_size=8))


def make_updates(structure, params, cohort, seed=0) -> list[Update]:
    generator = torch.Generator().manual_seed(seed)
    updates = []
    for client, (holding, weight) in enumerate(cohort):
        parts = []
        for subnet in holding:
            taken = copy_subnet_tensors(params, structure, subnet)
            parts.append({
                n: t + torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
                for n, t in taken.items()
            })  # fmt: skip
        updates.append(Update(client, holding, tuple(parts), weight, {}))
    return updates


def number_cells(params):
    """Tensors whose every cell is another number, so that copies say where they are from."""
    numbered, start = {}, 0
    for name, tensor in params.items():
        numbered[name] = torch.arange(start, start + tensor.numel()).view(tensor.shape)
        start += tensor.numel()
    return numbered


def list_changes(structure, params, update) -> dict[tuple[str, int], float]:
    """The change of every cell that an update holds, by its global name and number."""
    changes = {}
    numbers = number_cells(params)
    for subnet, sent in zip(update.subnets, update.params, strict=True):
        old = copy_subnet_tensors(params, structure, subnet)
        where = copy_subnet_tensors(numbers, structure, subnet)
        for name, tensor in sent.items():
            if tensor.is_floating_point():
                target = global_name(name, structure, subnet)
                cells = zip(
                    where[name].flatten().tolist(),
                    (tensor - old[name]).flatten().tolist(),
                    strict=True,
                )
                changes |= {(target, cell): change for cell, change in cells}
    return changes


def apply_slowly(rule, x: np.ndarray, f: int, order: list[int]) -> np.ndarray | None:
    """A rule on the rows of one ring, as its paper says it; None if they are too few."""
    n = len(x)
    if rule.mixing == "buckets":
        starts = range(0, n, rule.bucket_size)
        x = np.stack([x[order[i : i + rule.bucket_size]].mean(0) for i in starts])
    if len(x) <= 2 * f:
        return None
    n = len(x)
    distance = np.array([[np.linalg.norm(a - b) for b in x] for a in x])
    if rule.mixing == "nnm":
        x = np.stack([x[np.argsort(row, kind="stable")[: n - f]].mean(0) for row in distance])
        distance = np.array([[np.linalg.norm(a - b) for b in x] for a in x])
    if isinstance(rule, fq.TrimmedMean):
        return np.sort(x, 0)[f : n - f].mean(0)
    if isinstance(rule, fq.Median):
        return np.median(x, 0)
    if isinstance(rule, fq.GeometricMedian):
        z = np.zeros(x.shape[1])
        for _ in range(rule.iterations):
            b = 1 / np.maximum(np.linalg.norm(x - z, axis=1), rule.smoothing)
            z = (b[:, None] * x).sum(0) / b.sum()
        return z
    if isinstance(rule, fq.CenteredClipping):
        v = np.zeros(x.shape[1])
        for _ in range(rule.iterations):
            far = np.linalg.norm(x - v, axis=1)
            radius = rule.radius or np.sort(far)[(n - 1) // 2]
            v = v + ((x - v) * np.minimum(1, radius / np.maximum(far, 1e-300))[:, None]).mean(0)
        return v
    near = (np.sort(distance**2, 1)[:, 1 : n - f]).sum(1)
    best = np.argsort(near, kind="stable")[: 1 if isinstance(rule, fq.Krum) else n - f]
    return x[best].mean(0)


def merge_slowly(rule, setup, params, updates) -> dict[str, torch.Tensor]:
    """Cells by their sets of holders, a rule for each set; nothing is shared with the library."""
    counting = [u for u in updates if u.weight > 0]
    changes = [list_changes(setup.structure, params, u) for u in counting]
    drawn = np.random.default_rng(fq_seed(setup)).permutation(len(counting)).tolist()
    cells = sorted({cell for own in changes for cell in own})
    holders = {cell: tuple(i for i, own in enumerate(changes) if cell in own) for cell in cells}
    expected = {n: t.clone() for n, t in params.items()}
    starts = {n: int(t.flatten()[0]) if t.numel() else 0 for n, t in number_cells(params).items()}
    for who, ring in groupby(sorted(cells, key=holders.get), key=holders.get):
        ring = list(ring)
        x = np.array([[changes[i][cell] for cell in ring] for i in who])
        f = rule.count_hostile(len(who))
        order = [who.index(i) for i in drawn if i in who]
        moved = apply_slowly(rule, x, f, order)
        if moved is None:
            continue
        for (target, cell), change in zip(ring, moved, strict=True):
            name = target.partition("@")[0]
            if target not in expected:
                expected[target] = params[name].clone()
            expected[target].view(-1)[cell - starts[name]] += change
    return expected


def fq_seed(setup) -> int:
    return derive_seed(setup.seed, 0, BUCKETS)


@given(cohort=cohorts(), data=st.data())
@settings(EXAMPLES, max_examples=60)
def test_rules_are_those_of_slow_loops_over_sets_of_holders(setup, params, cohort, data):
    ring_rules = [r for r in EVERY_RULE if getattr(r, "scope", "ring") == "ring"]
    rule = data.draw(st.sampled_from(ring_rules))
    updates = make_updates(setup.structure, params, cohort)
    merged = rule.aggregate(setup, State(0, "train", params), updates).params
    expected = merge_slowly(rule, setup, params, updates)
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        np.testing.assert_allclose(tensor.numpy(), expected[name].numpy(), rtol=1e-4, atol=1e-5)


@given(cohort=cohorts())
@EXAMPLES
def test_nothing_hostile_expected_is_the_unweighted_mean(setup, params, cohort):
    updates = make_updates(setup.structure, params, cohort)
    merged = fq.TrimmedMean(hostile=0).aggregate(setup, State(0, "train", params), updates)
    equal = [replace(u, weight=float(u.weight > 0)) for u in updates]
    expected = average(params, setup.structure, equal)
    for name, tensor in expected.items():
        np.testing.assert_allclose(
            merged.params.get(name, params[name.partition("@")[0]]).numpy(),
            tensor.numpy(), rtol=1e-5, atol=1e-6,
        )  # fmt: skip


# ------------------------------------------------------------------ laws


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
@given(cohort=cohorts(), data=st.data())
@settings(EXAMPLES, max_examples=8)
def test_order_of_clients_does_not_change_a_bit(setup, params, cohort, rule, data):
    updates = make_updates(setup.structure, params, cohort)
    state = State(0, "train", params)
    expected = rule.aggregate(setup, state, updates).params
    shuffled = data.draw(st.permutations(updates))
    merged = rule.aggregate(setup, state, shuffled).params
    assert all(merged[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
def test_inputs_are_left_untouched(setup, params, rule):
    cohort = [((setup.structure.subnet(w),), 1.0) for w in (1.0, 1.0, 1.0, 0.5, 0.5)]
    updates = make_updates(setup.structure, params, cohort)
    before = [{n: t.clone() for n, t in u.params[0].items()} for u in updates]
    old = {n: t.clone() for n, t in params.items()}
    rule.aggregate(setup, State(0, "train", params), updates)
    assert all(params[n].equal(t) for n, t in old.items())
    for update, sent in zip(updates, before, strict=True):
        assert all(update.params[0][n].equal(t) for n, t in sent.items())


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
def test_unchanged_updates_change_nothing(setup, params, rule):
    subnets = [(setup.structure.subnet(w),) for w in (1.0, 1.0, 1.0, 0.5, 0.5)]
    updates = [
        Update(i, s, (copy_subnet_tensors(params, setup.structure, s[0]),), 1.0, {})
        for i, s in enumerate(subnets)
    ]
    merged = rule.aggregate(setup, State(0, "train", params), updates).params
    assert all(merged[name].equal(tensor) for name, tensor in params.items())


def test_cells_with_too_few_updates_keep_their_values_and_are_counted(setup, params):
    wide, narrow = (setup.structure.subnet(1.0),), (setup.structure.subnet(0.5),)
    cohort = [(wide, 1.0), (wide, 1.0), (narrow, 1.0), (narrow, 1.0), (narrow, 1.0)]
    updates = make_updates(setup.structure, params, cohort)
    state = State(0, "train", params)
    aggregate = fq.TrimmedMean(hostile=2).aggregate(setup, state, updates)
    held = sum(t.numel() for t in params.values() if t.is_floating_point())
    inside = sum(
        t.numel()
        for t in copy_subnet_tensors(params, setup.structure, narrow[0]).values()
        if t.is_floating_point()
    )
    assert aggregate.metrics == {"cells_held": held, "cells_kept": held - inside}
    for name in ("a", "b", "c", "out"):
        moved = aggregate.params[name] != params[name]
        assert moved.equal(aggregate.trained(name))
        assert 0 < int(moved.sum()) < moved.numel()
    moments = chain(fq.TrimmedMean(hostile=2), fq.FedAvgM()).merge(setup, state, updates)
    kept = ~aggregate.trained("a")
    assert not moments.server_tensors["server_optimizer/momentum/a"][kept].any()


def test_clients_that_krum_selects_on_the_common_ring_count_in_all_rings(setup, params):
    wide, narrow = (setup.structure.subnet(1.0),), (setup.structure.subnet(0.5),)
    cohort = [(wide, 1.0)] * 5 + [(narrow, 1.0)] * 4
    updates = make_updates(setup.structure, params, cohort)
    for hostile in (1, 6):  # far away where all are compared
        part = {
            n: t + 50 if t.is_floating_point() else t for n, t in updates[hostile].params[0].items()
        }
        updates[hostile] = replace(updates[hostile], params=(part,))
    state = State(0, "train", params)
    merged = fq.MultiKrum(hostile=2).aggregate(setup, state, updates)
    honest = [u for u in updates if u.client not in (1, 6)]
    expected = average(params, setup.structure, honest)
    for name, tensor in expected.items():
        np.testing.assert_allclose(merged.params[name].numpy(), tensor.numpy(), atol=1e-5)
    (chosen,) = [
        u for u in honest
        if torch.allclose(
            fq.Krum(hostile=2).aggregate(setup, state, updates).params["scalar"],
            u.params[0]["scalar"],
        )
    ]  # fmt: skip
    one = fq.Krum(hostile=2).aggregate(setup, state, updates).params
    alone = average(params, setup.structure, [chosen])
    assert all(torch.allclose(one[name], tensor, atol=1e-5) for name, tensor in alone.items())


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
def test_hostile_updates_do_not_move_a_model_far(setup, params, rule):
    cohort = [((setup.structure.subnet(1.0),), 1.0)] * 7
    updates = make_updates(setup.structure, params, cohort)
    part = {n: t + 1e6 if t.is_floating_point() else t for n, t in updates[3].params[0].items()}
    updates[3] = replace(updates[3], params=(part,), weight=1e9)
    merged = rule.aggregate(setup, State(0, "train", params), updates).params
    for name, tensor in params.items():
        assert float((merged[name].double() - tensor.double()).abs().max()) < 5
    mean = average(params, setup.structure, updates)
    assert float((mean["a"] - params["a"]).abs().max()) > 1e5


def test_chunks_change_no_bit(setup, params, monkeypatch):
    subnets = [setup.structure.subnet(channels={"h": c}) for c in ([0, 1], [1, 2, 4], [0, 3, 4])]
    cohort = [((subnet,), 1.0) for subnet in subnets * 2]
    updates, state = make_updates(setup.structure, params, cohort), State(0, "train", params)
    for rule in (fq.TrimmedMean(hostile=0.4), fq.Median(hostile=0, mixing="buckets")):
        expected = rule.aggregate(setup, state, updates).params
        monkeypatch.setattr(change_store, "CHUNK_BYTES", 64)
        merged = rule.aggregate(setup, state, updates).params
        monkeypatch.undo()
        assert all(merged[name].equal(tensor) for name, tensor in expected.items())


def test_constants_of_a_model_stay(structure):
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    structure = fq.trace_structure(model, torch.ones(1, 1))
    setup = Setup(model, structure, torch.ones(1, 1), (), 1, 0)
    params = dict(model.state_dict())
    updates = make_updates(structure, params, [((Subnet(),), 1.0)] * 3)
    for rule in (fq.TrimmedMean(hostile=1), fq.GeometricMedian(hostile=1)):
        merged = rule.aggregate(setup, State(0, "train", params), updates).params
        assert float(merged["mask"][1]) == -torch.inf
        assert all(t.isfinite().all() for n, t in merged.items() if n != "mask")


@given(st.integers(1, 40), st.integers(1, 9))
@EXAMPLES
def test_rows_are_sorted_whatever_their_number(rows, columns):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    assert torch.stack(sort_rows(values)).equal(values.sort(0).values)


def test_a_fraction_is_of_each_rings_updates():
    rule = fq.TrimmedMean(hostile=0.2)
    assert [rule.count_hostile(n) for n in (1, 5, 6, 10)] == [1, 1, 2, 2]
    assert [n for n in range(8) if rule.is_enough(n)] == [3, 4, 5, 6, 7]
    assert fq.Median(hostile=1, mixing="buckets").count_needed(10) == 5
    with pytest.raises(ConfigError, match="a number of clients, or a fraction below 1"):
        fq.Median(hostile=1.5)


# ------------------------------------------------------------------ transforms


def change_norm(setup, params, update) -> float:
    changes = list_changes(setup.structure, params, update)
    return float(np.linalg.norm(list(changes.values())))


def test_changes_are_clipped_to_the_limit_and_short_ones_stay_as_they_are(setup, params):
    state = State(0, "train", params)
    cohort = [((setup.structure.subnet(w),), 1.0) for w in (1.0, 0.25)]
    long, short = make_updates(setup.structure, params, cohort)
    limit = (change_norm(setup, params, long) + change_norm(setup, params, short)) / 2
    clipped = fq.ClipNorm(limit).transform(setup, state, long)
    assert change_norm(setup, params, clipped) == pytest.approx(limit, rel=1e-5)
    before, after = (
        list_changes(setup.structure, params, long),
        list_changes(setup.structure, params, clipped),
    )
    ratio = np.array(list(after.values())) / np.array(list(before.values()))
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-3)  # shorter, in the same direction
    assert fq.ClipNorm(limit).transform(setup, state, short) is short


@pytest.mark.parametrize("per_ring", [False, True])
def test_changes_are_clipped_to_a_quantile_of_the_round(setup, params, per_ring):
    state = State(0, "train", params)
    subnets = [setup.structure.subnet(w) for w in (1.0, 0.5, 1.0, 1.0, 0.5)]
    updates = make_updates(setup.structure, params, [((s,), 1.0) for s in subnets])
    (large,) = (
        {n: 1e3 * t if t.is_floating_point() else t for n, t in part.items()}
        for part in updates[2].params
    )
    updates[2] = replace(updates[2], params=(large,))
    norms = sorted(change_norm(setup, params, u) for u in updates)
    clip = fq.ClipQuantile(0.5, per_ring=per_ring)
    after = list(clip.transform_all(setup, state, iter(updates)))
    assert [u.client for u in after] == [u.client for u in updates]
    clipped = [change_norm(setup, params, u) for u in after]
    if not per_ring:
        np.testing.assert_allclose(sorted(clipped)[2:], norms[2], rtol=1e-4)
        return
    held = [set(list_changes(setup.structure, params, u)) for u in updates]
    outer = held[0] - held[1]
    for ring, holders in ((held[1], range(5)), (outer, (0, 2, 3))):
        was, now = (
            [
                np.linalg.norm([list_changes(setup.structure, params, u[i])[c] for c in ring])
                for i in holders
            ]
            for u in (updates, after)
        )
        np.testing.assert_allclose(
            now, np.minimum(was, np.sort(was)[(len(was) - 1) // 2]), rtol=1e-3
        )


def test_weights_are_capped_or_equal(setup, params):
    updates = make_updates(setup.structure, params, [((Subnet(),), w) for w in (0.0, 5.0, 900.0)])
    state = State(0, "train", params)
    assert [fq.EqualWeights().transform(setup, state, u).weight for u in updates] == [0, 1, 1]
    assert [fq.CapWeight(50.0).transform(setup, state, u).weight for u in updates] == [0, 5, 50]
