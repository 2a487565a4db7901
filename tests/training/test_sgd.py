"""Local training, against a loop written by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.federation.client import Task
from fedquilt.structure.cut import build, take
from fedquilt.structure.subnet import Subnet
from fedquilt.training.losses import cross_entropy, label_mask, masked
from fedquilt.training.sgd import SGD, Descent, Optimiser, batches
from fedquilt.training.statistics import Statistics

SETTINGS = {
    "plain": (Optimiser(momentum=0, weight_decay=0, epochs=1, batch_size=4, clip=None), False),
    "momentum": (Optimiser(momentum=0.9, weight_decay=0, epochs=2, batch_size=4, clip=None), False),
    "decay": (Optimiser(momentum=0, weight_decay=0.1, epochs=2, batch_size=4, clip=None), False),
    "clipped": (Optimiser(momentum=0, weight_decay=0, epochs=2, batch_size=4, clip=0.05), False),
    "masked": (Optimiser(momentum=0, weight_decay=0, epochs=2, batch_size=4, clip=None), True),
    "all": (Optimiser(momentum=0.9, weight_decay=5e-4, epochs=3, batch_size=5, clip=0.5), True),
}


def by_hand(
    net: nn.Module, x: Tensor, y: Tensor, settings: Optimiser, lr: float, own: list[int], seed: int
) -> list[float]:
    """SGD as the books write it; the loss of every batch of the last epoch, times its size."""
    generator = torch.Generator().manual_seed(seed)
    speed = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    losses: list[float] = []
    for _ in range(settings.epochs):
        losses = []
        order = torch.randperm(len(y), generator=generator)
        for start in range(0, len(y), settings.batch_size):
            rows = order[start : start + settings.batch_size]
            logits = net.train()(x[rows])
            if own:
                mask = torch.zeros(logits.shape[1])
                mask[own] = 1
                logits = logits * mask
            loss = -F.log_softmax(logits, 1)[range(len(rows)), y[rows]].mean()
            grads = torch.autograd.grad(loss, list(net.parameters()))
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
            scale = 1.0 if settings.clip is None else min(1.0, settings.clip / norm)
            with torch.no_grad():
                for (name, p), g in zip(net.named_parameters(), grads, strict=True):
                    step = scale * g + settings.weight_decay * p
                    speed[name] = settings.momentum * speed[name] + step
                    p -= lr * speed[name]
            losses.append(loss.item() * len(rows))
    return losses


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("width", [1.0, 0.5])
def test_the_recipe_is_sgd_as_the_books_write_it(net, structure, bench, data, params, kind, width):
    settings, is_masked = SETTINGS[kind]
    subnet = structure.subnet(width)
    recipe = SGD(settings, lr=0.1, labels=(1, 3), masked=is_masked)
    update = recipe.run(Task(1, (subnet,), params, recipe, seed=11), bench)
    expected = build(net, structure, subnet, params)
    examples = data["train"][1]
    own = [1, 3] if is_masked else []
    x, y = examples.batch(torch.arange(len(examples)))
    losses = by_hand(expected, x, y, settings, 0.1, own, seed=11)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(update.params[0][name], tensor, rtol=1e-4, atol=1e-5)
    assert update.metrics["loss"] == pytest.approx(sum(losses) / len(examples), rel=1e-4)
    assert update.metrics["examples"] == 14


def test_masked_cross_entropy_puts_zeros_in_place_of_foreign_logits():
    logits = torch.tensor([[2.0, -1.0, 5.0], [0.5, 3.0, -2.0]])
    foreign = label_mask((0, 1), 3)
    by_hand = [
        math.log(math.exp(2) + math.exp(-1) + 1) - 2,
        math.log(math.exp(0.5) + math.exp(3) + 1) - 3,
    ]
    found = cross_entropy(logits, torch.tensor([0, 1]), foreign)
    assert found.item() == pytest.approx(sum(by_hand) / 2)
    assert masked(logits, foreign)[:, 2].tolist() == [0.0, 0.0]


def test_foreign_classes_get_no_gradient():
    logits = torch.randn(3, 4, requires_grad=True)
    cross_entropy(logits, torch.tensor([1, 3, 1]), label_mask((1, 3), 4)).backward()
    assert logits.grad[:, [0, 2]].eq(0).all()
    assert logits.grad[:, [1, 3]].ne(0).all()


def test_labels_may_have_as_many_axes_as_the_logits_but_one():
    logits, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = sum(cross_entropy(logits[i, j : j + 1], labels[i, j : j + 1])
                   for i in range(2) for j in range(3)) / 6  # fmt: skip
    torch.testing.assert_close(cross_entropy(logits, labels), expected)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 9))
def test_batches_cover_everything_once_but_a_single_leftover(count, size, seed):
    generator = torch.Generator().manual_seed(seed)
    found = list(batches(count, size, generator))
    rows = torch.cat(found).tolist()
    single_left = size > 1 and count > 1 and count % size == 1
    assert len(set(rows)) == len(rows) == count - single_left
    assert all(len(b) == size for b in found[:-1])
    again = list(batches(count, size, torch.Generator().manual_seed(seed)))
    assert all(a.equal(b) for a, b in zip(found, again, strict=True))
    assert torch.cat(list(batches(count, size, None))).tolist() == list(range(count))


def test_another_epoch_brings_other_batches():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.cat(list(batches(50, 7, generator))) for _ in range(2))
    assert not one.equal(other)


def test_the_learning_rate_falls_at_each_milestone():
    settings = Optimiser(lr=0.1, milestones=(150, 250), decay=0.1)
    assert [settings.rate(r) for r in (0, 149)] == [0.1, 0.1]
    assert [settings.rate(r) for r in (150, 249)] == pytest.approx([0.01, 0.01])
    assert settings.rate(250) == pytest.approx(0.001)


def test_only_the_rows_of_own_classes_come_back(structure, bench, params):
    recipe = SGD(Optimiser(epochs=1), lr=0.1, labels=(1, 3), masked=True, own_rows=True)
    update = recipe.run(Task(1, (structure.subnet(0.5),), params, recipe, 0), bench)
    whole = SGD(Optimiser(epochs=1), lr=0.1, labels=(1, 3), masked=True)
    all_rows = whole.run(Task(1, (structure.subnet(0.5),), params, whole, 0), bench)
    for name, tensor in update.params[0].items():
        expected = all_rows.params[0][name]
        assert tensor.equal(expected[[1, 3]] if name.startswith("classifier") else expected), name


def test_frozen_parameters_are_not_trained(net, structure, data, params):
    import copy

    from fedquilt.training.recipe import Workbench

    frozen = copy.deepcopy(net)
    frozen.first.weight.requires_grad_(False)
    recipe = SGD(Optimiser(epochs=1), lr=0.1)
    bench = Workbench(frozen, structure, data)
    update = recipe.run(Task(0, (structure.subnet(0.5),), params, recipe, 0), bench)
    kept = take(params, structure, structure.subnet(0.5))
    assert update.params[0]["first.weight"].equal(kept["first.weight"])
    assert not update.params[0]["first.bias"].equal(kept["first.bias"])


def test_work_on_a_bench_leaves_no_trace_in_later_work(structure, fresh_bench, params):
    subnet = structure.subnet(0.5)
    recipe = SGD(Optimiser(epochs=1), lr=0.1, scale=True)
    task = Task(0, (subnet.leaving(":statistics"),), params, recipe, 3)
    expected = recipe.run(task, fresh_bench())
    used = fresh_bench()
    noise = {n: t * 3 + 1 for n, t in params.items()}
    for other in (recipe, Statistics(4), SGD(Optimiser(epochs=1), lr=1.0, home=("first.*",))):
        other.run(Task(2, (subnet,), noise, other, 8), used)
    found = recipe.run(task, used)
    assert all(found.params[0][n].equal(t) for n, t in expected.params[0].items())
    assert found.metrics == expected.metrics


def test_what_comes_back_is_the_benchs_no_more(structure, bench, params):
    recipe = SGD(Optimiser(epochs=1), lr=0.1)
    first = recipe.run(Task(0, (Subnet(),), params, recipe, 3), bench)
    before = {n: t.clone() for n, t in first.params[0].items()}
    recipe.run(Task(1, (Subnet(),), params, recipe, 4), bench)
    assert all(t.equal(before[n]) for n, t in first.params[0].items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_descent_makes_the_steps_of_torch_sgd(momentum, weight_decay, clip):
    torch.manual_seed(0)
    ours = nn.ParameterList([torch.randn(4, 3), torch.randn(4), torch.randn(2)])
    theirs = copy.deepcopy(ours)
    settings = Optimiser(momentum=momentum, weight_decay=weight_decay, clip=clip)
    descent = Descent(ours, settings, lr=0.1)
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for step in range(4):
        x = torch.randn(5, 3)

        def loss(weights, x=x, step=step):
            # the two bias terms share one gradient tensor; the last weight is used late
            found = (x @ weights[0].T + weights[1] + weights[1]).square().mean()
            return found + weights[2].sum() if step > 1 else found

        descent.step(loss(ours))
        sgd.zero_grad()
        loss(theirs).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs, clip)
        sgd.step()
        torch.testing.assert_close(list(ours), list(theirs), rtol=1e-5, atol=1e-6)
