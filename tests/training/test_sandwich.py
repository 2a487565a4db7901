"""Universally slimmable training, against autograd on slices of the whole net."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.data import to_examples
from fedquilt.data.pipeline import get_augmentation
from fedquilt.data.transformed import transform_examples
from fedquilt.federation.client import Task, derive_seed
from fedquilt.federation.update import validate_update
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import STATISTICS, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.sandwich import Sandwich
from fedquilt.training.settings import LocalTraining
from fedquilt.training.tracking import without_running_stats

FIRST, SECOND = 6, 10  # channels of the net
HOME = (STATISTICS, "*num_batches_tracked")
SENT = (Subnet().excluding(*HOME),)
PLAIN = LocalTraining(momentum=0, weight_decay=0, epochs=1, batch_size=14, max_grad_norm=None)
SETTINGS = {
    "one step": PLAIN,
    "one step with decay": replace(PLAIN, momentum=0.9, weight_decay=0.05),
    "many steps": replace(PLAIN, epochs=2, batch_size=5),
    "momentum": replace(PLAIN, momentum=0.9, weight_decay=0.01, epochs=2, batch_size=5),
    "clipped": replace(PLAIN, momentum=0.9, epochs=2, batch_size=5, max_grad_norm=0.05),
}
SANDWICHES = {
    "smallest alone": {"nets": 2, "smallest": 0.3},
    "one between": {"nets": 3, "smallest": 0.25},
    "several between": {"nets": 5, "smallest": 0.1},
    "drawn for each batch": {"nets": 4, "smallest": 0.2, "redraw": "batch"},
    "a width for each group": {"nets": 4, "smallest": 0.2, "by_group": True},
    "a group that stays whole": {"nets": 4, "smallest": 0.2, "whole": ("second",)},
    "each group, one whole": {"nets": 4, "smallest": 0.2, "by_group": True, "whole": ("first",)},
}


def normalised(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """By the batch itself, with the leading weights."""
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    weight, bias = (p[f"{name}.{n}"][: x.shape[1]].view(1, -1, 1, 1) for n in ("weight", "bias"))
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def logits(p: dict[str, Tensor], counts: tuple[int, int], x: Tensor) -> Tensor:
    """The net with its leading channels, as slices of whole tensors."""
    a, b = counts
    x = F.conv2d(x, p["first.weight"][:a], p["first.bias"][:a], padding=1)
    x = normalised(p, "norm", x).relu()
    x = normalised(p, "norm2", F.conv2d(x, p["second.weight"][:b, :a], padding=1)).relu()
    return F.linear(x.mean((2, 3)), p["classifier.weight"][:, :b], p["classifier.bias"])


def counts_below(recipe: Sandwich, draws: torch.Generator) -> list[tuple[int, int]]:
    """Channels of the nets below the whole one: the smallest, then those that are drawn."""
    free = [name for name in ("first", "second") if name not in recipe.whole]
    drawn = [dict.fromkeys(free, recipe.smallest)]
    for _ in range(recipe.nets - 2):
        count = len(free) if recipe.by_group else 1
        shares = torch.rand(count, generator=draws, dtype=torch.float64).tolist()
        widths = [recipe.smallest + (1 - recipe.smallest) * share for share in shares]
        widths = widths if recipe.by_group else widths * len(free)
        drawn.append(dict(zip(free, widths, strict=True)))
    return [
        (math.ceil(FIRST * w.get("first", 1.0)), math.ceil(SECOND * w.get("second", 1.0)))
        for w in drawn
    ]


def by_hand(params, recipe, data, seed):
    """Algorithm 2 over whole tensors; also the whole net's mean loss in the last epoch."""
    p = {n: t.clone().requires_grad_() for n, t in params.items()}
    speed = {n: torch.zeros_like(t) for n, t in p.items()}
    generator = torch.Generator().manual_seed(seed)
    draws = torch.Generator().manual_seed(derive_seed(seed, 1))
    settings, losses = recipe.local_training, []
    for _ in range(settings.epochs):
        losses, narrower = [], counts_below(recipe, draws) if recipe.redraw == "epoch" else []
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch_size):
            x, y = data.inputs[rows], data.labels[rows]
            answers = logits(p, (FIRST, SECOND), x)
            loss = F.cross_entropy(answers, y)
            soft = answers.detach().softmax(1)
            total = loss
            for counts in narrower or counts_below(recipe, draws):
                total = total - (soft * logits(p, counts, x).log_softmax(1)).sum(1).mean()
            found = dict(zip(p, torch.autograd.grad(total, list(p.values())), strict=True))
            length = torch.cat([g.flatten() for g in found.values()]).norm().item()
            short = (
                1.0 if settings.max_grad_norm is None else min(1.0, settings.max_grad_norm / length)
            )
            with torch.no_grad():
                for n, g in found.items():
                    speed[n] = settings.momentum * speed[n] + short * g
                    speed[n] += settings.weight_decay * p[n]
                    p[n] -= recipe.lr * speed[n]
            losses.append(loss.item() * len(rows))
    return {n: t.detach() for n, t in p.items()}, sum(losses) / len(data)


@pytest.fixture
def weights(net, params) -> dict[str, Tensor]:
    """What travels: no statistics."""
    return {n: params[n] for n, _ in net.named_parameters()}


def assert_close(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("sandwich", SANDWICHES)
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_whole_learns_from_labels_and_the_others_from_its_answers(
    context, data, weights, kind, sandwich
):
    recipe = Sandwich(SETTINGS[kind], lr=0.2, weight=7.0, **SANDWICHES[sandwich])
    update = recipe.run(Task(0, SENT, weights, recipe, 11), context).update
    expected, loss = by_hand(weights, recipe, data["train"][0], 11)
    assert_close(update.params[0], expected)
    assert update.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert (update.client, update.weight, update.metrics["examples"]) == (0, 7.0, 14)


def test_a_sandwich_of_whole_nets_is_plain_training(context, weights, params):
    """Nobody learns from answers that are his own."""
    settings = SETTINGS["momentum"]
    recipe = Sandwich(settings, lr=0.2, nets=4, smallest=1.0)
    plain = LocalSGD(settings, lr=0.2, local_params=HOME)
    found = recipe.run(Task(0, SENT, weights, recipe, 3), context).update
    expected = plain.run(Task(0, SENT, params, plain, 3), context).update
    assert_close(found.params[0], expected.params[0])
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4)


def drawn(recipe: Sandwich, structure: Structure, seed: int) -> list[dict[str, int]]:
    found = recipe.draw_subnets(structure, torch.Generator().manual_seed(seed))
    return [
        {g: structure.kept_count(subnet, g) for g in structure.cut_groups()} for subnet in found
    ]


@given(
    nets=st.integers(2, 6),
    percent=st.integers(1, 100),
    by_group=st.booleans(),
    whole=st.sets(st.sampled_from(["first", "second"])),
    seed=st.integers(0, 1000),
)
def test_drawn_nets_lie_between_the_smallest_and_the_whole(
    structure, nets, percent, by_group, whole, seed
):
    smallest = percent / 100
    recipe = Sandwich(PLAIN, 0.1, nets, smallest, by_group, tuple(whole))
    sizes = {"first": FIRST, "second": SECOND}
    least = {g: n if g in whole else -(-n * percent // 100) for g, n in sizes.items()}
    found = drawn(recipe, structure, seed)
    assert found[0] == least
    assert len(found) == nets - 1
    assert all(least[g] <= counts[g] <= n for counts in found for g, n in sizes.items())
    if not by_group and not whole:  # one width explains both
        for counts in found[1:]:
            at_least = max((k - 1) / sizes[g] for g, k in counts.items())
            assert at_least < min(k / sizes[g] for g, k in counts.items())
    assert found == drawn(recipe, structure, seed)


@pytest.mark.parametrize("by_group", [True, False])
def test_all_widths_are_drawn_and_groups_differ_only_if_asked(structure, by_group):
    found = drawn(Sandwich(PLAIN, 0.1, 400, 0.25, by_group), structure, 0)[1:]
    assert {counts["first"] for counts in found} == set(range(2, FIRST + 1))
    assert {counts["second"] for counts in found} == set(range(3, SECOND + 1))
    pairs = {(counts["first"], counts["second"]) for counts in found}
    assert ((2, SECOND) in pairs) == ((FIRST, 3) in pairs) == by_group


def test_statistics_neither_travel_nor_matter(structure, fresh_bench, params, weights):
    recipe = Sandwich(SETTINGS["momentum"], lr=0.2)
    odd = {n: t + 7 if n in structure.statistics else t for n, t in params.items()}
    found = [
        recipe.run(Task(0, SENT, given, recipe, 5), fresh_bench()).update.params[0]
        for given in (weights, params, odd)
    ]
    assert all(set(part) == set(weights) for part in found)
    assert all(part[n].equal(t) for part in found for n, t in found[0].items())


def test_the_update_is_accepted(structure, context, params):
    recipe = Sandwich(PLAIN, lr=0.2)
    update = recipe.run(Task(0, SENT, params, recipe, 5), context).update
    assert update.subnets == SENT
    assert validate_update(update, structure, params) is update


@pytest.mark.parametrize("by_group", [True, False])
def test_the_same_seed_gives_the_same_bits_and_another_does_not(fresh_bench, weights, by_group):
    recipe = Sandwich(PLAIN, lr=0.2, by_group=by_group)  # one batch: only the widths are drawn
    one, same, other = (
        recipe.run(Task(0, SENT, weights, recipe, seed), fresh_bench()).update for seed in (5, 5, 6)
    )
    assert all(t.equal(same.params[0][n]) for n, t in one.params[0].items())
    assert one.metrics == same.metrics
    assert not all(t.allclose(other.params[0][n]) for n, t in one.params[0].items())


class Watched:
    """A client's data that remembers which rows were asked for."""

    def __init__(self, examples) -> None:
        self.examples, self.asked = examples, []

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows, generator=None):
        found = self.examples.batch(rows, generator)
        self.asked.append((rows.tolist(), found[0]))
        return found


@pytest.mark.parametrize("nets", [2, 5])
def test_batches_are_those_of_other_recipes(net, structure, params, nets):
    """Whatever is drawn besides; augmentation too."""
    images = to_examples((torch.rand(14, 1, 5, 5), torch.arange(14) % 4))
    images = transform_examples(images, get_augmentation("crop-flip"))
    settings, asked = SETTINGS["momentum"], []
    for recipe in (Sandwich(settings, 0.1, nets), LocalSGD(settings, 0.1, local_params=HOME)):
        watched = Watched(images)
        context = ClientContext(net, structure, {"train": {0: watched}})
        recipe.run(Task(0, SENT, params, recipe, 9), context)
        asked.append(watched.asked)
    assert [rows for rows, _ in asked[0]] == [rows for rows, _ in asked[1]]
    assert all(a.equal(b) for (_, a), (_, b) in zip(*asked, strict=True))


def test_nothing_given_is_changed(net, context, params):
    before = {n: t.clone() for n, t in params.items()}
    own = {n: t.clone() for n, t in net.state_dict().items()}
    recipe = Sandwich(SETTINGS["momentum"], lr=0.2)
    update = recipe.run(Task(0, SENT, params, recipe, 5), context).update
    assert all(t.equal(before[n]) and not t.requires_grad for n, t in params.items())
    assert all(t.equal(own[n]) for n, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not any(t.requires_grad for t in update.params[0].values())
    assert not any(t.equal(params[n]) for n, t in update.params[0].items())


def test_frozen_weights_stay(net, structure, data, weights):
    frozen = copy.deepcopy(net)
    frozen.second.weight.requires_grad_(False)
    recipe = Sandwich(SETTINGS["momentum"], lr=0.2)
    context = ClientContext(frozen, structure, data)
    found = recipe.run(Task(0, SENT, weights, recipe, 5), context).update.params[0]
    assert [n for n, t in found.items() if t.equal(weights[n])] == ["second.weight"]


def test_progress_rises_to_one(context, weights):
    told: list[float] = []
    recipe = Sandwich(replace(PLAIN, epochs=3, batch_size=5), lr=0.1)
    recipe.run(Task(0, SENT, weights, recipe, 5), context.for_client(on_progress=told.append))
    assert told == pytest.approx([n / 42 for n in (5, 10, 14, 19, 24, 28, 33, 38, 42)])


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 8, bias=False)
        self.c, self.d = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).relu()).relu()))


def test_tied_weights_get_the_sum_of_their_gradients():
    torch.manual_seed(0)
    net = Tied()
    structure = trace_structure(net, torch.zeros(2, 3))
    x, y = torch.randn(6, 3), torch.arange(6) % 4
    context = ClientContext(net, structure, {"train": {0: to_examples((x, y))}})
    params = {n: t.detach() for n, t in net.named_parameters()}
    recipe = Sandwich(replace(PLAIN, batch_size=6, epochs=2), lr=0.5, nets=2, smallest=0.5)
    update = recipe.run(Task(0, (Subnet(),), params, recipe, 0), context).update
    p = {n: t.clone().requires_grad_() for n, t in params.items()}

    def answers(k: int) -> Tensor:
        h = F.linear(x, p["a.weight"][:k], p["a.bias"][:k]).relu()
        h = F.linear(F.linear(h, p["b.weight"][:k, :k]).relu(), p["b.weight"][:k, :k])
        return F.linear(h, p["d.weight"][:, :k], p["d.bias"])

    for _ in range(2):
        whole = answers(8)
        soft = whole.detach().softmax(1)
        loss = F.cross_entropy(whole, y) + F.cross_entropy(answers(4), soft)
        with torch.no_grad():
            for w, g in zip(p.values(), torch.autograd.grad(loss, list(p.values())), strict=True):
                w -= 0.5 * g
    assert_close(update.params[0], {n: t.detach() for n, t in p.items()})


def test_the_oracle_computes_what_the_net_does(net, data, weights):
    bare = without_running_stats(net).train()
    x = data["train"][0].inputs
    expected = torch.func.functional_call(bare, weights, (x,))
    torch.testing.assert_close(logits(weights, (FIRST, SECOND), x), expected)
