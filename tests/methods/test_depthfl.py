"""DepthFL: nested depths against the whole net; FedDyn against its algorithm written out."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.engines.client_state import read_client_state
from fedquilt.engines.client_work import run_task
from fedquilt.errors import BudgetError, ConfigError, StructureError
from fedquilt.federation.budgets import assign_budgets
from fedquilt.federation.client import Client, derive_seed
from fedquilt.federation.state import Setup
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import build_module
from fedquilt.training.context import ClientContext
from fedquilt.training.exits import ExitLosses
from fedquilt.training.feddyn import FedDynTraining
from fedquilt.training.local_sgd import LocalSGD

AT = ("features.0", "features.1", "features.3")
DEPTHS = (4, 2, 1, 1)  # of the world's clients
PLAIN = fq.LocalTraining(
    lr=0.1, momentum=0, weight_decay=1e-2, epochs=2, batch_size=5, max_grad_norm=None
)


@pytest.fixture
def deep(world):
    """The world with four exits, and a method for it."""

    def make(**settings):
        method = fq.DepthFL(PLAIN, exit_modules=AT, fraction=1.0, **settings)
        return world.prepare_model(method), method

    return make


def names_of_depth(depth: int) -> set[str]:
    """The tensors of the first exits, listed by hand."""
    layers = {1: ["0"], 2: ["0", "1"], 3: ["0", "1", "3"], 4: ["0", "1", "3", "4"]}[depth]
    kinds = {"0": ("weight", "bias"), "3": ("weight", "bias")}
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {f"net.features.{i}.{kind}" for i in layers for kind in kinds.get(i, norm)}
    return names | ({"net.classifier.weight", "net.classifier.bias"} if depth == 4 else set())


def test_a_client_gets_the_first_layers_and_their_exits(deep):
    world, method = deep()
    assert method.sizes(world.setup) == (1.0, 0.75, 0.5, 0.25)
    state = world.start(method)
    tasks = method.plan(world.setup, state, world.setup.clients)
    updates = world.done(tasks)
    for depth, task, update in zip(DEPTHS, tasks, updates, strict=True):
        (subnet,), (sent,) = task.subnets, update.params
        names = set(world.setup.structure.tensor_names(subnet))
        assert {n for n in names if n.startswith("net.")} == names_of_depth(depth)
        heads = {n.split(".")[1] for n in names if n.startswith("heads.")}
        assert heads == {f"exit{i}" for i in range(1, min(depth, 3) + 1)}
        assert set(sent) == names
        assert update.weight == 1.0


def test_a_client_of_depth_one_sends_its_layers_and_its_head_alone(deep, traffic):
    world, method = deep()
    (task,) = method.plan(world.setup, world.start(method), world.setup.clients[2:3])
    (update,) = world.done([task])
    head = world.setup.model.heads["exit1"]
    net = (8 * 9 + 8) * 4
    expected = net + sum(t.nbytes for t in (*head.parameters(), *head.buffers()))
    assert traffic(world, task, update) == (expected, expected)


def test_the_authors_budgets_give_a_quarter_of_the_clients_each_depth(deep):
    world, method = deep()
    budgets = assign_budgets("4-2-4d3-1", 100)
    for number, budget in enumerate(budgets):
        subnet = method.trained_subnet(world.setup, Client(number, 1, (), budget))
        assert 4 - len(subnet.skipped) == number // 25 + 1


def test_depths_are_found_for_physical_limits_too(deep):
    world, method = deep()
    setup = world.setup
    prices = [
        fq.compute_cost(setup.model, setup.structure, method.subnet(setup, size), setup.example)
        for size in method.sizes(setup)
    ]
    for depth, price in zip((4, 3, 2, 1), prices, strict=True):
        for limit in ("params", "macs"):
            budget = Budget(**{limit: getattr(price, limit)})
            subnet = method.trained_subnet(setup, Client(0, 1, (), budget))
            assert 4 - len(subnet.skipped) == depth
    with pytest.raises(BudgetError, match=r"the smallest is 0\.25 of the model"):
        method.trained_subnet(setup, Client(0, 1, (), Budget(0.2)))


@pytest.mark.parametrize("width", [1.0, 0.99, 0.75, 0.5, 0.3, 0.25])
def test_a_size_is_the_exits_that_go_into_it(deep, width):
    world, method = deep()
    state = world.start(method)
    (subnet,) = method.ensemble(world.setup, state, width)
    assert subnet.skipped == tuple(f"exit{i}" for i in range(math.floor(4 * width) + 1, 5))
    assert subnet.excluded == ()
    with pytest.raises(ConfigError, match=r"one of 4 exits, 0\.25 of the whole, got 0\.2"):
        method.ensemble(world.setup, state, 0.2)


def mutual(outs) -> Tensor:
    """As in the authors' code: for each exit, the mean over the others."""
    total = torch.zeros(())
    for i, student in enumerate(outs):
        for j, teacher in enumerate(outs):
            if i != j:
                p = teacher.detach().softmax(1)
                far = (p * (p.log() - student.log_softmax(1))).sum() / len(p)
                total = total + far / (len(outs) - 1)
    return total


def by_hand(model: nn.Module, depth: int, method, round: int, data, seed: int) -> nn.Module:
    """The whole net, trained on the first exits alone by PyTorch's SGD."""
    net, settings = copy.deepcopy(model).train(), method.local_training
    lr = settings.lr * settings.round_decay**round
    sgd = torch.optim.SGD(net.parameters(), lr, weight_decay=settings.weight_decay)
    weight = np.exp(-5 * (1 - np.clip(round, 0, method.ramp_rounds) / method.ramp_rounds) ** 2)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch_size):
            if len(rows) > 1:
                outs = net(data.inputs[rows])[:depth]
                chosen = outs[-1:] if method.only_last else outs
                loss = sum(F.cross_entropy(out, data.labels[rows]) for out in chosen)
                if method.distil and not method.only_last:
                    loss = loss + float(weight) * mutual(outs)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
    return net


KINDS = [{}, {"distil": False}, {"only_last": True}, {"ramp_rounds": 5}]


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_training_a_part_is_training_the_whole_net_on_its_first_exits(deep, settings, client):
    world, method = deep(**settings)
    method = replace(method, local_training=replace(PLAIN, round_decay=0.9))
    for round in (0, 4, 400):
        state = replace(world.start(method), round=round)
        (task,) = method.plan(world.setup, state, world.setup.clients[client : client + 1])
        (update,) = world.done([task])
        data = world.people.train[client]
        expected = by_hand(world.setup.model, DEPTHS[client], method, round, data, task.seed)
        (sent,) = update.params
        for name, tensor in expected.state_dict().items():
            if name in sent:
                torch.testing.assert_close(sent[name], tensor, rtol=1e-4, atol=1e-6)


def test_defaults_are_those_of_the_authors():
    method = fq.DepthFL()
    settings = method.local_training
    assert (settings.momentum, settings.weight_decay, settings.max_grad_norm) == (0, 1e-3, None)
    assert (settings.epochs, settings.batch_size) == (5, 50)
    assert method.fraction is None  # a tenth of their hundred clients
    assert settings.lr_at(3) == pytest.approx(0.1 * 0.998**3)


@pytest.mark.parametrize("only_last", [False, True])
def test_a_tensor_is_averaged_over_the_clients_that_train_it(deep, only_last):
    world, method = deep(only_last=only_last)
    counts = (40, 10, 20, 5)  # which do not matter
    pairs = zip(world.setup.clients, counts, strict=True)
    world = world.with_clients(*(replace(c, num_examples=n) for c, n in pairs))
    state = world.start(method)
    updates = world.done(method.plan(world.setup, state, world.setup.clients))
    after = method.merge(world.setup, state, updates).params
    sent: dict[str, list[np.ndarray]] = {}
    for update in updates:
        for name, tensor in update.params[0].items():
            sent.setdefault(name, []).append(tensor.double().numpy())
    assert len(sent["net.features.0.weight"]) == 4
    assert len(sent["heads.exit1.classifier.bias"]) == (2 if only_last else 4)
    assert len(sent["net.features.1.running_mean"]) == 2
    assert set(sent) == {n for n in state.params if not only_last or "exit3" not in n}
    for name, tensors in sent.items():
        if after[name].is_floating_point():
            expected = np.mean(tensors, axis=0)
            np.testing.assert_allclose(after[name].double().numpy(), expected, rtol=1e-5, atol=1e-6)
    for name in state.params.keys() - sent:
        assert after[name].equal(state.params[name])


def test_one_exit_is_fedavg_bit_for_bit(world, local_training):
    method, plain = fq.DepthFL(local_training, exit_modules=()), fq.FedAvg(local_training)
    world = world.with_clients(*(replace(c, budget=Budget(1.0)) for c in world.setup.clients))
    exits = world.prepare_model(method)
    assert method.sizes(exits.setup) == (1.0,)
    one, other = exits.start(method), world.start(plain)
    for _ in range(2):
        one, other = exits.round(method, one), world.round(plain, other)
    assert all(one.params[f"net.{n}"].equal(t) for n, t in other.params.items())


def test_the_net_with_exits_depends_on_the_seed_and_keeps_the_users_weights(world):
    method = fq.DepthFL(exit_modules=AT)
    first, other = (
        method.prepare_model(replace(world.setup, seed=seed)).model.state_dict() for seed in (3, 4)
    )
    for name, tensor in world.setup.model.state_dict().items():
        assert first[f"net.{name}"].equal(tensor)
    assert not first["heads.exit1.classifier.weight"].equal(other["heads.exit1.classifier.weight"])
    able = world.with_clients(*world.setup.clients[:2]).setup
    assert [*fq.DepthFL().prepare_model(able).structure.blocks] == ["exit2"]
    with pytest.raises(BudgetError, match=r"no size meets .* of client 2; the smallest is 0\.5"):
        fq.DepthFL().prepare_model(world.setup)


def test_a_run_is_opened_customized_and_exported(world, tmp_path):
    method = fq.DepthFL(PLAIN, exit_modules=AT, fraction=1.0, feddyn_alpha=0.1)
    net = copy.deepcopy(world.setup.model)
    run = fq.train(
        net,
        world.setup.example,
        method,
        world.people,
        2,
        structure=world.setup.structure,
        workers=0,
        out=tmp_path / "run",
    )
    assert [score.width for score in run.scores] == [1.0, 0.75, 0.5, 0.25]
    macs = [score.macs for score in run.scores]
    assert macs == sorted(macs, reverse=True)
    again = fq.open_run(tmp_path / "run", net, method)
    x = torch.randn(3, 1, 5, 5)
    for width, count in ((1.0, 4), (0.5, 2), (0.25, 1)):
        small = again.customize(width=width)
        full = build_module(
            run.setup.model, run.setup.structure, fq.Subnet(), run.state.params
        ).eval()
        every = [*_exits(full, x)][:count]
        torch.testing.assert_close(small(x), torch.stack(every).mean(0))
    fq.export(again.customize(width=0.5), tmp_path / "small.pt2")
    smallest = again.customize(params=run.scores[-1].params)
    assert len(smallest.exits) == 1
    assert [s.accuracy for s in again.evaluate(world.people, workers=0)] == [
        s.accuracy for s in run.scores
    ]


def _exits(model, x: Tensor) -> tuple[Tensor, ...]:
    """What every exit says in use."""
    model.training = False
    features = model._program()(model.net, x)
    return tuple(
        model.heads[name](value) if name in model.heads else value
        for name, value in zip(model.exits, features, strict=True)
    )


def test_a_run_that_was_kept_nowhere_can_be_evaluated_though_clients_keep_something(world):
    method = fq.DepthFL(PLAIN, exit_modules=AT, feddyn_alpha=0.1)
    run = fq.train(
        world.setup.model,
        world.setup.example,
        method,
        world.people,
        1,
        structure=world.setup.structure,
        workers=0,
    )
    assert run.info.client_versions
    assert tuple(run.evaluate(workers=0)) == run.scores
    assert len(run.by_client(world.people, workers=0)) == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ramp_rounds": -1}, "ramp_rounds is a number of rounds, got -1"),
        ({"feddyn_alpha": -0.1}, "such as 0.1, or 0, got -0.1"),
        ({"feddyn_alpha": math.inf}, "got inf"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        fq.DepthFL(**wrong)


def test_a_wrong_place_for_an_exit_is_refused(world):
    with pytest.raises(StructureError, match="'layer1', which is no module of the net"):
        fq.DepthFL(exit_modules=("layer1",)).prepare_model(world.setup)


# FedDyn


def acar(world, method, rounds: int, alpha: float):
    """Algorithm 1 for each tensor over the clients that hold it, with everything in plain dicts."""
    model = world.setup.model
    weights = [n for n, _ in model.named_parameters()]
    held = [
        set(world.setup.structure.tensor_names(method.trained_subnet(world.setup, c)))
        for c in clients(world)
    ]
    theta = {n: t.clone() for n, t in model.state_dict().items()}
    mean, h = dict(theta), {n: torch.zeros_like(theta[n]) for n in weights}
    pulls = [{n: torch.zeros_like(theta[n]) for n in weights if n in names} for names in held]
    for round in range(rounds):
        trained = []
        for k, client in enumerate(clients(world)):
            net = copy.deepcopy(model).train()
            net.load_state_dict(theta)
            seed = derive_seed(world.setup.seed, round, client.id)
            dynamic_sgd(net, DEPTHS[k], method, world.people.train[k], pulls[k], alpha, seed)
            trained.append({n: t.detach() for n, t in net.state_dict().items() if n in held[k]})
            for n in pulls[k]:
                pulls[k][n] = pulls[k][n] - alpha * (trained[k][n] - theta[n])
        for name in theta:
            holders = [t[name] for t in trained if name in t]
            if holders and theta[name].is_floating_point():
                mean[name] = torch.stack(holders).mean(0)
            if name in h:
                h[name] = h[name] - alpha * sum(t - theta[name] for t in holders) / len(holders)
        theta = {n: mean[n] - h[n] / alpha if n in h else mean[n] for n in theta}
    return mean, h, pulls, theta


def clients(world) -> tuple[Client, ...]:
    return world.setup.clients


def dynamic_sgd(net, depth: int, method, data, pull, alpha: float, seed: int) -> None:
    settings = method.local_training
    sgd = torch.optim.SGD(net.parameters(), settings.lr, weight_decay=settings.weight_decay)
    start = {n: w.detach().clone() for n, w in net.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch_size):
            if len(rows) > 1:
                outs = net(data.inputs[rows])[:depth]
                loss = sum(F.cross_entropy(out, data.labels[rows]) for out in outs)
                sgd.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for n, w in net.named_parameters():
                        if n in pull:
                            w.grad += alpha * (w - start[n]) - pull[n]
                sgd.step()


def test_feddyn_is_its_algorithm_for_each_tensor_over_those_that_hold_it(deep):
    world, method = deep(feddyn_alpha=0.1, distil=False)
    mean, h, pulls, theta = acar(world, method, 3, 0.1)
    state = world.start(method)
    with world.engine() as engine:
        for _ in range(3):
            state = world.round(method, state, engine)
        kept = [read_client_state(engine._states.current_path(c.id)) for c in clients(world)]
    assert set(state.server_tensors) == set(h)
    close = {"rtol": 1e-3, "atol": 2e-5}
    for name, tensor in mean.items():
        torch.testing.assert_close(state.params[name], tensor, **close)
    for name, tensor in h.items():
        torch.testing.assert_close(state.server_tensors[name], tensor, **close)
    for found, expected in zip(kept, pulls, strict=True):
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, **close)
    (task, *_) = method.plan(world.setup, state, clients(world))
    for name, tensor in theta.items():  # what is sent is corrected, the model itself is the mean
        torch.testing.assert_close(task.params[name], tensor, **close)


def test_the_drift_is_the_mean_of_the_pulls_whoever_took_part(deep):
    world, method = deep(feddyn_alpha=0.2)
    state = world.start(method)
    with world.engine() as engine:
        for cohort in ((0, 2), (1, 2, 3), (0,), (3,), (0, 1)):
            some = [clients(world)[i] for i in cohort]
            updates = world.done(method.plan(world.setup, state, some), engine)
            state = method.merge(world.setup, state, updates)
        kept = [read_client_state(engine._states.current_path(c.id)) for c in clients(world)]
    holders = {n: [k[n] for k in kept if n in k] for n in state.server_tensors}
    assert {len(found) for found in holders.values()} == {1, 2, 4}
    for name, drift in state.server_tensors.items():
        expected = torch.stack(holders[name]).mean(0)
        torch.testing.assert_close(drift, expected, rtol=1e-3, atol=1e-6)


def test_tensors_that_nobody_trained_do_not_drift(deep):
    world, method = deep(feddyn_alpha=0.1)
    state = world.round(method, world.start(method))
    updates = world.done(method.plan(world.setup, state, clients(world)[2:]))
    after = method.merge(world.setup, state, updates)
    shallow = set(updates[0].params[0])
    for name, drift in state.server_tensors.items():
        assert after.server_tensors[name].equal(drift) == (name not in shallow)
        assert after.params[name].equal(state.params[name]) == (name not in shallow)
    idle = method.merge(world.setup, state, [])
    assert all(idle.server_tensors[n].equal(t) for n, t in state.server_tensors.items())


@pytest.fixture(scope="module")
def line() -> tuple[Setup, dict[int, tuple[Tensor, Tensor]]]:
    """Two clients that disagree about a linear classifier, each with all its data in one batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2, bias=False))
    net[0].requires_grad_(False)
    structure = fq.trace_structure(net, torch.zeros(2, 2))
    people = tuple(Client(i, 20, (0, 1)) for i in range(2))
    data = {}
    for i in range(2):
        x = torch.randn(20, 2) + torch.tensor([1.0 - 2 * i, 0.5])
        y = ((x[:, i] + 0.8 * torch.randn(20)) > 0).long()
        data[i] = (x, y)
    return Setup(net, structure, torch.zeros(2, 2), people, 1, 0), data


FULL = fq.LocalTraining(
    lr=0.5, momentum=0, weight_decay=0, epochs=20, batch_size=20, max_grad_norm=None
)


def after_rounds(line, rounds: int, feddyn: float) -> Tensor:
    setup, data = line
    method = fq.DepthFL(FULL, exit_modules=(), fraction=1.0, feddyn_alpha=feddyn)
    setup = method.prepare_model(setup)
    context = ClientContext(
        setup.model, setup.structure, {"train": {i: to_examples(d) for i, d in data.items()}}
    )
    state, kept = replace(method.start(setup), phase="train"), {}
    for round in range(rounds):
        updates = []
        for task in method.plan(setup, replace(state, round=round), setup.clients):
            result = run_task(task, context, kept.get(task.client))
            kept[task.client] = result.state
            updates.append(result.update)
        state = method.merge(setup, state, updates)
    return state.params["net.1.weight"]


def slope(line, weight: Tensor) -> list[Tensor]:
    """The gradient of each client's loss."""
    setup, data = line
    found = []
    for x, y in data.values():
        w = weight.clone().requires_grad_()
        loss = F.cross_entropy(setup.model[0](x) @ w.T, y)
        found += torch.autograd.grad(loss, w)
    return found


def test_feddyn_ends_where_the_losses_of_all_clients_do(line):
    """Where averaging ends elsewhere: each client goes to its own optimum, however often."""
    plain, dynamic = (sum(slope(line, after_rounds(line, 40, a))).norm() for a in (0.0, 0.1))
    assert 10 * dynamic < plain


def test_the_optimum_is_a_fixed_point_of_feddyn(line):
    setup, data = line
    best = setup.model[1].weight.detach().clone()
    for _ in range(800):
        best -= 2 * sum(slope(line, best))
    pulls = slope(line, best)
    assert sum(pulls).norm() < 1e-5 < 1e-2 < pulls[0].norm()
    method = fq.DepthFL(FULL, exit_modules=(), feddyn_alpha=0.1)
    setup = method.prepare_model(setup)
    context = ClientContext(
        setup.model, setup.structure, {"train": {i: to_examples(d) for i, d in data.items()}}
    )
    state = replace(method.start(setup), phase="train")
    state = replace(state, params={**state.params, "net.1.weight": best})
    updates = []
    for task, pull in zip(method.plan(setup, state, setup.clients), pulls, strict=True):
        result = run_task(task, context, {"net.1.weight": pull})
        torch.testing.assert_close(result.state["net.1.weight"], pull, rtol=0, atol=1e-5)
        updates.append(result.update)
    after = method.merge(setup, state, updates)
    torch.testing.assert_close(after.params["net.1.weight"], best, rtol=0, atol=1e-5)
    assert set(after.server_tensors) == {"net.1.weight"}  # what is frozen is not regularized
    assert after.server_tensors["net.1.weight"].norm() < 1e-5


def test_one_step_without_pull_is_plain_sgd(deep):
    """θ is still at its start, so both terms are zero; afterwards pull = α η ∇L."""
    world, _ = deep()
    one = replace(PLAIN, epochs=1, batch_size=16, weight_decay=0.0)
    plain = fq.DepthFL(one, exit_modules=AT)
    dynamic = replace(plain, feddyn_alpha=0.3)
    state = world.start(plain)
    tasks = [m.plan(world.setup, state, clients(world)[:1])[0] for m in (plain, dynamic)]
    assert isinstance(tasks[0].recipe, LocalSGD)
    assert tasks[1].recipe == FedDynTraining(tasks[0].recipe, 0.3)
    assert tasks[0].recipe.objective == ExitLosses(plain.consistency_weight(0))
    context = ClientContext(world.setup.model, world.setup.structure, world.people.data)
    first, second = (run_task(task, context, None) for task in tasks)
    assert first.state is None
    trained = second.update.params[0]
    for name, tensor in first.update.params[0].items():
        torch.testing.assert_close(trained[name], tensor)
    for name, pull in second.state.items():
        moved = trained[name] - state.params[name]
        torch.testing.assert_close(pull, -0.3 * moved)
