"""pFedMe: a client's own model near the one it sends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.engines.client_state import ClientStateStore
from fedquilt.engines.client_work import run_task
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Task
from fedquilt.learning.task import CLASSIFICATION, make_task
from fedquilt.runs.events import RoundDone
from fedquilt.structure.cut import load_tensors
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.context import ClientContext
from fedquilt.training.evaluate import Evaluate
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.loop import iterate_batches
from fedquilt.training.moreau import Moreau, personal_subnet

PLAIN = fq.LocalTraining(
    lr=0.05, momentum=0.0, weight_decay=0.0, epochs=1, batch_size=4, max_grad_norm=None
)


def uncut(net):
    """The structure of a layer that has no channels to cut."""
    return fq.declare_structure(net, {n: (None,) * w.ndim for n, w in net.named_parameters()})


def done(net, data, recipe, seed=5, kept=None, learned=CLASSIFICATION):
    """One client's work: what it sends, what it would itself use, and what it keeps."""
    context = ClientContext(net, uncut(net), {"train": {0: data}}, task=learned)
    params = {n: w.detach().clone() for n, w in net.named_parameters()}
    result = run_task(Task(0, (Subnet(),), params, recipe, seed), context, kept)
    assert result.local_model is not None
    (own,) = result.local_model[1]
    return result.update.params[0], own, result.state


def softmax_slopes(weight, bias, x, y):
    """The gradient of the mean cross entropy of one linear layer."""
    logits = x @ weight.T + bias
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(len(y)), y] -= 1
    return chances.T @ x / len(y), chances.mean(0)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_a_client_does_what_a_plain_loop_does(momentum, decay):
    torch.manual_seed(0)
    net = nn.Linear(3, 4).double()
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.arange(11) % 4
    settings = replace(PLAIN, momentum=momentum, weight_decay=decay, epochs=2)
    recipe = Moreau(settings, lr=0.07, steps=3, attraction=2.5, personal_lr=0.1)
    sent, own, _ = done(net, to_examples((x, y)), recipe)

    shared = [net.weight.detach().numpy().copy(), net.bias.detach().numpy().copy()]
    theta = [w.copy() for w in shared]
    speed = [np.zeros_like(w) for w in shared]
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        for rows in iterate_batches(11, 4, generator):
            some, labels = x[rows].numpy(), y[rows].numpy()
            for _ in range(3):
                slopes = softmax_slopes(*theta, some, labels)
                for i in range(2):
                    theta[i] -= 0.1 * (slopes[i] + 2.5 * (theta[i] - shared[i]))
            for i in range(2):
                slope = 2.5 * (shared[i] - theta[i]) + decay * shared[i]
                speed[i] = momentum * speed[i] + slope
                shared[i] -= 0.07 * speed[i]
    for name, w, t in zip(("weight", "bias"), shared, theta, strict=True):
        np.testing.assert_allclose(sent[name].numpy(), w, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(own[name].numpy(), t, rtol=1e-10, atol=1e-12)
        assert not np.allclose(w, t)


@pytest.mark.parametrize(("curve", "attraction"), [(1.0, 15.0), (4.0, 0.5)])
def test_a_quadratic_loss_has_closed_forms(curve, attraction):
    """f(θ) = a/2 (θ − c)²: θ = (a c + λ w) / (a + λ), and w − c shrinks by 1 − η λ a / (a + λ)."""
    centre, lr = 3.0, 0.02
    learned = make_task(lambda out, y: curve / 2 * (out - centre).square().mean())
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, -1.0)
    data = to_examples((torch.ones(6, 1, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)))
    recipe = Moreau(
        replace(PLAIN, batch_size=2),
        lr=lr,
        steps=300,
        attraction=attraction,
        personal_lr=0.5 / (curve + attraction),
    )
    sent, own, _ = done(net, data, recipe, learned=learned)
    shrink = 1 - lr * attraction * curve / (curve + attraction)
    before, after = (centre + (-1.0 - centre) * shrink**batches for batches in (2, 3))
    assert float(sent["weight"]) == pytest.approx(after, rel=1e-9)
    theta = (curve * centre + attraction * before) / (curve + attraction)
    assert float(own["weight"]) == pytest.approx(theta, rel=1e-9)


def test_nobody_learns_whose_own_model_stays_where_it_is(world, same):
    method = fq.PFedMe(PLAIN, personal_lr=0.0)
    here = world.prepare_model(method)
    state = here.start(method)
    assert same(state.params, here.round(method, state).params)


def test_with_all_attraction_it_is_sgd():
    """A step at the rate 1/λ leads to θ = w − ∇f/λ from wherever it starts, and w goes η ∇f down.

    The first brings θ from the last batch to w, the second finds the gradient there.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    data = to_examples((torch.randn(22, 3, dtype=torch.float64), torch.arange(22) % 4))
    settings = replace(PLAIN, lr=0.3, epochs=2)
    context = ClientContext(net, uncut(net), {"train": {0: data}})
    start = {n: w.detach().clone() for n, w in net.named_parameters()}
    task = Task(0, (Subnet(),), start, LocalSGD(settings, lr=0.3), 5)
    expected = run_task(task, context, None).update.params[0]

    def off(attraction):
        recipe = Moreau(
            settings, lr=0.3, steps=2, attraction=attraction, personal_lr=1 / attraction
        )
        sent, _, _ = done(net, data, recipe)
        gaps = sum(float((sent[n] - expected[n]).norm()) for n in expected)
        return gaps / sum(float((start[n] - expected[n]).norm()) for n in expected)

    assert off(1e6) < 1e-5
    assert off(1e4) == pytest.approx(100 * off(1e6), rel=0.1)


@pytest.mark.parametrize("beta", [1.0, 0.3, 1.5])
def test_the_server_goes_beta_of_the_way_to_the_mean_and_all_clients_count_alike(world, beta):
    method = fq.PFedMe(PLAIN, beta=beta)
    clients = (replace(c, num_examples=1 + 100 * c.id) for c in world.setup.clients)
    here = world.with_clients(*clients).prepare_model(method)
    state = here.start(method)
    updates = here.done(method.plan(here.setup, state, here.setup.clients))
    after = method.merge(here.setup, state, iter(updates)).params
    for name in here.setup.structure.tensor_names(updates[0].subnets[0]):
        old = state.params[name]
        mean = torch.stack([u.params[0][name].double() for u in updates]).mean(0)
        expected = (1 - beta) * old.double() + beta * mean
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-5, atol=1e-6)
    assert not after["classifier.weight"].equal(state.params["classifier.weight"])


def test_a_client_keeps_its_own_model_and_starts_again_from_the_servers(world, same):
    recipe = Moreau(PLAIN, lr=0.05)
    torch.manual_seed(1)
    net, data = nn.Linear(3, 4), to_examples((torch.randn(9, 3), torch.arange(9) % 4))
    sent, own, kept = done(net, data, recipe)
    assert kept.keys() == {"weight@own", "bias@own"}
    assert all(kept[f"{n}@own"].equal(own[n]) and not own[n].equal(sent[n]) for n in own)
    again, _, _ = done(net, data, recipe, kept={n: t + 1 for n, t in kept.items()})
    assert same(again, sent)


def test_only_what_is_kept_as_the_clients_own_is_its_model():
    """A recipe may keep other tensors, which are no part of any model."""
    torch.manual_seed(1)
    net = nn.Linear(3, 4)
    params = {n: w.detach() + 1 for n, w in net.named_parameters()}
    state = {"weight": torch.zeros(4, 3), "weight@own": torch.full((4, 3), 7.0)}
    context = ClientContext(net, uncut(net), {}).for_client(state)
    assert context.module(Subnet(), params).weight.equal(params["weight"])
    mine = context.module(personal_subnet(Subnet()), params)
    assert mine.weight.eq(7).all()
    assert mine.bias.equal(params["bias"])  # not kept yet: the server's


def accuracy(module, data):
    x, y = data.batch(torch.arange(len(data)))
    with torch.no_grad():
        return float((module.eval()(x).argmax(-1) == y).double().mean())


@pytest.mark.parametrize("workers", [0, 2])
def test_own_models_are_evaluated_and_can_be_taken(world, tmp_path, workers):
    method = fq.PFedMe(PLAIN, fraction=0.5, attraction=0.5, personal_lr=0.2)
    setup, people = world.setup, world.people
    events = []
    run = fq.train(
        setup.model,
        setup.example,
        method,
        people,
        1,
        workers=workers,
        out=tmp_path / "run",
        callbacks=[events.append],
        cadence=fq.Cadence(test_locally=True),
    )
    (local,) = (event.local for event in events if isinstance(event, RoundDone))
    versions = run.info.client_versions
    assert len(versions) == 4  # all have statistics of their own, at last
    assert len(local) == 2  # those that took part
    (score,) = run.scores
    found, shared = [], run.customize()
    for client in people.testers:
        module = run.customize(client=client)
        if client in local:
            path = ClientStateStore(tmp_path / "run" / "clients").path(client, versions[client])
            theta = {n.removesuffix("@own"): t for n, t in load_file(path).items()}
            tensors = named_tensors(module)
            assert theta.keys() == tensors.keys()
            assert all(t.equal(tensors[n]) for n, t in theta.items())
            assert not theta["classifier.bias"].equal(shared.classifier.bias)
        else:
            assert module.classifier.bias.equal(shared.classifier.bias)
        found.append(accuracy(module, people.test[client]))
    assert score.personal_accuracy == pytest.approx(sum(found) / len(found))
    own = [accuracy(shared, people.test[client]) for client in people.testers]
    assert score.user_accuracy == pytest.approx(sum(own) / len(own))
    assert run.evaluate(workers=0) == run.scores
    again = fq.open_run(tmp_path / "run", setup.model, method)
    assert again.evaluate(people, workers=0) == run.scores


def test_own_models_answer_as_they_were_when_the_client_last_took_part(world):
    """An evaluation by hand, of a client whose own model was made to give one answer."""
    here = world.prepare_model(fq.PFedMe(PLAIN))
    context = ClientContext(here.setup.model, here.setup.structure, here.people.data)
    params = here.start(fq.PFedMe()).params
    module = context.module(Subnet(), params)
    answer = torch.tensor([0.0, 0.0, 0.0, 9.0])
    load_tensors(module, {"classifier.bias": answer, "classifier.weight": torch.zeros(4, 4)})
    state = context.next_client_state([module], [personal_subnet(Subnet())], ("*",))
    task = Task(3, (personal_subnet(Subnet()),), params, Evaluate(), 0)
    update = run_task(task, context, state).update
    assert update.metrics["hits:0"] == update.metrics["examples"] == 5  # client 3 has class 3 alone


def test_settings_reach_the_clients_and_senseless_ones_are_refused(world):
    method = fq.PFedMe(PLAIN, steps=7, attraction=3.0, personal_lr=0.02)
    here = world.prepare_model(method)
    (task,) = method.plan(here.setup, here.start(method), here.setup.clients[:1])
    assert task.recipe == Moreau(PLAIN, 0.05, steps=7, attraction=3.0, personal_lr=0.02)
    names = here.setup.structure.tensor_names(task.subnets[0])
    assert not any("running" in name or "tracked" in name for name in names)
    with pytest.raises(ConfigError, match=r"steps counts .* got 0"):
        fq.PFedMe(steps=0)
    with pytest.raises(ConfigError, match="attraction is above 0, got -1"):
        fq.PFedMe(attraction=-1.0)
    with pytest.raises(ConfigError, match="beta is above 0, got 0"):
        fq.PFedMe(beta=0.0)
