"""DP-SGD against gradients that are taken one example at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.training.dpsgd import DPSGD, count_steps, per_example_gradients, refuse_unsupported

CLIP = 0.3


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(0)
    inputs = torch.randn(40, 2, 5)
    data = (inputs, torch.arange(40) % 3)
    clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))
    model = nn.Sequential(
        nn.Conv1d(2, 8, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
    )
    structure = fq.trace_structure(model, inputs[:1])
    return model, structure, clients, fq.ClientContext(model, structure, {"train": clients.train})


def make_recipe(noise: float = 0.0, batch_size: int = 20, **options) -> DPSGD:
    training = fq.LocalTraining(
        lr=1.0, momentum=0.0, weight_decay=0.0, epochs=1, batch_size=batch_size, max_grad_norm=None
    )
    return DPSGD(fq.LocalSGD(training, lr=1.0), noise, CLIP, 1, "ab" * 32, 0, **options)


def run(world, recipe: DPSGD, width: float = 1.0):
    model, structure, _, context = world
    subnet = structure.subnet(width)
    task = fq.Task(0, (subnet,), model.state_dict(), recipe, seed=0)
    before = fq.copy_subnet_tensors(model.state_dict(), structure, subnet)
    after = recipe.run(task, context).update.params[0]
    return {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_a_step_is_the_mean_of_clipped_gradients_of_single_examples(world, width):
    model, structure, clients, context = world
    step = run(world, make_recipe(), width)  # a batch of all 20 examples, without noise
    net = context.module(structure.subnet(width), model.state_dict()).train()
    expected = {name: torch.zeros_like(weight) for name, weight in net.named_parameters()}
    data = clients.train[0]
    for row in range(len(data)):
        x, y = data.batch(torch.tensor([row]))
        gradients = torch.autograd.grad(
            nn.functional.cross_entropy(net(x), y), list(net.parameters())
        )
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient * min(1.0, CLIP / norm) / 20
    for name, gradient in expected.items():
        torch.testing.assert_close(step[name], gradient, atol=1e-6, rtol=1e-4)


def test_the_noise_of_a_step_has_the_stated_deviation(world):
    plain, noisy = run(world, make_recipe()), run(world, make_recipe(noise=50.0))
    values = torch.cat([(noisy[n] - plain[n]).flatten() for n in plain])
    assert float(values.std()) == pytest.approx(50.0 * CLIP / 20, rel=0.15)


def test_hooks_are_gone_after_training(world):
    model = world[0]
    with per_example_gradients(model) as wrapped:
        wrapped(torch.zeros(2, 2, 5)).sum().backward()
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in model.modules())
    assert not any(hasattr(weight, "grad_sample") for weight in model.parameters())
    model.zero_grad()


def test_a_client_with_fewer_examples_than_promised_does_not_train(world):
    with pytest.raises(fq.FedquiltError, match="fewer than the 21 examples"):
        run(world, replace(make_recipe(), min_examples=21))


def test_batch_normalization_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"'1' \(BatchNorm1d\) does not allow it"):
        refuse_unsupported(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_larger_clients_spend_no_more_than_the_smallest():
    spent = [
        fq.Accountant(1e-5, 1 / batches, kind="rdp").compute_epsilon(1.0, 6 * batches)
        for batches in (1, 2, 3, 5, 10)
    ]
    assert spent == sorted(spent, reverse=True)
    assert [count_steps(n, batch_size=10, epochs=2) for n in (4, 10, 19, 20)] == [2, 2, 2, 4]


def train(world, method, **options):
    model, _, clients, _ = world
    privacy = fq.Privacy(mechanism="dp-sgd", min_examples=20, accountant="rdp", **options)
    return fq.train(model, torch.zeros(1, 2, 5), method, clients, 2, workers=0, privacy=privacy)


def test_epsilon_counts_every_step_of_every_net(world):
    from opacus.accountants import RDPAccountant

    training = fq.LocalTraining(epochs=2, batch_size=5)
    options = {"noise_multiplier": 1.5, "delta": 1e-4}
    one = train(world, fq.FedAvg(training, fraction=1.0), **options)
    two = train(world, fq.SplitMix(training, fraction=1.0, base=0.5, stacked=False), **options)
    for run, nets in ((one, 1), (two, 2)):
        independent = RDPAccountant()
        independent.history = [(1.5, 5 / 20, 2 * 2 * 4 * nets)]  # rounds, epochs, batches
        assert run.info.privacy["epsilon"] == pytest.approx(independent.get_epsilon(1e-4), rel=0.01)


def test_methods_with_other_training_are_refused(world):
    with pytest.raises(ConfigError, match="clients of FjORD do OrderedDropout"):
        train(world, fq.FjORD(), noise_multiplier=1.0)
    with pytest.raises(ConfigError, match=r"give privacy.min_examples"):
        fq.Privacy(noise_multiplier=1.0, mechanism="dp-sgd")
