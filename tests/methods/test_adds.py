"""ADDS: clients decide which part of the model they train."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.client import PERSONAL
from fedquilt.federation.state import Setup
from fedquilt.runs.accounting import count_subnet_bytes
from fedquilt.structure.structure import TRACKED


@pytest.fixture
def method(local_training):
    return fq.ADDS(local_training, fraction=1.0, keep_fraction=0.6, keep_lr=0.05)


@pytest.mark.parametrize("importance", ["slimming", "lrp"])
def test_the_whole_net_goes_down_and_only_the_chosen_part_comes_back(
    world, method, traffic, importance
):
    method = replace(method, importance=importance)
    world = world.prepare_model(method)
    tasks = method.plan(world.setup, world.start(method), world.setup.clients)
    whole = count_subnet_bytes(world.setup, fq.Subnet().excluding(TRACKED))
    for task, update in zip(tasks, world.done(tasks), strict=True):
        down, up = traffic(world, task, update)
        assert down == whole
        assert up == count_subnet_bytes(world.setup, update.subnets[0]) < whole


def test_cells_are_averaged_over_those_that_sent_them_each_counting_once(world, method):
    """Eq. 19."""
    world = world.prepare_model(method)
    state = world.start(method)
    updates = world.done(method.plan(world.setup, state, world.setup.clients))
    after = method.merge(world.setup, state, updates)
    name, old = "features.0.weight", state.params["features.0.weight"]
    sums, counts = torch.zeros_like(old), torch.zeros(8, 1, 1, 1)
    for update in updates:
        rows = update.subnets[0].channels("features.0")
        rows = torch.arange(8) if rows is None else rows
        sums[rows] += update.params[0][name]
        counts[rows] += 1
    expected = torch.where(counts > 0, sums / counts.clamp(min=1), old)
    torch.testing.assert_close(after.params[name], expected)
    assert {c: s.shape for c, s in after.chosen_subnets.items()} == {
        u.client: u.subnets[0].shape for u in updates
    }
    assert {(s.owner, s.private) for s in after.chosen_subnets.values()} == {(PERSONAL, (TRACKED,))}


def test_the_choices_of_clients_that_were_not_asked_stay(world, method):
    world = world.prepare_model(method)
    state = world.round(method, world.start(method))
    tasks = method.plan(world.setup, replace(state, round=1), world.setup.clients[:1])
    after = method.merge(world.setup, state, world.done(tasks))
    assert sorted(after.chosen_subnets) == [0, 1, 2, 3]
    assert {c: after.chosen_subnets[c] for c in (1, 2, 3)} == {
        c: state.chosen_subnets[c] for c in (1, 2, 3)
    }


def test_sampling_gets_harder_from_round_to_round(world, local_training):
    method = fq.ADDS(local_training, softness=2.0, sharpening=0.5)
    world = world.prepare_model(method)
    state = world.start(method)
    recipes = [
        method.plan(world.setup, replace(state, round=r), world.setup.clients)[0].recipe
        for r in (0, 1, 3)
    ]
    assert [recipe.softness for recipe in recipes] == [2.0, 1.0, 0.25]
    assert all(recipe.groups == ("features.0", "features.3") for recipe in recipes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_fraction": 0.05}, "got keep_fraction 0.05 and min_fraction 0.1"),
        ({"keep_fraction": 1.1}, "got keep_fraction 1.1"),
        ({"min_fraction": 0.0}, "min_fraction 0.0"),
        ({"softness": 0.0}, "got 0.0 and 0.98"),
        ({"sharpening": 1.5}, "got 1.0 and 1.5"),
        ({"validation": 1.0}, "got 1.0"),
        ({"importance": "LRP"}, "importance.*'lrp'.* got 'LRP'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        fq.ADDS(**settings)


class Recurrent(nn.Module):
    """Its only channels are those of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.classifier = nn.Linear(6, 4)

    def forward(self, x):
        return self.classifier(self.lstm(x)[0][:, -1])


def test_a_model_without_channels_to_sample_is_refused(world, method):
    net, example = Recurrent(), torch.zeros(2, 3, 5)
    setup = Setup(net, fq.trace_structure(net, example), example, world.setup.clients, 1, 0)
    with pytest.raises(ConfigError, match="no channels of this model can be sampled"):
        method.prepare_model(setup)


def test_rounds_by_relevance_have_the_same_bits_each_time(world, method, same):
    method = replace(method, importance="lrp")
    world = world.prepare_model(method)
    state = world.start(method)
    ends = [world.round(method, world.round(method, state)) for _ in range(2)]
    assert same(ends[0].params, ends[1].params)
    assert ends[0].chosen_subnets == ends[1].chosen_subnets
    other = replace(method, importance="slimming")
    assert not same(ends[0].params, world.round(other, world.round(other, state)).params)


class Above(nn.Module):
    """Between its hidden channels and its answers is something that relevance has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 5)
        self.lstm = nn.LSTM(5, 3, batch_first=True)
        self.classifier = nn.Linear(3, 4)

    def forward(self, x):
        return self.classifier(self.lstm(self.down(self.up(x).relu()))[0][:, -1])


def test_a_model_that_relevance_cannot_be_followed_through_is_refused_before_a_run(world, method):
    net, example = Above(), torch.zeros(2, 3, 5)
    structure = fq.trace_structure(net, example, exclude=["lstm"])
    setup = Setup(net, structure, example, world.setup.clients, 1, 0)
    assert method.prepare_model(setup)
    with pytest.raises(ConfigError, match="through 'lstm' of module 'lstm': there is no rule"):
        replace(method, importance="lrp").prepare_model(setup)


def test_without_captum_only_relevance_is_refused(world, method, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    assert world.prepare_model(method)
    with pytest.raises(ConfigError, match=r"pip install 'fedquilt\[lrp\]'"):
        world.prepare_model(replace(method, importance="lrp"))


def test_a_run_ends_with_one_model_and_a_net_for_every_client(world, method, tmp_path):
    run = fq.train(
        world.setup.model,
        world.setup.example,
        method,
        world.people,
        2,
        seed=3,
        workers=0,
        out=tmp_path / "run",
    )
    (score,) = run.scores
    assert score.width == 1.0
    accuracies = []
    for client in range(4):
        small = run.customize(client=client)
        kept = run.state.chosen_subnets[client].count("features.0") or 8
        assert small.features[0].out_channels == kept
        x, y = world.people.test[client].batch(torch.arange(5))
        with torch.no_grad():
            accuracies.append(float((small(x).argmax(-1) == y).float().mean()))
    assert score.personal_accuracy == pytest.approx(sum(accuracies) / 4)
