"""FedAvg, Standalone and LG-FedAvg."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Task
from fedquilt.federation.threads import single_thread
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import copy_subnet_tensors
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD


def test_fedavg_weighs_clients_by_their_examples(world, local_training):
    first, second = world.setup.clients[:2]
    uneven = world.with_clients(replace(first, num_examples=30), replace(second, num_examples=10))
    method = fq.FedAvg(local_training)
    state = uneven.start(method)
    tasks = method.plan(uneven.setup, state, uneven.setup.clients)
    one, other = (u.params[0] for u in uneven.done(tasks))
    after = method.merge(uneven.setup, state, uneven.done(tasks)).params
    for name, tensor in after.items():
        if tensor.is_floating_point():  # running statistics too
            expected = 0.75 * one[name] + 0.25 * other[name]
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


def test_fedavg_of_one_level_never_touches_the_rest(world, local_training):
    method = fq.FedAvg(local_training, width=0.5)
    state = world.start(method)
    after = world.round(method, state).params["features.0.weight"]
    assert not after[:4].equal(state.params["features.0.weight"][:4])
    assert after[4:].equal(state.params["features.0.weight"][4:])


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        # first convolution, second, normalisations with their statistics, classifier
        (fq.FedAvg, (9 * 4 + 4) + (9 * 4 * 2 + 2) + 4 * (4 + 2) + (4 * 2 + 4)),
        (fq.lg_fedavg, 4 * 2 + 4),
        (fq.standalone, 0),
    ],
)
def test_what_travels_is_the_shared_part_of_the_net(world, local_training, traffic, make, numbers):
    method = make(local_training, width=0.5)
    for task in method.plan(world.setup, world.start(method), world.setup.clients):
        (update,) = world.done([task])
        counters = 2 * 8 if make is fq.FedAvg else 0  # num_batches_tracked, as int64
        assert traffic(world, task, update) == (4 * numbers + counters,) * 2


def test_fedavg_on_batch_statistics_neither_sends_nor_gets_any_but_at_the_end(
    world, local_training
):
    method = fq.FedAvg(local_training, statistics="batch")
    here = world.prepare_model(method)
    first = here.start(method)
    tasks = method.plan(here.setup, first, here.setup.clients)
    parts = [part for update in here.done(tasks) for part in update.params]
    assert not any("running" in n or "tracked" in n for part in parts for n in part)
    state = here.round(method, first)
    statistics = here.setup.structure.statistics
    assert all(state.params[n].equal(first.params[n]) for n in statistics)
    assert [phase.name for phase in method.phases(here.setup)] == ["train", "statistics"]
    after = here.round(method, replace(state, phase="statistics"))
    assert {n for n, t in after.params.items() if not t.equal(state.params[n])} == statistics
    assert [phase.name for phase in fq.FedAvg().phases(here.setup)] == ["train"]
    with pytest.raises(ConfigError, match="'tracked' or 'batch', got 'post'"):
        fq.FedAvg(statistics="post")


def alone(world, method, client, rounds):
    """One client training by itself for some rounds, written without home, kept or engines."""
    structure, setup = world.setup.structure, world.setup
    subnet = structure.subnet(method.width)
    tensors = world.start(method).params
    context = ClientContext(setup.model, structure, world.people.data)
    for round in range(rounds):
        state = replace(world.start(method), round=round)
        (task,) = method.plan(setup, state, [client])
        recipe = LocalSGD(task.recipe.local_training, task.recipe.lr, client.labels)
        with single_thread():
            update = recipe.run(
                Task(client.id, (subnet,), tensors, recipe, task.seed), context
            ).update
        tensors = {n: t.clone() for n, t in tensors.items()}
        for name, t in update.params[0].items():
            tensors[name][tuple(slice(0, k) for k in t.shape)] = t
    return copy_subnet_tensors(tensors, structure, subnet)


@pytest.mark.parametrize("workers", [0, 2])
def test_standalone_clients_keep_their_own_model(world, local_training, same, workers):
    method = fq.standalone(replace(local_training, max_grad_norm=None), width=0.5)
    with world.engine(workers) as engine:
        state = world.start(method)
        for _ in range(3):
            state = world.round(method, state, engine)
        kept = {c.id: torch_file(engine, c.id) for c in world.setup.clients}
    assert same(state.params, world.start(method).params)  # the server learned nothing
    for client in world.setup.clients:
        expected = alone(world, method, client, 3)
        floats = [n for n, t in expected.items() if t.is_floating_point()]
        assert same(kept[client.id], expected, floats), client
    assert not same(kept[1], kept[2])


def torch_file(engine, client):
    from safetensors.torch import load_file

    return load_file(engine._states.current_path(client))


def test_the_output_layer_is_found_whatever_it_is_called():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    structure = fq.trace_structure(model, torch.zeros(1, 4))
    assert structure.match_names(fq.lg_fedavg().local_params) == {"0.weight", "0.bias"}


def test_lg_fedavg_shares_the_classifier_alone(world, local_training, same):
    method = fq.lg_fedavg(local_training, fraction=1.0)
    with world.engine() as engine:
        state = world.start(method)
        tasks = method.plan(world.setup, state, world.setup.clients)
        updates = world.done(tasks, engine)
        after = method.merge(world.setup, state, updates).params
        kept = {c.id: torch_file(engine, c.id) for c in world.setup.clients}
    shared = ["classifier.bias", "classifier.weight"]
    assert all(sorted(u.params[0]) == shared for u in updates)
    assert sorted(n for n in after if not after[n].equal(state.params[n])) == shared
    mean = sum(u.params[0]["classifier.bias"] for u in updates) / len(updates)
    torch.testing.assert_close(after["classifier.bias"], mean)
    assert all(not set(shared) & set(k) for k in kept.values())
    assert not same(kept[0], kept[1])


def test_lg_fedavg_goes_on_from_the_shared_classifier_and_its_own_layers(
    world, local_training, same
):
    method = fq.lg_fedavg(replace(local_training, lr=1e-30, weight_decay=0), fraction=1.0)
    training = fq.lg_fedavg(local_training, fraction=1.0)
    with world.engine() as engine:
        state = world.round(training, world.start(training), engine)
        before = {c.id: torch_file(engine, c.id) for c in world.setup.clients}
        still = world.round(method, state, engine)  # a round in which nobody learns
        after = {c.id: torch_file(engine, c.id) for c in world.setup.clients}
    learned = [n for n in before[0] if n.endswith(("weight", "bias"))]
    assert all(same(before[c], after[c], learned) for c in before)
    assert same(state.params, still.params)


def test_any_part_of_a_model_can_be_shared_but_it_must_exist(world, local_training):
    method = fq.lg_fedavg(local_training, shared=("features.3.*", "classifier.bias"))
    (task,) = method.plan(world.setup, world.start(method), [world.setup.clients[0]])
    names = world.setup.structure.tensor_names(task.subnets[0])
    assert sorted(names) == ["classifier.bias", "features.3.bias", "features.3.weight"]
    with pytest.raises(ConfigError, match=r"'head\.\*' is shared but names no tensor"):
        fq.lg_fedavg(local_training, shared=("head.*",)).prepare_model(world.setup)


# budgets


@pytest.mark.parametrize(
    "make", [fq.FedAvg, fq.standalone, fq.lg_fedavg, fq.fedavg_at, fq.fedavg_oat]
)
def test_within_budgets_all_train_the_width_that_all_can_afford(world, make):
    ignoring, keeping = make(), make(within_budgets=True)
    said = ignoring.exceeds_budgets(ignoring.prepare_model(world.setup))
    assert "the whole net is trained, and 3 of 4 clients can afford less" in said
    setup = keeping.prepare_model(world.setup)
    assert keeping.exceeds_budgets(setup) is None
    assert keeping.sizes(setup) == (0.25,)  # the smallest budget
    prepared = make(width=0.25).prepare_model(world.setup)
    assert setup.structure.shapes == prepared.structure.shapes
    state = replace(keeping.start(setup), phase="train")
    tasks = keeping.plan(setup, state, setup.clients)
    expected = make(width=0.25).plan(prepared, state, prepared.clients)
    assert [task.subnets for task in tasks] == [task.subnets for task in expected]


def test_within_budgets_a_smaller_width_stays(world):
    assert fq.FedAvg(width=0.125, within_budgets=True).sizes(world.setup) == (0.125,)


def test_physical_limits_are_budgets_too(world):
    whole = fq.compute_cost(
        world.setup.model, world.setup.structure, fq.Subnet(), world.setup.example
    )
    rich, poor = (
        replace(world.setup.clients[0], id=i, budget=Budget(params=whole.params - i))
        for i in range(2)
    )
    setup = world.with_clients(rich, poor).setup
    assert "1 of 2 clients" in fq.FedAvg().exceeds_budgets(setup)
    (width,) = fq.FedAvg(within_budgets=True).sizes(setup)
    subnet = setup.structure.subnet(width)
    assert poor.budget.allows(fq.compute_cost(setup.model, setup.structure, subnet, setup.example))
    assert fq.FedAvg(within_budgets=True).exceeds_budgets(setup) is None


def test_the_query_can_be_asked_for_or_left_out_and_needs_a_shared_model(world, local_training):
    setup = world.setup

    def names(method):
        return [phase.name for phase in method.phases(setup)]

    assert names(fq.FedAvg(local_training, query_statistics=True)) == ["train", "statistics"]
    assert names(fq.HeteroFL(local_training, query_statistics=False)) == ["train"]
    assert not fq.HeteroFL(local_training, query_statistics=False).has_statistics(setup)
    assert names(fq.FedAvg(local_training, local_params=("*",), query_statistics=True)) == ["train"]


def test_a_sample_of_many_clients_is_asked_and_what_none_can_afford_is_asked_of_all(world):
    method, few = fq.HeteroFL(), world.setup.clients
    many = tuple(replace(few[i % 4], id=i) for i in range(1000))
    (_, query) = method.phases(replace(world.setup, clients=many))
    assert query.count_needed(many) == 100
    poor = few[1:]  # a half and two quarters, where the whole was trained
    state = replace(world.start(method), phase="statistics")
    tasks = method.plan(world.setup, state, poor)
    assert [[s.owner for s in task.subnets] for task in tasks] == [
        ["1", "0.5", "0.25"],
        ["1", "0.25"],
        ["1", "0.25"],
    ]


@pytest.mark.parametrize("masked", [False, True, "batch"])
def test_fedavg_masks_the_loss_as_it_is_told(world, local_training, masked):
    method = fq.FedAvg(local_training, masked=masked)
    tasks = method.plan(world.setup, world.start(method), world.setup.clients)
    assert [task.recipe.masked for task in tasks] == [masked] * 4
    assert [task.recipe.labels for task in tasks] == [c.labels for c in world.setup.clients]
