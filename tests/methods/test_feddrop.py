"""Federated dropout and FedRolex: which channels a client trains in a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.structure.budget import Budget
from fedquilt.training.objectives import PlainLoss

GROUPS = {"features.0": 8, "features.3": 4}


def kept(setup, subnet):
    """The channels of each group, as lists."""
    found = {group: subnet.channels(group) for group in GROUPS}
    return {g: list(range(GROUPS[g])) if c is None else c.tolist() for g, c in found.items()}


def parts(world, method, round=0):
    state = replace(method.start(world.setup), phase="train", round=round)
    tasks = method.plan(world.setup, state, world.setup.clients)
    return [kept(world.setup, task.subnets[0]) for task in tasks]


@pytest.fixture
def rich(world):
    """Clients that can afford all of the model."""
    return world.with_clients(*(replace(c, budget=Budget(1.0)) for c in world.setup.clients))


def test_all_clients_of_a_round_train_the_same_share_of_the_channels(rich):
    method = fq.FedDrop(width=0.75)
    rounds = [parts(rich, method, round) for round in range(30)]
    for found in rounds:
        assert all(part == found[0] for part in found)
        assert {group: len(channels) for group, channels in found[0].items()} == {
            "features.0": 6,
            "features.3": 3,
        }
    for group, size in GROUPS.items():
        draws = [tuple(found[0][group]) for found in rounds]
        assert len(set(draws)) > 3
        assert {channel for draw in draws for channel in draw} == set(range(size))


def test_every_client_may_have_channels_of_its_own(rich):
    found = [parts(rich, fq.FedDrop(width=0.5, per_client=True), round) for round in range(6)]
    assert any(part != first for first, *rest in found for part in rest)
    assert found == [
        parts(rich, fq.FedDrop(width=0.5, per_client=True), round) for round in range(6)
    ]


def test_draws_differ_between_groups_of_one_size_and_between_seeds():
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
    )
    structure = fq.trace_structure(net, torch.zeros(2, 3))
    client = fq.Client(0, 4)
    setup = fq.Setup(net, structure, torch.zeros(2, 3), (client,), 1, 0)
    method = fq.FedDrop(width=0.5)
    subnet = method.draw_subnet(setup, 0, client)
    first, second = (subnet.channels(group).tolist() for group in structure.cut_groups())
    assert first != second
    other = method.draw_subnet(replace(setup, seed=1), 0, client)
    assert other != subnet


def test_a_client_trains_no_more_than_it_can_afford_and_parts_of_a_draw_are_nested(world):
    whole, half, quarter, _ = parts(world, fq.FedDrop(width=0.75), round=3)  # 1, 0.5, 0.25
    for group, size in GROUPS.items():
        assert [len(p[group]) for p in (whole, half, quarter)] == [
            size * 3 // 4,
            size // 2,
            size // 4,
        ]
        assert set(quarter[group]) < set(half[group]) < set(whole[group])


def test_the_window_of_fedrolex_starts_at_the_round_and_goes_round_the_end(world):
    for round in (0, 1, 6, 7, 8, 13):
        found = parts(world, fq.FedRolex(), round)
        for part, width in zip(found, (1.0, 0.5, 0.25, 0.25), strict=True):
            for group, size in GROUPS.items():
                window = {(round + i) % size for i in range(int(width * size))}
                assert set(part[group]) == window


def test_every_cell_is_trained_once_a_window_has_gone_round(world, local_training):
    """With clients of half the width; of a quarter, first and last of eight never meet."""
    half = world.with_clients(*(replace(c, budget=Budget(0.5)) for c in world.setup.clients))
    method = fq.FedRolex(local_training, masked=False, own_rows=False)
    half = half.prepare_model(method)
    state = start = half.start(method)
    for _ in range(8):
        state = half.round(method, state)
    for name in ("features.0.weight", "features.0.bias", "classifier.weight"):
        assert (state.params[name] != start.params[name]).all()


def test_settings_reach_the_clients(world, local_training):
    method = fq.FedRolex(local_training)
    state = replace(method.start(world.setup), phase="train")
    task = method.plan(world.setup, state, world.setup.clients)[1]
    assert (task.recipe.masked, task.recipe.own_rows, task.recipe.scale) == (True, True, False)
    assert (task.recipe.labels, task.recipe.weight) == ((0, 1), 16)
    task = fq.FedDrop(local_training).plan(world.setup, state, world.setup.clients)[1]
    assert (task.recipe.masked, task.recipe.own_rows, task.recipe.scale) == (False, False, True)
    assert task.recipe.objective == PlainLoss()
    with pytest.raises(ConfigError, match=r"widths are fractions in \(0, 1\], got 0"):
        fq.FedDrop(width=0)


def test_the_whole_model_comes_out(world, local_training):
    run = fq.train(
        world.setup.model,
        world.setup.example,
        fq.FedDrop(local_training),
        world.people,
        1,
        workers=0,
    )
    assert [score.width for score in run.scores] == [1.0]
    small = run.customize()
    assert small.features[0].out_channels == 8
    assert small.features[1].running_mean is not None


def test_the_whole_nets_statistics_are_asked_of_those_who_can_afford_it(world):
    method = fq.FedRolex()
    state = replace(world.start(method), phase="statistics")
    tasks = method.plan(world.setup, state, world.setup.clients)
    assert [task.client for task in tasks] == [0]  # the others are sent nothing
    assert method.exceeds_budgets(world.setup) is None
    poor = world.with_clients(*world.setup.clients[1:]).setup
    tasks = method.plan(poor, state, poor.clients)
    assert [task.client for task in tasks] == [1, 2, 3]  # somebody must
    said = "3 of 3 clients are asked for statistics of nets up to width 1 at the end"
    assert said in method.exceeds_budgets(poor)
