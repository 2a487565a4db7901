"""FedAvg with adversarial training: at one trade-off, and at every one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.structure.cut import build_module
from fedquilt.training.dualnorm import on_path, set_robustness
from fedquilt.training.objectives import Adversarial, OnceForAll

HALVES = "clean", "noise"


@pytest.fixture
def images(world):
    """The same clients with pixels for inputs, which an attack needs."""
    for split in (world.people.train, world.people.test):
        for client, data in split.items():
            split[client] = replace(data, inputs=torch.sigmoid(data.inputs))
    return world


def test_at_trains_every_client_on_equation_1_at_one_trade_off(images, local_training):
    method = fq.fedavg_at(local_training, share=0.3, epsilon=0.1, steps=2)
    state = images.start(method)
    tasks = method.plan(images.setup, state, images.setup.clients)
    for task in tasks:
        objective = task.recipe.objective
        assert isinstance(objective, Adversarial)
        assert (objective.share, objective.attack.epsilon, objective.attack.steps) == (0.3, 0.1, 2)
    assert not any("noise" in name for name in state.params)  # one net as it was, no dial
    after = images.round(method, state).params
    assert all(not after[n].equal(t) for n, t in state.params.items() if t.is_floating_point())


def test_at_without_a_share_of_attacks_is_fedavg_bit_for_bit(images, local_training, same):
    found = []
    for method in (
        fq.fedavg_at(local_training, share=0.0),
        fq.FedAvg(local_training, fraction=1.0),
    ):
        found.append(images.round(method, images.start(method)).params)
    assert same(*found)


def test_oat_trains_one_net_that_is_told_its_trade_off(images, local_training):
    method = fq.fedavg_oat(local_training, width=0.5, epsilon=0.1, steps=1)
    here = images.prepare_model(method)
    state = here.start(method)
    (task,) = method.plan(here.setup, state, here.setup.clients[:1])
    assert isinstance(task.recipe.objective, OnceForAll)
    assert task.recipe.objective.attack.steps == 1
    after = here.round(method, state).params
    for part in ("norm.clean.weight", "norm.noise.running_mean", "film.scale.weight"):
        assert not after[f"features.1.{part}"].equal(state.params[f"features.1.{part}"])
    (subnet,) = method.ensemble(here.setup, state, 0.5)
    net = build_module(here.setup.model, here.setup.structure, subnet, after).eval()
    assert net.features[0].weight.shape[0] == 4  # of the width asked for
    answers = []
    for dial in (0.0, 0.5, 1.0):
        set_robustness(net, dial)
        answers.append(net(torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(0))))
    assert not any(one.equal(other) for one, other in itertools.pairwise(answers))
    with on_path(net, 0.0):
        assert net(torch.rand(3, 1, 5, 5)).isfinite().all()


def test_statistics_that_oat_asks_for_are_of_attacked_batches_in_the_noise_halves(
    images, local_training
):
    method = replace(fq.fedavg_oat(local_training, epsilon=0.1, steps=1), query_statistics=True)
    net, here = images.setup.model, images.setup
    run = fq.train(net, here.example, method, images.people, 1, structure=here.structure, workers=0)
    clean, noise = (run.state.params[f"features.1.norm.{half}.running_mean"] for half in HALVES)
    assert noise.count_nonzero() == noise.numel()
    assert not noise.equal(clean)


def test_oat_can_draw_a_trade_off_for_every_example(images, local_training):
    method = fq.fedavg_oat(local_training, steps=1, per_example=True)
    here = images.prepare_model(method)
    state = here.start(method)
    after = here.round(method, state).params
    for part in ("norm.clean.weight", "norm.noise.running_mean", "film.scale.weight"):
        assert not after[f"features.1.{part}"].equal(state.params[f"features.1.{part}"])


def test_oat_starts_from_the_users_net_whatever_the_dial_says(images, local_training):
    method = fq.fedavg_oat(local_training)
    here = images.prepare_model(method)
    x = torch.rand(3, 1, 5, 5)
    plain, conditional = images.setup.model.eval(), here.setup.model.eval()
    for dial in (0.0, 0.3, 1.0):
        set_robustness(conditional, dial)
        with torch.no_grad():
            torch.testing.assert_close(conditional(x), plain(x))


def test_inputs_that_are_no_pixels_are_named_as_the_reason(world, local_training):
    method = fq.fedavg_at(local_training, steps=1)
    (task,) = method.plan(world.setup, world.start(method), world.setup.clients[:1])
    with world.engine() as engine:
        (failure,) = engine.run([task])
    assert "an attack needs inputs with pixels in [0.0, 1.0]" in failure.reason


@pytest.mark.parametrize("make", [fq.fedavg_at, fq.fedavg_oat])
def test_the_step_of_the_attack_and_the_mask_are_those_of_the_settings(world, make):
    method = make(step_size=2 / 255, masked=True)
    world = world.prepare_model(method)
    (task,) = method.plan(world.setup, world.start(method), world.setup.clients[:1])
    assert task.recipe.objective.attack.step == 2 / 255
    assert task.recipe.masked is True


@pytest.mark.parametrize("make", [fq.fedavg_at, fq.fedavg_oat])
def test_an_attack_that_makes_no_sense_is_refused(make):
    with pytest.raises(ConfigError, match="epsilon"):
        make(epsilon=-1)
