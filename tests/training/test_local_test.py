"""Clients' own models on their own test data, against nets built and asked by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.federation.client import ClientResult, Task, Update
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.structure.structure import STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training import local_test
from fedquilt.training.bilevel import Bilevel
from fedquilt.training.context import ClientContext
from fedquilt.training.feddyn import FedDynTraining
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.local_test import RIGHT, TESTED
from fedquilt.training.slimmable import Slimmable

STEPS = fq.LocalTraining(lr=0.05, epochs=12, batch_size=10)
COUNT = 97  # examples that each client tests on: enough to tell models apart


@pytest.fixture(scope="session")
def data():
    """Noise on a pattern for each class, so that nets learn, and not all the same."""
    patterns = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(1))

    def drawn(labels: tuple[int, ...], count: int, seed: int):
        noise = torch.randn(count, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
        y = torch.tensor([labels[i % len(labels)] for i in range(count)])
        return to_examples((1.5 * noise + patterns[y], y))

    held = {0: (0, 1, 2, 3), 1: (1, 3)}
    train = {client: drawn(labels, 40, client) for client, labels in held.items()}
    return {"train": train, "test": {c: drawn((0, 1, 2, 3), COUNT, 90 + c) for c in held}}


def plain(**changes) -> LocalSGD:
    return LocalSGD(STEPS, lr=0.05, **changes)


def done(context, recipe, task):
    """What a client sends and keeps, and how its own model did."""
    result = recipe.run(replace(task, recipe=recipe), context)
    metrics = result.update.metrics
    counts = {name: metrics[name] for name in (RIGHT, TESTED) if name in metrics}
    return result.update, result.state, counts


def without_and_with(fresh_bench, recipe, task, kept=None):
    """The same work twice: alone, and tested."""
    found = []
    for some in (recipe, local_test.WithLocalTest(recipe)):
        context = fresh_bench().for_client(kept)
        found.append((*done(context, some, task), context))
    return found


def right(nets, data) -> int:
    """Right answers of the mean of logits, example by example."""
    answers = []
    for number in range(len(data)):
        x, _ = data.batch(torch.tensor([number]))
        answers.append(int(torch.stack([net.eval()(x)[0] for net in nets]).mean(0).argmax()))
    assert len(set(answers)) > 1  # another net would answer otherwise
    return sum(answer == label for answer, label in zip(answers, data.labels.tolist(), strict=True))


def holding(net, structure, subnet, tensors) -> nn.Module:
    """The subnet's module with these tensors."""
    built = build_module(net, structure, subnet.shape)
    there = named_tensors(built)
    with torch.no_grad():
        for name, tensor in tensors.items():
            there[name].copy_(tensor)
    return built


def bits(tensors):
    return {n: t.detach().contiguous().numpy().tobytes() for n, t in (tensors or {}).items()}


def assert_same_work(one, other):
    (alone, kept, *_), (update, kept_then, counts, _) = one, other
    assert [bits(part) for part in alone.params] == [bits(part) for part in update.params]
    for name in ("client", "subnets", "weight"):
        assert getattr(alone, name) == getattr(update, name)
    assert dict(alone.metrics) == {n: v for n, v in update.metrics.items() if n not in counts}
    assert (kept is None, bits(kept)) == (kept_then is None, bits(kept_then))


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_what_is_sent_is_tested(fresh_bench, net, structure, params, data, width):
    task = Task(0, (structure.subnet(width),), params, plain(), 3)
    one, other = without_and_with(fresh_bench, plain(), task)
    assert_same_work(one, other)
    (tensors,) = one[0].params
    own = holding(net, structure, task.subnets[0], tensors)
    assert other[2] == {RIGHT: right([own], data["test"][0]), TESTED: COUNT}


def test_rows_of_classes_that_are_not_sent_are_as_received(
    fresh_bench, net, structure, params, data
):
    """And statistics that are neither sent nor kept are those of the training data."""
    recipe = plain(labels=(1, 3), masked=True, own_rows=True)
    task = Task(1, (structure.subnet(0.5).excluding(STATISTICS),), params, recipe, 3)
    one, other = without_and_with(fresh_bench, recipe, task)
    assert_same_work(one, other)
    (tensors,), (sent,) = one[0].params, one[0].subnets
    assert tensors["classifier.weight"].shape[0] == 2
    received = copy_subnet_tensors(params, structure, task.subnets[0])
    rows = {name: received[name] for name in ("classifier.weight", "classifier.bias")}
    for name, tensor in rows.items():
        tensor[[1, 3]] = tensors[name]
    every = sent.restricted_to(structure.classes, range(4))
    own = holding(net, structure, every, {**tensors, **rows})
    for layer in (own.norm, own.norm2):
        layer.momentum = 1.0
    own.train()(data["train"][1].batch(torch.arange(40))[0])  # all of them are one batch
    assert other[2] == {RIGHT: right([own], data["test"][1]), TESTED: COUNT}


def test_several_nets_answer_together(fresh_bench, net, structure, params, data):
    names = list(named_tensors(net))
    noise = torch.Generator().manual_seed(8)
    bases = {
        f"{n}@{i}": params[n] + 0.3 * i * torch.rand(params[n].shape, generator=noise)
        if params[n].is_floating_point()
        else params[n]
        for i in range(3)
        for n in names
    }
    subnets = tuple(Subnet().with_private(str(i), "*") for i in range(3))
    one, other = without_and_with(fresh_bench, plain(), Task(0, subnets, bases, plain(), 3))
    assert_same_work(one, other)
    nets = [
        holding(net, structure, s, part) for s, part in zip(subnets, one[0].params, strict=True)
    ]
    assert other[2] == {RIGHT: right(nets, data["test"][0]), TESTED: COUNT}


def test_of_nested_widths_the_widest_is_tested(fresh_bench, net, structure, params, data):
    widest, narrow = structure.subnet(1.0), structure.subnet(0.5)
    for other_width in (narrow, narrow.with_private("0.5", "norm*").excluding("*", "!norm*")):
        recipe = Slimmable(STEPS, lr=0.05)
        task = Task(0, (widest, other_width), params, recipe, 3)
        one, other = without_and_with(fresh_bench, recipe, task)
        assert_same_work(one, other)
        own = holding(net, structure, widest, one[0].params[0])
        assert other[2] == {RIGHT: right([own], data["test"][0]), TESTED: COUNT}


@pytest.mark.parametrize("home", [("*",), ("*", "!classifier.*"), (STATISTICS,)])
def test_what_stays_at_home_is_part_of_the_model(fresh_bench, net, structure, params, data, home):
    recipe = plain(local_params=home)
    task = Task(0, (Subnet().excluding(*home),), params, recipe, 3)
    earlier = {
        "norm.running_mean": torch.full((6,), 0.3),
        "second.weight": params["second.weight"].flip(0),
    }
    at_home = structure.match_names(home)
    kept = {n: t for n, t in earlier.items() if n in at_home}
    one, other = without_and_with(fresh_bench, recipe, task, kept)
    assert_same_work(one, other)
    own = holding(net, structure, Subnet(), {**one[1], **one[0].params[0]})
    assert other[2] == {RIGHT: right([own], data["test"][0]), TESTED: COUNT}
    assert bits(other[3].client_state) == bits(kept)  # as it was found


def test_what_is_kept_beside_a_model_is_no_part_of_it(fresh_bench, net, structure, params, data):
    recipe = FedDynTraining(plain(), alpha=0.1)  # keeps numbers under the names of weights
    task = Task(0, (Subnet().excluding(STATISTICS),), params, recipe, 3)
    one, other = without_and_with(fresh_bench, recipe, task)
    assert_same_work(one, other)
    assert "first.weight" in one[1]
    own = holding(net, structure, Subnet(), one[0].params[0])
    for layer in (own.norm, own.norm2):
        layer.momentum = 1.0
    own.train()(data["train"][0].batch(torch.arange(40))[0])
    assert other[2] == {RIGHT: right([own], data["test"][0]), TESTED: COUNT}


def test_a_client_that_samples_channels_tests_these(data):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3)
            self.norm = nn.BatchNorm2d(6, track_running_stats=False)
            self.classifier = nn.Linear(6, 4)

        def forward(self, x):
            return self.classifier(self.norm(self.conv(x)).relu().mean((2, 3)))

    torch.manual_seed(1)
    net = Net()
    structure = fq.trace_structure(net, torch.zeros(2, 1, 5, 5))
    recipe = Bilevel(STEPS, 0.05, groups=("conv",), keep_fraction=0.5)
    task = Task(0, (Subnet(),), named_tensors(net), recipe, 3)
    one, other = without_and_with(lambda: ClientContext(net, structure, data), recipe, task)
    assert_same_work(one, other)
    (sent,), (tensors,) = one[0].subnets, one[0].params
    assert tensors["conv.weight"].shape[0] == 3
    own = holding(net, structure, sent, tensors).eval()
    x, y = data["test"][0].batch(torch.arange(COUNT))  # normalised by the batch that it is in
    assert other[2] == {RIGHT: int((own(x).argmax(1) == y).sum()), TESTED: COUNT}


@dataclass(frozen=True)
class Twofold:
    """Sends what it was given, and says that its own model is one that knows one answer."""

    answer: int

    def run(self, task, context):
        tensors = copy_subnet_tensors(task.params, context.structure, task.subnets[0])
        bias = tensors["classifier.bias"].clone()
        bias[self.answer] += 1e6
        metrics = {"loss": 1.0, "examples": 14}
        update = Update(task.client, task.subnets, (tensors,), 1.0, metrics)
        other = {**tensors, "classifier.bias": bias}
        return ClientResult(update, local_model=(task.subnets, (other,)))


@pytest.mark.parametrize("answer", [0, 3])
def test_a_recipe_may_name_another_model(fresh_bench, params, answer):
    recipe = Twofold(answer)
    one, other = without_and_with(fresh_bench, recipe, Task(0, (Subnet(),), params, recipe, 3))
    assert_same_work(one, other)
    assert other[2] == {RIGHT: 25 if answer == 0 else 24, TESTED: COUNT}  # of 97 labels in turn
    assert torch.equal(other[0].params[0]["classifier.bias"], params["classifier.bias"])


@dataclass(frozen=True)
class Silent:
    """Finds a subnet and sends none of its weights."""

    def run(self, task, context):
        sent = task.subnets[0].excluding("*")
        return ClientResult(Update(task.client, (sent,), ({},), 0.0, {"steps": 2.0}))


def test_who_sends_and_keeps_nothing_is_not_tested(fresh_bench, params):
    one, other = without_and_with(fresh_bench, Silent(), Task(0, (Subnet(),), params, Silent(), 3))
    assert_same_work(one, other)
    assert other[2] == {}


def test_who_has_one_example_that_cannot_be_normalised_has_trained_all_the_same(data):
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 8), norm, nn.ReLU(), nn.Linear(8, 4))
    structure = fq.trace_structure(net, torch.zeros(2, 1, 5, 5))
    x, y = data["test"][0].batch(torch.tensor([0]))
    few = {"train": data["train"], "test": {0: to_examples((x, y))}}
    task = Task(0, (Subnet(),), named_tensors(net), plain(), 3)
    one, other = without_and_with(lambda: ClientContext(net, structure, few), plain(), task)
    assert_same_work(one, other)
    assert other[2] == {}


def test_a_test_that_fails_is_told(net, structure, params, data):
    task = Task(0, (Subnet(),), params, plain(), 3)
    context = ClientContext(net, structure, {"train": data["train"]})
    with pytest.raises(KeyError):
        local_test.WithLocalTest(plain()).run(task, context)


def test_modules_are_in_the_mode_that_work_left_them_in(fresh_bench, params):
    task = Task(0, (Subnet(),), params, plain(), 3)
    found = without_and_with(fresh_bench, plain(), task)
    modes = [
        [m.training for m in context.module(Subnet(), params).modules()] for *_, context in found
    ]
    assert modes[0] == modes[1] == [True] * len(modes[0])
