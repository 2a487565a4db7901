"""SHeteroFL: nested widths, all that a client can afford on every batch."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.customize.info import RunInfo, describe_inputs
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, Update
from fedquilt.federation.state import Setup
from fedquilt.runs.identity import describe_settings
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.structure.structure import NORMS, TRACKED
from fedquilt.training.slimmable import Slimmable

EXAMPLES = (30, 10, 25, 4)
CHANNELS = (8, 4)  # of the net


def kept(width: float) -> tuple[int, int]:
    first, second = (math.ceil(width * size) for size in CHANNELS)
    return first, second


def uneven(world):
    clients = [
        replace(client, num_examples=count)
        for client, count in zip(world.setup.clients, EXAMPLES, strict=True)
    ]
    return world.with_clients(*clients)


def test_a_client_trains_every_width_that_it_can_afford(world, local_training):
    method = fq.SHeteroFL(local_training)
    world = uneven(world).prepare_model(method)
    assert method.sizes(world.setup) == (1.0, 0.5, 0.25)
    tasks = method.plan(world.setup, world.start(method), world.setup.clients)
    first = world.setup.structure.cut_groups()[0]
    counts = [[world.setup.structure.kept_count(s, first) for s in t.subnets] for t in tasks]
    assert counts == [[8, 4, 2], [4, 2], [2], [2]]
    for task, client in zip(tasks, world.setup.clients, strict=True):
        assert isinstance(task.recipe, Slimmable)
        assert task.recipe.weight == client.num_examples
        assert (task.recipe.labels, task.recipe.masked) == (client.labels, True)
        names = [world.setup.structure.tensor_names(s) for s in task.subnets]
        tracked = world.setup.structure.match_names((TRACKED,))
        assert set(names[0]) == set(world.setup.structure.shapes) - tracked
        assert not any(names[1:])  # it is all part of the widest


def test_widths_can_be_named_and_a_client_below_them_trains_what_it_can(world, local_training):
    method = fq.SHeteroFL(local_training, widths=(0.5, 0.75))
    assert method.sizes(world.setup) == (0.75, 0.5)
    world = world.prepare_model(method)
    tasks = method.plan(world.setup, world.start(method), world.setup.clients)
    first = world.setup.structure.cut_groups()[0]
    counts = [[world.setup.structure.kept_count(s, first) for s in t.subnets] for t in tasks]
    assert counts == [[6, 4], [4], [2], [2]]


def where(name: str, width: float) -> tuple[slice, ...]:
    """The cells of a tensor that the leading channels hold, written out for this net."""
    first, second = kept(width)
    return {
        "features.0.weight": (slice(first),),
        "features.0.bias": (slice(first),),
        "features.3.weight": (slice(second), slice(first)),
        "features.3.bias": (slice(second),),
        "classifier.weight": (slice(None), slice(second)),
        "classifier.bias": (),
    }.get(name, (slice(first if name.startswith("features.1.") else second),))


@pytest.mark.parametrize("statistics", ["batch", "tracked"])
def test_a_cell_is_averaged_over_its_holders_by_their_data(world, local_training, statistics):
    method = fq.SHeteroFL(local_training, statistics=statistics)
    world = uneven(world).prepare_model(method)
    state = world.start(method)
    updates = world.done(method.plan(world.setup, state, world.setup.clients))
    unsent = NORMS if statistics == "tracked" else TRACKED  # or sent as a width's own
    norms = world.setup.structure.match_names((unsent,))
    sums: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    for client, update in zip(world.setup.clients, updates, strict=True):
        widths = [w for w in (1.0, 0.5, 0.25) if w <= client.budget.width]
        for width, part in zip(widths, update.params, strict=True):
            for name, sent in part.items():
                if not sent.is_floating_point():
                    continue
                target = f"{name}@{width:g}" if name in norms else name
                shape = world.setup.structure.shapes[name]
                total = sums.setdefault(target, np.zeros(shape))
                weight = weights.setdefault(target, np.zeros(shape))
                total[where(name, width)] += client.num_examples * sent.double().numpy()
                weight[where(name, width)] += client.num_examples
    after = method.merge(world.setup, state, updates).params
    floats = {n for n, t in after.items() if t.is_floating_point()}
    assert set(sums) <= floats
    for name in floats:
        old = state.params[name.partition("@")[0]].double().numpy()
        if name not in sums:  # the norms that nobody owns
            assert name in norms
            np.testing.assert_array_equal(after[name].double().numpy(), old)
            continue
        with np.errstate(invalid="ignore"):
            expected = np.where(weights[name] > 0, sums[name] / weights[name], old)
        np.testing.assert_allclose(after[name].double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_every_width_has_normalisation_of_its_own_if_statistics_are_tracked(world, local_training):
    method = fq.SHeteroFL(local_training, statistics="tracked")
    state = world.start(method)
    after = world.round(method, state).params
    learned = {n for n in world.setup.structure.match_names((NORMS,)) if "num_batches" not in n}
    own = {f"{n}@{w}" for n in learned for w in ("1", "0.5", "0.25")}
    assert len(learned) == 8
    assert set(after) - set(state.params) == own
    assert all(after[n].equal(state.params[n]) for n in learned)  # nobody trains the shared ones
    narrow, wide = (after[f"features.1.running_mean@{w}"][:2] for w in ("0.25", "1"))
    assert not narrow.equal(wide)
    assert after["features.4.weight@0.5"][2:].equal(state.params["features.4.weight"][2:])


def test_widths_share_normalisation_but_for_statistics_if_these_are_not_tracked(
    world, local_training
):
    method = fq.SHeteroFL(local_training)
    world = world.prepare_model(method)
    state = world.round(method, world.start(method))
    assert not any("@" in n for n in state.params)
    state = world.round(method, replace(state, phase="statistics"))
    owned = {n for n in state.params if "@" in n}
    names = world.setup.structure.statistics
    assert owned == {f"{n}@{w:g}" for n in names for w in (1.0, 0.5, 0.25)}
    for width in (1.0, 0.5, 0.25):
        (subnet,) = method.ensemble(world.setup, state, width)
        small = build_module(world.setup.model, world.setup.structure, subnet, state.params)
        expected = state.params["features.1.weight"][: kept(width)[0]]
        assert small.features[1].weight.equal(expected)
        own = state.params[f"features.1.running_mean@{width:g}"][: kept(width)[0]]
        assert small.features[1].running_mean.equal(own)


def test_a_customized_model_has_the_normalisation_of_its_width(world, local_training):
    method = fq.SHeteroFL(local_training, statistics="tracked")
    state = world.round(method, world.start(method))
    sizes, inputs = method.sizes(world.setup), describe_inputs(world.setup.example)
    info = RunInfo(world.setup.seed, 1, describe_settings(method), sizes, inputs)
    run = fq.Run(world.setup, method, state, (), info, world.setup)
    for width, owner in ((1.0, "1"), (0.5, "0.5"), (0.25, "0.25"), (0.4, "0.5"), (0.1, "0.25")):
        with pytest.warns(UserWarning, match="smallest .* 0.25") if width < 0.25 else nullcontext():
            model = run.customize(width=width)
        for name in ("running_mean", "running_var", "weight", "bias"):
            found = getattr(model.features[1], name)
            assert found.equal(state.params[f"features.1.{name}@{owner}"][: len(found)])
    narrow = fq.SHeteroFL(local_training, statistics="tracked", widths=(0.5, 0.25))
    assert narrow.subnet(world.setup, 1.0).owner == "0.5"


@pytest.mark.parametrize("statistics", ["batch", "tracked"])
def test_only_the_widest_net_and_own_normalisation_travel(
    world, local_training, traffic, statistics
):
    method = fq.SHeteroFL(local_training, statistics=statistics)
    world = world.prepare_model(method)
    tasks = method.plan(world.setup, world.start(method), world.setup.clients)

    def norms(width: float) -> int:
        channels = sum(kept(width))
        tracked = 4 * 2 * channels + 2 * 8 if statistics == "tracked" else 0  # and two counters
        return 4 * 2 * channels + tracked

    def weights(width: float) -> int:
        first, second = kept(width)
        return 4 * ((9 * first + first) + (9 * first * second + second) + 4 * second + 4)

    for task, widths in zip(tasks, ((1.0, 0.5, 0.25), (0.5, 0.25), (0.25,), (0.25,)), strict=True):
        expected = weights(widths[0]) + norms(widths[0])
        if statistics == "tracked":
            expected += sum(map(norms, widths[1:]))
        (update,) = world.done([task])
        assert traffic(world, task, update) == (expected, expected)


@pytest.fixture(scope="module")
def square() -> Setup:
    """Two clients, of width 1 and of 1/8, and four widths."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    structure = fq.trace_structure(net, torch.zeros(2, 3))
    clients = (Client(0, 50, (0, 1), Budget(1.0)), Client(1, 50, (0, 1), Budget(0.125)))
    return Setup(net, structure, torch.zeros(2, 3), clients, 1, 0)


@pytest.mark.parametrize(("count_widths", "expected"), [(False, 0.5), (True, 0.8)])
def test_counting_widths_gives_wide_clients_the_public_codes_weight(square, count_widths, expected):
    """There a client is added once for each width it trains, so 4 : 1 where they meet."""
    method = fq.SHeteroFL(widths=(1.0, 0.5, 0.25, 0.125), count_widths=count_widths)
    state = replace(method.start(square), phase="train")
    updates = []
    for value, task in zip((1.0, 0.0), method.plan(square, state, square.clients), strict=True):
        parts = [copy_subnet_tensors(state.params, square.structure, s) for s in task.subnets]
        filled = tuple({n: torch.full_like(t, value) for n, t in p.items()} for p in parts)
        updates.append(Update(task.client, task.subnets, filled, task.recipe.weight, {}))
    after = method.merge(square, state, updates).params
    torch.testing.assert_close(after["0.weight"][0], torch.full((3,), expected))
    torch.testing.assert_close(after["2.weight"][:, 0], torch.full((2,), expected))
    torch.testing.assert_close(after["0.weight"][1:], torch.ones(7, 3))  # only the wide one's
    torch.testing.assert_close(after["2.bias"], torch.full((2,), expected))


def test_counting_widths_changes_weights_and_nothing_else(world, local_training):
    methods = [fq.SHeteroFL(local_training, count_widths=flag) for flag in (False, True)]
    here = world.prepare_model(methods[0])
    state = here.start(methods[0])
    once, often = (
        here.done(method.plan(here.setup, state, here.setup.clients)) for method in methods
    )
    for one, other in zip(once, often, strict=True):
        assert all(other.params[0][n].equal(t) for n, t in one.params[0].items())
        for subnet, part in zip(other.subnets, other.params, strict=True):
            wide = {**state.params}
            for name, tensor in other.params[0].items():
                wide[name] = wide[name].clone()
                wide[name][tuple(slice(n) for n in tensor.shape)] = tensor
            cells = copy_subnet_tensors(wide, here.setup.structure, subnet)
            assert all(part[n].equal(t) for n, t in cells.items())
    narrow = here.with_clients(*here.setup.clients[2:])  # one width each: nothing to count
    updates = [narrow.done(m.plan(narrow.setup, state, narrow.setup.clients)) for m in methods]
    merged = [m.merge(here.setup, state, u).params for m, u in zip(methods, updates, strict=True)]
    assert all(merged[1][n].equal(t) for n, t in merged[0].items())


@pytest.mark.parametrize("statistics", ["batch", "tracked"])
def test_one_width_for_all_is_fedavg_bit_for_bit(world, local_training, same, statistics):
    world = world.with_clients(
        *(replace(c, budget=Budget(1.0)) for c in uneven(world).setup.clients)
    )
    methods = (
        fq.SHeteroFL(local_training, masked=False, statistics=statistics),
        fq.FedAvg(local_training, statistics=statistics),
    )
    found = []
    for method in methods:
        here = world.prepare_model(method)
        state = here.start(method)
        for _ in range(2):
            state = here.round(method, state)
        (subnet,) = method.ensemble(here.setup, state, 1.0)
        found.append(copy_subnet_tensors(state.params, here.setup.structure, subnet))
    assert same(found[0], found[1])


def test_a_model_without_batch_normalisation_has_nothing_of_its_own(square):
    for statistics in ("batch", "tracked"):
        method = fq.SHeteroFL(statistics=statistics)
        setup = method.prepare_model(square)
        state = replace(method.start(setup), phase="train")
        wide, narrow = method.plan(setup, state, setup.clients)
        assert [s.owner for s in (*wide.subnets, *narrow.subnets)] == ["", "", ""]
        assert setup.structure.tensor_names(wide.subnets[1]) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"statistics": "post"}, "'batch' or 'tracked', got 'post'"), ({"widths": (0.5, 2)}, "got 2")],
)
def test_settings_that_make_no_sense_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        fq.SHeteroFL(**wrong)
