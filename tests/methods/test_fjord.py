"""FjORD: one width for every batch, against autograd on slices of whole tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, derive_seed
from fedquilt.federation.state import Setup
from fedquilt.learning.losses import CROSS_ENTROPY
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.training.ordered import OrderedDropout

WIDTHS = (1.0, 0.5, 0.25)
STATISTICS = {f"features.{i}.running_{what}" for i in (1, 4) for what in ("mean", "var")}
COUNTERS = {f"features.{i}.num_batches_tracked" for i in (1, 4)}
NORMS = STATISTICS | COUNTERS | {f"features.{i}.{w}" for i in (1, 4) for w in ("weight", "bias")}
OWN = {"statistics": STATISTICS, "norms": NORMS}

ONE_BATCH = fq.LocalTraining(
    lr=0.1, momentum=0, weight_decay=1e-2, epochs=1, batch_size=16, max_grad_norm=None
)
SETTINGS = {
    "plain": replace(ONE_BATCH, epochs=2, batch_size=4),
    "momentum": replace(ONE_BATCH, epochs=2, batch_size=4, momentum=0.9),
}


def logits(p, width: float, x: Tensor) -> Tensor:
    """The leading channels of the net in training; its running statistics move."""
    first, second = (math.ceil(width * size) for size in (8, 4))

    def own(name: str) -> Tensor:
        return p.get(f"{name}@{width:g}", p.get(name))

    def norm(layer: str, x: Tensor) -> Tensor:
        count, kept = x.numel() / x.shape[1], x.shape[1]
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        with torch.no_grad():
            running = own(f"{layer}.running_mean")[:kept]
            running += 0.1 * (mean - running)
            running = own(f"{layer}.running_var")[:kept]
            running += 0.1 * (var * count / (count - 1) - running)
        x = (x - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + 1e-5).sqrt()
        weight, bias = own(f"{layer}.weight")[:kept], own(f"{layer}.bias")[:kept]
        return x * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)

    weight, bias = p["features.0.weight"][:first], p["features.0.bias"][:first]
    x = norm("features.1", F.conv2d(x, weight, bias, padding=1)).relu()
    weight, bias = p["features.3.weight"][:second, :first], p["features.3.bias"][:second]
    x = norm("features.4", F.conv2d(x, weight, bias)).relu().mean((2, 3))
    return F.linear(x, p["classifier.weight"][:, :second], p["classifier.bias"])


def by_hand(params, method, widths, drawn, data, seed) -> tuple[dict[str, Tensor], float]:
    """Whole tensors after training the drawn widths, and the mean loss of the last epoch."""
    settings = method.local_training
    p = {n: params[n].clone() for n in params if "@" not in n and n not in COUNTERS}
    for name in OWN[method.private_params] - COUNTERS:
        for width in widths:
            p[f"{name}@{width:g}"] = params.get(f"{name}@{width:g}", params[name]).clone()
    learned = [n for n in p if "running" not in n]
    for name in learned:
        p[name].requires_grad_()
    speed = {n: torch.zeros_like(p[n]) for n in learned}
    generator, draws = torch.Generator().manual_seed(seed), iter(drawn)
    losses = []
    for _ in range(settings.epochs):
        losses = []
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch_size):
            x, y, width = data.inputs[rows], data.labels[rows], next(draws)
            if not method.distil or width == widths[0]:
                terms = [F.cross_entropy(logits(p, width, x), y)]
            else:
                teacher = logits(p, widths[0], x)
                answers = teacher.detach().softmax(1)
                student = logits(p, width, x).log_softmax(1)
                terms = [F.cross_entropy(teacher, y), -(answers * student).sum(1).mean()]
            tensors = [p[n] for n in learned]
            found = torch.autograd.grad(sum(terms), tensors, allow_unused=True)
            with torch.no_grad():
                for n, g in zip(learned, found, strict=True):
                    if g is not None:
                        speed[n] = settings.momentum * speed[n] + g + settings.weight_decay * p[n]
                        p[n] -= settings.lr * speed[n]
            losses.append(sum(terms).item() / len(terms))
    return {n: t.detach() for n, t in p.items()}, sum(losses) / len(losses)


def assert_sent(update, expected, widths, drawn, method) -> None:
    """The update holds the cells of the whole tensors, and of what widths own just the trained."""
    trained = set(drawn) | ({widths[0]} if method.distil else set())
    for width, part in zip(widths, update.params, strict=True):
        names = set(OWN[method.private_params]) if width in trained else set()
        if width == widths[0]:
            names |= {n for n in expected if "@" not in n} | COUNTERS
            names -= set() if width in trained else OWN[method.private_params]
        assert set(part) == names
        for name, tensor in part.items():
            if tensor.is_floating_point():
                whole = expected.get(f"{name}@{width:g}", expected[name])
                cells = whole[tuple(slice(size) for size in tensor.shape)]
                torch.testing.assert_close(tensor, cells, rtol=2e-4, atol=2e-5)


def trained_widths(update, widths) -> list[float]:
    """Those whose own statistics came back."""
    parts = zip(widths, update.params, strict=True)
    return [width for width, part in parts if part.keys() >= STATISTICS]


KINDS = [(True, "statistics"), (True, "norms"), (False, "statistics"), (False, "norms")]


@pytest.fixture
def warm(world):
    """A state in which every width has statistics and norms of its own."""
    state = world.start(fq.FjORD())
    generator, params = torch.Generator().manual_seed(1), dict(state.params)
    for name in sorted(NORMS - COUNTERS):
        for width in WIDTHS:
            noise = torch.rand(params[name].shape, generator=generator)
            params[f"{name}@{width:g}"] = params[name] + 0.3 * noise
    return replace(state, params=params)


def test_a_client_gets_every_width_up_to_its_own(world, local_training):
    method = fq.FjORD(local_training)
    assert method.sizes(world.setup) == WIDTHS
    tasks = method.plan(world.setup, world.start(method), world.setup.clients)
    first = world.setup.structure.cut_groups()[0]
    counts = [[world.setup.structure.kept_count(s, first) for s in t.subnets] for t in tasks]
    assert counts == [[8, 4, 2], [4, 2], [2], [2]]
    for task, client in zip(tasks, world.setup.clients, strict=True):
        widest, *narrow = (set(world.setup.structure.tensor_names(s)) for s in task.subnets)
        assert widest == set(world.setup.structure.shapes)
        assert narrow == [STATISTICS] * len(narrow)  # the rest is part of the widest
        assert task.recipe == OrderedDropout(local_training, 0.05, weight=client.num_examples)
    some = fq.FjORD(local_training, widths=(0.5, 0.75))
    tasks = some.plan(world.setup, world.start(some), world.setup.clients)
    counts = [[world.setup.structure.kept_count(s, first) for s in t.subnets] for t in tasks]
    assert counts == [[6, 4], [4], [2], [2]]


@pytest.mark.parametrize("client", [0, 1])
@pytest.mark.parametrize(("distil", "own"), KINDS)
def test_one_step_is_that_of_the_width_which_was_drawn(world, warm, distil, own, client):
    """Which one it was is seen from what comes back; every width comes equally often."""
    method = fq.FjORD(ONE_BATCH, distil=distil, private_params=own)
    (task,) = method.plan(world.setup, warm, world.setup.clients[client : client + 1])
    widths, count = WIDTHS[client:], 45
    updates = world.done([replace(task, seed=seed) for seed in range(count)])
    seen: Counter[float] = Counter()
    for seed, update in enumerate(updates):
        drawn = trained_widths(update, widths)[-1]  # with distillation behind the widest
        data = world.people.train[client]
        expected, loss = by_hand(warm.params, method, widths, [drawn], data, seed)
        assert_sent(update, expected, widths, [drawn], method)
        assert update.metrics["loss"] == pytest.approx(loss, rel=1e-4)
        seen[drawn] += 1
    assert set(seen) == set(widths)
    assert all(abs(n - count / len(widths)) < 12 for n in seen.values())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("distil", "own"), KINDS)
def test_an_epoch_is_a_hand_written_loop(world, warm, distil, own, settings):
    """Weights and the statistics of each width, over batches with different widths."""
    method = fq.FjORD(SETTINGS[settings], distil=distil, private_params=own)
    seeds = (0, 1, 2)
    (task,) = method.plan(world.setup, warm, world.setup.clients[:1])
    updates, partly = world.done([replace(task, seed=seed) for seed in seeds]), 0
    for seed, update in zip(seeds, updates, strict=True):
        draws = torch.Generator().manual_seed(derive_seed(seed, 1))
        drawn = [WIDTHS[int(torch.randint(3, (), generator=draws))] for _ in range(8)]
        data = world.people.train[0]
        expected, loss = by_hand(warm.params, method, WIDTHS, drawn, data, seed)
        assert_sent(update, expected, WIDTHS, drawn, method)
        assert update.metrics["loss"] == pytest.approx(loss, rel=1e-3)
        partly += len(set(drawn)) > 1
    assert partly == len(seeds)


@pytest.mark.parametrize("distil", [True, False])
def test_widths_are_drawn_equally_often_and_the_teacher_sees_every_batch(world, distil):
    """By the layers' own counters, which come back if norms do."""
    settings = replace(ONE_BATCH, lr=1e-3, batch_size=2, epochs=20)
    method = fq.FjORD(settings, distil=distil, private_params="norms")
    tasks = method.plan(world.setup, world.start(method), world.setup.clients[:2])
    for update, widths in zip(world.done(tasks), (WIDTHS, WIDTHS[1:]), strict=True):
        counts = [int(part["features.4.num_batches_tracked"]) for part in update.params]
        if distil:
            assert counts[0] == 160  # and no batch twice
            counts[0] -= sum(counts[1:])
        assert sum(counts) == 160
        assert len(counts) == len(widths)
        assert all(abs(n - 160 / len(widths)) < 30 for n in counts)  # five standard deviations


def test_a_teacher_learns_nothing_from_being_imitated():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 2, 5, generator=generator) for _ in range(2))
    student.requires_grad_()
    teacher.requires_grad_()
    loss = CROSS_ENTROPY.distil(student, teacher)
    (gradient, nothing) = torch.autograd.grad(loss, (student, teacher), allow_unused=True)
    assert nothing is None
    expected = (student.softmax(-1) - teacher.softmax(-1)) / 6
    torch.testing.assert_close(gradient, expected.detach())
    divergence = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="sum") / 6
    entropy = -(teacher.softmax(-1) * teacher.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, divergence + entropy)


@pytest.mark.parametrize(("distil", "own"), KINDS)
def test_a_client_of_the_smallest_width_sends_just_its_cells(world, traffic, distil, own):
    method = fq.FjORD(SETTINGS["plain"], distil=distil, private_params=own)
    state = world.start(method)
    (task,) = method.plan(world.setup, state, world.setup.clients[2:3])
    (update,) = world.done([task])
    (part,) = update.params
    shapes = {n: tuple(t.shape) for n, t in part.items() if n not in NORMS}
    assert shapes == {
        "features.0.weight": (2, 1, 3, 3), "features.0.bias": (2,),
        "features.3.weight": (1, 2, 3, 3), "features.3.bias": (1,),
        "classifier.weight": (4, 1), "classifier.bias": (4,),
    }  # fmt: skip
    weights = (18 + 2) + (18 + 1) + (4 + 4)
    norms = 4 * (2 + 1)
    assert traffic(world, task, update) == (4 * (weights + norms) + 16,) * 2  # and two counters


@pytest.mark.parametrize(("distil", "own"), KINDS)
def test_one_width_for_all_is_fedavg_bit_for_bit(world, local_training, same, distil, own):
    """In several epochs: a draw among one does not change the batches."""
    settings = replace(local_training, epochs=2)
    clients = [
        replace(client, budget=Budget(0.5), num_examples=count)
        for client, count in zip(world.setup.clients, (30, 10, 25, 4), strict=True)
    ]
    world, found = world.with_clients(*clients), []
    for method in (
        fq.FjORD(settings, distil=distil, private_params=own),
        fq.FedAvg(settings, width=0.5),
    ):
        state = world.start(method)
        for _ in range(2):
            state = world.round(method, state)
        (subnet,) = method.ensemble(world.setup, state, 0.5)
        found.append(copy_subnet_tensors(state.params, world.setup.structure, subnet))
    assert same(found[0], found[1])


@pytest.mark.parametrize(("distil", "own"), KINDS)
def test_a_cell_is_averaged_over_those_who_trained_it_by_their_data(world, warm, distil, own):
    """Weights over all that hold them; what a width owns over the clients that drew it."""
    counts = (30, 10, 25, 4)
    pairs = zip(world.setup.clients, counts, strict=True)
    world = world.with_clients(*(replace(c, num_examples=count) for c, count in pairs))
    method = fq.FjORD(ONE_BATCH, distil=distil, private_params=own)
    updates = world.done(method.plan(world.setup, warm, world.setup.clients))
    sums = {n: np.zeros(t.shape) for n, t in warm.params.items() if t.is_floating_point()}
    weights = {n: np.zeros_like(total) for n, total in sums.items()}
    holders: Counter[float] = Counter()
    for number, update in enumerate(updates):
        widths = [w for w in WIDTHS if w <= world.setup.clients[number].budget.width]
        holders.update(trained_widths(update, widths))
        for width, part in zip(widths, update.params, strict=True):
            for name, sent in part.items():
                if sent.is_floating_point():
                    target = f"{name}@{width:g}" if name in OWN[own] else name
                    cells = tuple(slice(size) for size in sent.shape)
                    sums[target][cells] += counts[number] * sent.double().numpy()
                    weights[target][cells] += counts[number]
    assert set(weights["features.0.weight"].flatten()) == {30.0, 40.0, 69.0}
    after = method.merge(world.setup, warm, updates).params
    for name, total in sums.items():
        old = warm.params[name].double().numpy()
        expected = np.where(weights[name] > 0, total / np.maximum(weights[name], 1), old)
        np.testing.assert_allclose(after[name].double().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert sum(holders.values()) < 7  # so somebody did not draw all of its widths


def test_statistics_of_a_width_that_nobody_drew_are_kept(world, warm):
    method, structure = fq.FjORD(ONE_BATCH, distil=False), world.setup.structure
    (task,) = method.plan(world.setup, warm, world.setup.clients[:1])
    updates = world.done([replace(task, seed=seed) for seed in range(12)])
    seen = set()
    for update in updates:
        (drawn,) = trained_widths(update, WIDTHS)
        after = method.merge(world.setup, warm, [update]).params
        changed = {n for n, t in after.items() if not t.equal(warm.params[n])}
        assert {n for n in changed if "running" in n} == {f"{n}@{drawn:g}" for n in STATISTICS}
        assert {n for n in changed if "@" not in n} == set(structure.shapes) - STATISTICS - COUNTERS
        seen.add(drawn)
    assert seen == set(WIDTHS)


@pytest.mark.parametrize("own", OWN)
def test_a_customized_model_has_what_its_width_owns(world, warm, own):
    method = fq.FjORD(ONE_BATCH, private_params=own)
    for width, owner in ((1.0, "1"), (0.5, "0.5"), (0.25, "0.25"), (0.4, "0.5"), (0.1, "0.25")):
        (subnet,) = method.ensemble(world.setup, world.start(method), width)
        small = build_module(world.setup.model, world.setup.structure, subnet, warm.params)
        for name in ("running_mean", "running_var", "weight", "bias"):
            full = f"features.1.{name}"
            source = warm.params[f"{full}@{owner}" if full in OWN[own] else full]
            found = getattr(small.features[1], name)
            assert len(found) == math.ceil(8 * width)
            assert found.equal(source[: len(found)])


@pytest.mark.parametrize(("distil", "own"), KINDS)
def test_a_model_without_batch_normalisation_has_nothing_of_its_own(distil, own):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    structure = fq.trace_structure(net, torch.zeros(2, 3))
    clients = (Client(0, 50, (0, 1), Budget(1.0)), Client(1, 50, (0, 1), Budget(0.5)))
    setup = Setup(net, structure, torch.zeros(2, 3), clients, 1, 0)
    method = fq.FjORD(distil=distil, private_params=own)
    wide, _ = method.plan(setup, replace(method.start(setup), phase="train"), clients)
    assert [s.owner for s in wide.subnets] == ["", ""]
    assert [structure.tensor_names(s) for s in wide.subnets] == [list(structure.shapes), []]


def test_defaults_are_those_of_the_authors_code():
    method = fq.FjORD()
    assert method.local_training == fq.LocalTraining(
        lr=0.1, momentum=0, weight_decay=1e-4, epochs=1, batch_size=32, max_grad_norm=None
    )
    assert (method.distil, method.private_params) == (True, "statistics")
    assert method.fraction is None  # a tenth of their hundred clients
    assert method.default_budgets(torch.nn.Linear(1, 1)) == (1.0, 0.8, 0.6, 0.4, 0.2)
    assert [method.local_training.lr_at(round, 500) for round in (0, 499)] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"private_params": "nothing"}, "'statistics' or 'norms', got 'nothing'"),
        ({"widths": (0.5, 2)}, "got 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        fq.FjORD(**wrong)
