"""Weights and shares of channels, trained in turn (ADDS, Algorithm 1)."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.federation.client import Task, derive_seed
from fedquilt.structure.tensors import named_tensors
from fedquilt.training import bilevel
from fedquilt.training.bilevel import SHARES, Bilevel
from fedquilt.training.context import ClientContext
from fedquilt.training.sampling import compute_rates, label_divergence

SETTINGS = fq.LocalTraining(
    lr=0.1, momentum=0.0, weight_decay=0.0, epochs=1, batch_size=30, max_grad_norm=None
)
EXAMPLE = torch.zeros(2, 1, 4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6, track_running_stats=False)
        self.hidden = nn.Linear(24, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        return self.classifier(self.hidden(x).relu())


@pytest.fixture(scope="module")
def traced():
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.norm.weight.copy_(torch.tensor([0.5, 2.0, -3.0, 0.1, 1.0, 0.7]))
    return net, fq.trace_structure(net, EXAMPLE)


@pytest.fixture
def context(traced):
    net, structure = traced
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(30) % 3
    x = torch.randn(30, 1, 4, 4, generator=generator) + y.view(-1, 1, 1, 1)
    return ClientContext(net, structure, {"train": {0: to_examples((x, y))}})


def recipe(**changes):
    plain = Bilevel(SETTINGS, 0.1, groups=("conv", "hidden"), keep_fraction=0.8)
    return replace(plain, **changes)


def done(context, recipe, seed=5):
    task = Task(0, (fq.Subnet(),), named_tensors(context.model), recipe, seed)
    result = recipe.run(task, context)
    return result.update, result.state


def parted(count, seed, validation=0.1):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, 2)))
    held = max(2, round(validation * count))
    return order[:held], order[held:]


def test_one_step_of_shares_goes_down_the_gradient_of_eq_18(context, traced):
    """Against the forward pass written out, with gates as numbers."""
    net, _ = traced
    update, kept = done(context, recipe(keep_lr=0.05, strength=0.3))
    held, _ = parted(30, 5)
    x, y = context.examples("train", 0).batch(held)
    noise = torch.Generator().manual_seed(derive_seed(5, 1))
    importances = {"conv": net.norm.weight.detach().abs(), "hidden": torch.zeros(8)}
    gates = {}
    for group, importance in importances.items():
        uniform = torch.rand(len(importance), generator=noise, dtype=torch.float64)
        uniform[importance.argmax()] = 0
        gates[group] = (uniform < compute_rates(importance, 0.8, 1.0)).float().requires_grad_()
    inner = net.norm(net.conv(x)).relu() * gates["conv"].view(-1, 1, 1)
    hidden = net.hidden(inner.flatten(1)).relu() * gates["hidden"]
    loss = nn.functional.cross_entropy(net.classifier(hidden), y)
    slopes = torch.autograd.grad(loss, list(gates.values()))
    expected = []
    for (_group, importance), slope in zip(importances.items(), slopes, strict=True):
        p = compute_rates(importance, 0.8, 1.0)
        spread = p * (1 - p)
        implicit = len(p) * float((slope.double() * spread).sum() / spread.sum())
        expected.append(0.8 - 0.05 * (implicit + 2 * 0.3 * 0.8))
    torch.testing.assert_close(kept[SHARES], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert update.metrics["share"] == pytest.approx(sum(expected) / 2, rel=1e-4)


def test_what_goes_back_are_the_most_important_channels_and_nothing_else(context, traced):
    _, structure = traced
    update, _ = done(context, recipe(keep_fraction=0.5, keep_lr=0.0))
    (subnet,), (tensors,) = update.subnets, update.params
    assert subnet.channels("conv").tolist() == [1, 2, 4]  # the largest |γ|, before and after
    assert structure.kept_count(subnet, "hidden") == 4
    assert tensors["conv.weight"].shape == (3, 1, 3, 3)
    assert tensors["hidden.weight"].shape == (4, 12)
    assert tensors["classifier.weight"].shape == (3, 4)
    assert (
        structure.kept_count(
            done(context, recipe(keep_fraction=0.51, keep_lr=0.0))[0].subnets[0], "conv"
        )
        == 4
    )


def test_shares_learn_from_validation_data_and_weights_from_the_rest(context, traced):
    net, structure = traced
    still = replace(SETTINGS, lr=1e-30)  # nothing moves
    data = context.examples("train", 0)

    def spoiled(rows):
        x, y = data.batch(torch.arange(30))
        x = x.clone()
        x[rows, :, 0] += 3.0  # not everywhere: normalisation would take that away
        return ClientContext(net, structure, {"train": {0: to_examples((x, y))}})

    held, rest = parted(30, 5)
    held_ones = ClientContext(net, structure, {"train": {0: data}})
    shares = {
        name: done(b, recipe(local_training=still, lr=0.0))[1][SHARES]
        for name, b in (("as is", held_ones), ("held", spoiled(held)), ("rest", spoiled(rest)))
    }
    assert torch.equal(shares["as is"], shares["rest"])
    assert not torch.equal(shares["as is"], shares["held"])
    weights = {
        name: done(b, recipe(keep_fraction=1.0, keep_lr=0.0))[0].params[0]["classifier.weight"]
        for name, b in (("as is", held_ones), ("held", spoiled(held)), ("rest", spoiled(rest)))
    }
    assert torch.equal(weights["as is"], weights["held"])
    assert not torch.equal(weights["as is"], weights["rest"])


@pytest.mark.parametrize("weight_step", ["top", "sampled"])
def test_with_all_shares_at_one_the_weights_are_those_of_plain_training(
    context, traced, weight_step
):
    net, structure = traced
    update, _ = done(context, recipe(keep_fraction=1.0, keep_lr=0.0, weight_step=weight_step))
    _, rest = parted(30, 5)
    data = context.examples("train", 0).select(rest.numpy())
    plain = fq.LocalSGD(SETTINGS, 0.1)
    task = Task(0, (fq.Subnet(),), named_tensors(net), plain, 5)
    # one batch of everything, so that the order of rows does not matter
    expected = plain.run(task, ClientContext(net, structure, {"train": {0: data}})).update.params[0]
    assert update.subnets == (fq.Subnet(),)
    for name, tensor in update.params[0].items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


def test_with_fixed_shares_the_top_channels_are_trained_as_a_subnet_of_them(context, traced):
    net, structure = traced
    fixed = recipe(groups=("conv",), keep_fraction=0.5, keep_lr=0.0)
    update, _ = done(context, fixed)
    top = fq.Subnet.from_channels({"conv": [1, 2, 4]})
    data = context.examples("train", 0).select(parted(30, 5)[1].numpy())
    task = Task(0, (top,), named_tensors(net), fq.LocalSGD(SETTINGS, 0.1), 5)
    expected = task.recipe.run(task, ClientContext(net, structure, {"train": {0: data}})).update
    assert update.subnets == expected.subnets == (top,)
    for name, tensor in update.params[0].items():
        torch.testing.assert_close(tensor, expected.params[0][name], rtol=1e-4, atol=1e-6)
    sampled, _ = done(context, replace(fixed, weight_step="sampled", softness=9.0))
    assert not sampled.params[0]["hidden.bias"].equal(update.params[0]["hidden.bias"])


def test_what_goes_back_is_what_was_trained_last_although_other_channels_matter_more_since(
    context, traced
):
    """Activations of the validation data choose the channels that are trained, and sent."""
    net, _ = traced
    fixed = recipe(groups=("hidden",), keep_fraction=0.25, keep_lr=0.0)
    top = {}
    for rows, name in zip(parted(30, 5), ("held", "rest"), strict=True):
        inner = net.norm(net.conv(context.examples("train", 0).batch(rows)[0])).relu().flatten(1)
        activity = net.hidden(inner).relu().mean(0)
        top[name] = sorted(activity.topk(2).indices.tolist())
    assert top["held"] != top["rest"]
    assert done(context, fixed)[0].subnets[0].channels("hidden").tolist() == top["held"]
    sampled, _ = done(context, replace(fixed, weight_step="sampled"))
    assert sampled.subnets[0].channels("hidden").tolist() == top["rest"]


def test_a_client_goes_on_from_its_own_shares_or_starts_anew(context):
    state = {SHARES: torch.tensor([0.4, 0.9]), "other": torch.ones(1)}
    context = context.for_client(state)
    update, kept = done(context, recipe(keep_lr=0.0))
    assert kept[SHARES].tolist() == pytest.approx([0.4, 0.9])
    assert kept["other"].equal(torch.ones(1))
    assert update.metrics["share"] == pytest.approx(0.65)
    update, kept = done(context, recipe(keep_lr=0.0, persistent=False))
    assert kept is None
    assert update.metrics["share"] == pytest.approx(0.8)


def test_clients_count_alike_or_by_their_examples(context):
    """Eq. 19, or Eq. 1; validation data are data too."""
    assert done(context, recipe())[0].weight == 1
    assert done(context, recipe(by_examples=True))[0].weight == 30


def test_shares_stay_within_their_limits(context):
    low = done(context, recipe(keep_lr=1.0, strength=50.0, min_fraction=0.25))[1][SHARES]
    assert low.tolist() == [0.25, 0.25]
    high = done(context, recipe(keep_lr=1.0, strength=-50.0))[1][SHARES]
    assert high.tolist() == [1.0, 1.0]


def test_the_weight_of_the_shares_follows_the_labels(context):
    data = context.examples("train", 0)
    assert recipe().penalty(data, 3) == pytest.approx(0.5)
    assert recipe(strength=0.2).penalty(data, 3) == 0.2
    skewed = data.select(np.array([0, 3, 6, 9, 1]))  # labels 0 0 0 0 1
    assert recipe().penalty(skewed, 3) == pytest.approx(0.5 + label_divergence(np.array([4, 1, 0])))


@pytest.mark.parametrize("weight_step", ["top", "sampled"])
@pytest.mark.parametrize("importance", ["slimming", "lrp"])
def test_the_same_seed_gives_the_same_bits_and_another_does_not(context, importance, weight_step):
    settings = recipe(importance=importance, weight_step=weight_step)
    one, two, other = (done(context, settings, seed=s)[0] for s in (5, 5, 6))
    assert one.subnets == two.subnets
    assert all(one.params[0][n].equal(two.params[0][n]) for n in one.params[0])
    assert one.metrics == two.metrics != other.metrics


def test_modules_are_left_without_gates(context):
    done(context, recipe())
    module = context.module(fq.Subnet(), named_tensors(context.model))
    assert not any(layer._forward_pre_hooks for layer in list(module.modules())[1:])


def test_relevance_finds_the_channels_that_matter_where_scales_and_activations_do_not(traced):
    net, structure = copy.deepcopy(traced[0]), traced[1]
    with torch.no_grad():  # the widest scales and the largest activations lead nowhere
        net.hidden.weight.view(8, 6, 4)[:, [1, 2]] = 0
        net.hidden.bias[:4] = 10
        net.hidden.weight[4:].abs_()
        net.classifier.weight.abs_()[:, :4] = 0
    y = torch.arange(30) % 3
    x = torch.randn(30, 1, 4, 4, generator=torch.Generator().manual_seed(1)) + y.view(-1, 1, 1, 1)
    context = ClientContext(net, structure, {"train": {0: to_examples((x, y))}})
    still = replace(SETTINGS, lr=1e-30)  # nothing moves
    chosen = {
        word: done(
            context,
            recipe(local_training=still, lr=0.0, keep_fraction=0.5, keep_lr=0.0, importance=word),
        )[0].subnets[0]
        for word in ("slimming", "lrp")
    }
    assert chosen["slimming"].channels("conv").tolist() == [1, 2, 4]
    assert chosen["slimming"].channels("hidden").tolist() == [0, 1, 2, 3]
    assert not {1, 2} & set(chosen["lrp"].channels("conv").tolist())
    assert chosen["lrp"].channels("hidden").tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("weight_step", "passes"), [("top", 2), ("sampled", 3)])
def test_relevance_is_that_of_validation_data_before_every_epoch_and_where_channels_are_chosen(
    context, monkeypatch, weight_step, passes
):
    seen, real = [], bilevel.compute_relevance

    def watched(module, structure, groups, x, y):
        seen.append((x, real(module, structure, groups, x, y)))
        return seen[-1][1]

    monkeypatch.setattr(bilevel, "compute_relevance", watched)
    twice = replace(SETTINGS, epochs=2)
    fixed = recipe(local_training=twice, keep_fraction=0.5, keep_lr=0.0, importance="lrp")
    update, _ = done(context, replace(fixed, weight_step=weight_step))
    expected, _ = context.examples("train", 0).batch(parted(30, 5)[0])
    assert len(seen) == passes
    assert all(x.equal(expected) for x, _ in seen)
    assert not seen[0][1]["conv"].equal(seen[-1][1]["conv"])
    for group, count in (("conv", 3), ("hidden", 4)):
        best = seen[-1][1][group].topk(count).indices.sort().values
        assert update.subnets[0].channels(group).tolist() == best.tolist()


def test_relevance_is_in_means_of_its_group(context, monkeypatch):
    """So that the softness is to it what it is to scales of normalisation."""
    drawn, real = [], bilevel.sample_gates

    def watched(share, importance, softness, noise):
        drawn.append(importance)
        return real(share, importance, softness, noise)

    monkeypatch.setattr(bilevel, "sample_gates", watched)
    done(context, recipe(importance="lrp", weight_step="sampled"))
    assert [len(b) for b in drawn] == [6, 8] * 2
    for importance in drawn:
        assert float(importance.mean()) == pytest.approx(1.0, rel=1e-5)
        assert float(importance.std()) > 0.1


def test_words_that_are_not_known_are_refused():
    with pytest.raises(ConfigError, match="importance 'magnitude' is not known; choose one of: "):
        recipe(importance="magnitude")
    with pytest.raises(ConfigError, match="weight step 'once' is not known; choose one of: "):
        recipe(weight_step="once")


@pytest.mark.parametrize("importance", ["slimming", "lrp"])
def test_a_client_with_one_example_trains_on_it(traced, importance):
    net, structure = traced
    data = to_examples((torch.rand(1, 1, 4, 4), torch.tensor([2])))
    context = ClientContext(net, structure, {"train": {0: data}})
    update, _ = done(context, recipe(importance=importance))
    assert update.metrics["examples"] == 1


def test_a_client_whose_training_diverged_says_so(context):
    with pytest.raises(TrainingError, match="not finite any more"):
        done(context, recipe(lr=1e30, local_training=replace(SETTINGS, batch_size=5)))
