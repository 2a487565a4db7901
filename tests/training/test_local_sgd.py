"""Local training, against a loop written by hand."""

from __future__ import annotations

import copy
import math
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.federation.client import Task
from fedquilt.learning.losses import cross_entropy, label_mask, mask_logits
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining
from fedquilt.training.statistics import QueryStatistics

SETTINGS = {
    "plain": (
        LocalTraining(momentum=0, weight_decay=0, epochs=1, batch_size=4, max_grad_norm=None),
        False,
    ),
    "momentum": (
        LocalTraining(momentum=0.9, weight_decay=0, epochs=2, batch_size=4, max_grad_norm=None),
        False,
    ),
    "decay": (
        LocalTraining(momentum=0, weight_decay=0.1, epochs=2, batch_size=4, max_grad_norm=None),
        False,
    ),
    "clipped": (
        LocalTraining(momentum=0, weight_decay=0, epochs=2, batch_size=4, max_grad_norm=0.05),
        False,
    ),
    "masked": (
        LocalTraining(momentum=0, weight_decay=0, epochs=2, batch_size=4, max_grad_norm=None),
        True,
    ),
    "masked-by-batch": (
        LocalTraining(momentum=0, weight_decay=0, epochs=2, batch_size=3, max_grad_norm=None),
        "batch",
    ),
    "all": (
        LocalTraining(momentum=0.9, weight_decay=5e-4, epochs=3, batch_size=5, max_grad_norm=0.5),
        True,
    ),
}


def by_hand(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    settings: LocalTraining,
    lr: float,
    own: list[int] | Literal["batch"],
    seed: int,
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
                mask[y[rows] if own == "batch" else own] = 1
                logits = logits * mask
            loss = -F.log_softmax(logits, 1)[range(len(rows)), y[rows]].mean()
            grads = torch.autograd.grad(loss, list(net.parameters()))
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
            scale = (
                1.0 if settings.max_grad_norm is None else min(1.0, settings.max_grad_norm / norm)
            )
            with torch.no_grad():
                for (name, p), g in zip(net.named_parameters(), grads, strict=True):
                    step = scale * g + settings.weight_decay * p
                    speed[name] = settings.momentum * speed[name] + step
                    p -= lr * speed[name]
            losses.append(loss.item() * len(rows))
    return losses


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("width", [1.0, 0.5])
def test_the_recipe_is_sgd_as_the_books_write_it(
    net, structure, context, data, params, kind, width
):
    settings, masked = SETTINGS[kind]
    subnet = structure.subnet(width)
    recipe = LocalSGD(settings, lr=0.1, labels=(1, 3), masked=masked)
    update = recipe.run(Task(1, (subnet,), params, recipe, seed=11), context).update
    expected = build_module(net, structure, subnet, params)
    examples = data["train"][1]
    own = masked if masked == "batch" else [1, 3] if masked else []
    x, y = examples.batch(torch.arange(len(examples)))
    losses = by_hand(expected, x, y, settings, 0.1, own, seed=11)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(update.params[0][name], tensor, rtol=1e-4, atol=1e-5)
    assert update.metrics["loss"] == pytest.approx(sum(losses) / len(examples), rel=1e-4)
    assert update.metrics["examples"] == 14


def test_masked_cross_entropy_puts_zeros_in_place_of_foreign_logits():
    logits = torch.tensor([[2.0, -1.0, 5.0], [0.5, 3.0, -2.0]])
    by_hand = [
        math.log(math.exp(2) + math.exp(-1) + 1) - 2,
        math.log(math.exp(0.5) + math.exp(3) + 1) - 3,
    ]
    found = cross_entropy(logits, torch.tensor([0, 1]), (0, 1))
    assert found.item() == pytest.approx(sum(by_hand) / 2)
    assert mask_logits(logits, label_mask((0, 1), 3))[:, 2].tolist() == [0.0, 0.0]


def test_foreign_classes_get_no_gradient():
    logits = torch.randn(3, 4, requires_grad=True)
    cross_entropy(logits, torch.tensor([1, 3, 1]), (1, 3)).backward()
    assert logits.grad[:, [0, 2]].eq(0).all()
    assert logits.grad[:, [1, 3]].ne(0).all()


def test_classes_that_were_first_asked_for_in_evaluation_can_be_trained():
    labels = (0, 5, 7)  # in no other test: masks are kept
    with torch.inference_mode():
        cross_entropy(torch.zeros(1, 9), torch.tensor([5]), labels)
    logits = torch.zeros(1, 9, requires_grad=True)
    cross_entropy(logits, torch.tensor([5]), labels).backward()
    assert logits.grad is not None


def test_labels_may_have_as_many_axes_as_the_logits_but_one():
    logits, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = sum(cross_entropy(logits[i, j : j + 1], labels[i, j : j + 1])
                   for i in range(2) for j in range(3)) / 6  # fmt: skip
    torch.testing.assert_close(cross_entropy(logits, labels), expected)


def test_only_the_rows_of_own_classes_come_back(structure, context, params):
    recipe = LocalSGD(LocalTraining(epochs=1), lr=0.1, labels=(1, 3), masked=True, own_rows=True)
    update = recipe.run(Task(1, (structure.subnet(0.5),), params, recipe, 0), context).update
    whole = LocalSGD(LocalTraining(epochs=1), lr=0.1, labels=(1, 3), masked=True)
    all_rows = whole.run(Task(1, (structure.subnet(0.5),), params, whole, 0), context).update
    for name, tensor in update.params[0].items():
        expected = all_rows.params[0][name]
        assert tensor.equal(expected[[1, 3]] if name.startswith("classifier") else expected), name


def test_frozen_parameters_are_not_trained(net, structure, data, params):
    frozen = copy.deepcopy(net)
    frozen.first.weight.requires_grad_(False)
    recipe = LocalSGD(LocalTraining(epochs=1), lr=0.1)
    context = ClientContext(frozen, structure, data)
    update = recipe.run(Task(0, (structure.subnet(0.5),), params, recipe, 0), context).update
    kept = copy_subnet_tensors(params, structure, structure.subnet(0.5))
    assert update.params[0]["first.weight"].equal(kept["first.weight"])
    assert not update.params[0]["first.bias"].equal(kept["first.bias"])


def test_work_on_a_bench_leaves_no_trace_in_later_work(structure, fresh_bench, params):
    subnet = structure.subnet(0.5)
    recipe = LocalSGD(LocalTraining(epochs=1), lr=0.1, scale=True)
    task = Task(0, (subnet.excluding(":statistics"),), params, recipe, 3)
    expected = recipe.run(task, fresh_bench()).update
    used = fresh_bench()
    noise = {n: t * 3 + 1 for n, t in params.items()}
    for other in (
        recipe,
        QueryStatistics(4),
        LocalSGD(LocalTraining(epochs=1), lr=1.0, local_params=("first.*",)),
    ):
        other.run(Task(2, (subnet,), noise, other, 8), used)
    found = recipe.run(task, used).update
    assert all(found.params[0][n].equal(t) for n, t in expected.params[0].items())
    assert found.metrics == expected.metrics


def test_what_comes_back_is_the_benchs_no_more(structure, context, params):
    recipe = LocalSGD(LocalTraining(epochs=1), lr=0.1)
    first = recipe.run(Task(0, (Subnet(),), params, recipe, 3), context).update
    before = {n: t.clone() for n, t in first.params[0].items()}
    recipe.run(Task(1, (Subnet(),), params, recipe, 4), context)
    assert all(t.equal(before[n]) for n, t in first.params[0].items())


SEVERAL = [Subnet().with_private(str(i), "*") for i in range(3)]


def apart(params):
    """Three owners whose tensors are their own, all different."""
    return {
        f"{n}@{i}": t * (1 + 0.3 * i) if t.is_floating_point() else t
        for i in range(3)
        for n, t in params.items()
    }


@pytest.mark.parametrize("kind", SETTINGS)
def test_several_subnets_are_trained_each_on_its_own_loss_and_the_same_batches(
    structure, fresh_bench, params, kind
):
    settings, masked = SETTINGS[kind]
    recipe = LocalSGD(settings, lr=0.1, labels=(1, 3), masked=masked, scale=True)
    given = apart(params)
    update = recipe.run(Task(1, tuple(SEVERAL), given, recipe, 11), fresh_bench()).update
    alone = [recipe.run(Task(1, (s,), given, recipe, 11), fresh_bench()).update for s in SEVERAL]
    assert update.subnets == tuple(SEVERAL)
    for part, (one,) in zip(update.params, (u.params for u in alone), strict=True):
        assert part.keys() == one.keys()
        assert all(t.equal(one[n]) for n, t in part.items())
    mean = sum(u.metrics["loss"] for u in alone) / 3
    assert update.metrics["loss"] == pytest.approx(mean, rel=1e-5)


def test_subnets_of_different_widths_can_be_trained_side_by_side(structure, fresh_bench, params):
    recipe = LocalSGD(LocalTraining(epochs=1, batch_size=4), lr=0.1)
    subnets = tuple(structure.subnet(w) for w in (0.5, 1.0, 0.5, 0.3))
    update = recipe.run(Task(0, subnets, params, recipe, 2), fresh_bench()).update
    for subnet, part in zip(subnets, update.params, strict=True):
        alone = recipe.run(Task(0, (subnet,), params, recipe, 2), fresh_bench()).update
        assert all(t.equal(part[n]) for n, t in alone.params[0].items())


def test_each_of_several_subnets_keeps_what_stays_at_home(structure, fresh_bench, params):
    home = (":statistics",)
    recipe = LocalSGD(LocalTraining(epochs=1, batch_size=4), lr=0.1, local_params=home)
    before = {"norm.running_mean@7": torch.ones(6)}  # of one that is not trained now
    task = Task(0, tuple(SEVERAL[:2]), apart(params), recipe, 2)
    result = recipe.run(task, fresh_bench().for_client(before))
    state = result.state
    assert not any(set(part) & structure.statistics for part in result.update.params)
    own = {f"{n}@{i}" for n in structure.statistics for i in (0, 1)}
    assert set(state) == own | {"norm.running_mean@7"}
    zeros = torch.zeros(6)  # the model's own first values, not what travelled
    assert not state["norm.running_mean@0"].equal(zeros)
    assert not state["norm.running_mean@0"].equal(state["norm.running_mean@1"])
