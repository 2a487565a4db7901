"""HeteroFL, beside its paper."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client
from fedquilt.federation.state import Setup
from fedquilt.models.heterofl import CNN, NORMS
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.training.statistics import QueryStatistics

LEVELS = (1.0, 0.5, 0.25, 0.125, 0.0625)


def test_fixed_widths_are_what_budgets_allow(world):
    method = fq.HeteroFL()
    clients = world.setup.clients
    for round in (0, 5):
        widths = [method.choose_width(world.setup, round, c) for c in clients]
        assert widths == [1.0, 0.5, 0.25, 0.25]
    limited = Client(9, 1, (0,), Budget(params=100))
    width = method.choose_width(world.setup, 0, limited)
    model, structure, example = world.setup.model, world.setup.structure, world.setup.example
    sizes = [
        fq.compute_cost(model, structure, structure.subnet(w), example).params
        for w in (width, width + 0.125)
    ]
    assert sizes[0] <= 100 < sizes[1]


def test_dynamic_widths_are_redrawn_uniformly_every_round(world):
    method = fq.HeteroFL(assignment="dynamic", widths=LEVELS)
    clients = [Client(i, 1) for i in range(20)]
    draws = [[method.choose_width(world.setup, r, c) for c in clients] for r in range(250)]
    counts = Counter(w for row in draws for w in row)
    # 5000 draws of 5 levels: mean 1000, standard deviation 28.3
    assert all(abs(counts[w] - 1000) < 5 * 28.3 for w in LEVELS)
    for i in range(20):  # every client sees every level
        assert {row[i] for row in draws} == set(LEVELS)
    again = [method.choose_width(world.setup, 17, c) for c in clients]
    assert again == draws[17]
    other = replace(world.setup, seed=4)
    assert [method.choose_width(other, 17, c) for c in clients] != again


def test_phases_end_with_a_query_only_where_there_are_statistics(world):
    method = fq.HeteroFL(fraction=0.3)
    train, query = method.phases(world.setup)
    assert (train.name, train.rounds, train.fraction, train.is_closing) == ("train", 2, 0.3, False)
    assert (query.rounds, query.fraction, query.is_closing) == (1, 1.0, True)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    bare = replace(world.setup, structure=fq.trace_structure(plain, torch.zeros(2, 4)), model=plain)
    assert [p.name for p in method.phases(bare)] == ["train"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, ["0.25"]),
        ({"query_everyone": True}, ["1", "0.5", "0.25"]),
        ({"assignment": "dynamic", "widths": (1.0, 0.5)}, ["1", "0.5"]),
    ],
)
def test_the_query_asks_a_client_for_the_sizes_it_can_afford_or_for_all(world, options, asked):
    method = fq.HeteroFL(statistics_batch=7, **options)
    state = replace(method.start(world.setup), phase="statistics")
    *_, task = method.plan(world.setup, state, world.setup.clients[:3])
    assert task.recipe == QueryStatistics(7, scale=True)
    assert [s.owner for s in task.subnets] == asked


def test_training_leaves_statistics_out_and_takes_the_leading_channels(world):
    method = fq.HeteroFL()
    state = world.start(method)
    (task,) = method.plan(world.setup, state, [world.setup.clients[1]])
    sent = copy_subnet_tensors(task.params, world.setup.structure, task.subnets[0])
    assert not set(sent) & world.setup.structure.statistics
    assert sent["features.0.weight"].equal(state.params["features.0.weight"][:4])
    assert sent["features.3.weight"].equal(state.params["features.3.weight"][:2, :4])
    assert sent["classifier.weight"].equal(state.params["classifier.weight"][:, :2])


def test_only_rows_of_the_clients_classes_move(world, local_training):
    method = fq.HeteroFL(local_training)
    small = world.with_clients(world.setup.clients[1])  # classes 0 and 1
    state = small.start(method)
    after = small.round(method, state).params
    for name in ("classifier.weight", "classifier.bias"):
        moved = (after[name] != state.params[name]).reshape(4, -1).any(1)
        assert moved.tolist() == [True, True, False, False]


def test_rows_of_a_class_are_averaged_over_its_holders_alone(world, local_training):
    method = fq.HeteroFL(local_training)
    state = world.start(method)
    tasks = method.plan(world.setup, state, world.setup.clients)
    updates = world.done(tasks)
    after = method.merge(world.setup, state, updates).params["classifier.bias"]
    rows = {0: (0, 1), 1: (0, 1, 2), 2: (0, 2), 3: (0, 3)}  # class -> clients that have it
    for label, holders in rows.items():
        sent = [
            updates[c].params[0]["classifier.bias"][world.setup.clients[c].labels.index(label)]
            for c in holders
        ]
        torch.testing.assert_close(after[label], torch.stack(sent).mean())


def finished(world, method, local_training):
    state = world.round(method, world.start(method))
    closing = replace(state, phase="statistics")
    return world.round(method, closing)


def test_every_size_is_customized_with_its_own_statistics(world, local_training):
    method = fq.HeteroFL(local_training)
    state = finished(world, method, local_training)
    structure = world.setup.structure
    for width, owner in ((1.0, "1"), (0.5, "0.5"), (0.25, "0.25"), (0.4, "0.5"), (0.1, "0.25")):
        small = build_module(
            world.setup.model, structure, method.subnet(world.setup, width), state.params
        )
        for name, statistic in small.named_buffers():
            if name in structure.statistics:
                expected = state.params[f"{name}@{owner}"][: len(statistic)]
                assert statistic.equal(expected), (width, name)
    wide, narrow = (state.params[f"features.4.running_mean@{w}"][0] for w in ("1", "0.25"))
    assert wide != narrow


def test_a_width_above_all_that_was_trained_uses_the_largest(world):
    method = fq.HeteroFL(widths=(0.5, 0.25))
    assert method.sizes(world.setup) == (0.5, 0.25)
    assert method.subnet(world.setup, 1.0).owner == "0.5"


def test_sizes_are_those_that_budgets_allow(world):
    assert fq.HeteroFL().sizes(world.setup) == (1.0, 0.5, 0.25)
    narrow = replace(world.setup, clients=world.setup.clients[2:])
    assert fq.HeteroFL().sizes(narrow) == (0.25,)


def test_the_learning_rate_of_a_round_follows_the_milestones(world):
    method = fq.HeteroFL(fq.LocalTraining(lr=0.1, milestones=(2,)))
    rates = []
    for round in (0, 1, 2, 3):
        state = replace(world.start(method), round=round)
        (task,) = method.plan(world.setup, state, [world.setup.clients[0]])
        rates.append(task.recipe.lr)
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01])


def test_clients_and_rounds_have_seeds_of_their_own(world):
    method = fq.HeteroFL()
    seeds = {
        method.plan(setup, replace(world.start(method), round=r), [c])[0].seed
        for setup in (world.setup, replace(world.setup, seed=4))
        for r in range(3)
        for c in setup.clients
    }
    assert len(seeds) == 2 * 3 * 4


def numbers_of(width: float, rows: int) -> int:
    """Learned numbers of the net, counted by hand."""
    first, second = (max(1, round(width * size)) for size in (8, 4))
    convolutions = (9 * first + first) + (9 * first * second + second)
    return convolutions + 2 * (first + second) + rows * second + rows


COUNTERS = 2 * 8  # num_batches_tracked of two normalisation layers, as int64


def test_what_travels_is_the_leading_channels_and_own_rows_back(world, local_training, traffic):
    method = fq.HeteroFL(local_training)
    for task in method.plan(world.setup, world.start(method), world.setup.clients):
        client = world.setup.clients[task.client]
        (update,) = world.done([task])
        down, up = (4 * numbers_of(client.budget.width, n) for n in (4, len(client.labels)))
        assert traffic(world, task, update) == (down, up)


def test_the_query_sends_whole_nets_and_gets_statistics_alone(world, local_training, traffic):
    method = fq.HeteroFL(local_training)
    state = replace(world.start(method), phase="statistics")
    for task in method.plan(world.setup, state, world.setup.clients):
        limit = world.setup.clients[task.client].budget.width
        widths = [width for width in method.sizes(world.setup) if width <= limit]
        statistics = {1.0: 4 * 2 * 12, 0.5: 4 * 2 * 6, 0.25: 4 * 2 * 3}
        (update,) = world.done([task])
        up = sum(statistics[w] for w in widths)
        down = up + sum(4 * numbers_of(w, 4) + COUNTERS for w in widths)
        assert traffic(world, task, update) == (down, up)


def test_one_client_is_local_sgd(world, local_training):
    method = fq.HeteroFL(local_training)
    alone = world.with_clients(world.setup.clients[0])
    state = alone.start(method)
    (update,) = alone.done(method.plan(alone.setup, state, [alone.setup.clients[0]]))
    after = alone.round(method, state).params
    for name, tensor in update.params[0].items():
        if tensor.is_floating_point():
            torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-7)


def test_full_width_without_its_switches_is_fedavg_bit_for_bit(world, local_training, same):
    wide = tuple(replace(c, budget=Budget(1.0)) for c in world.setup.clients)
    world = world.with_clients(*wide)
    methods = (
        fq.HeteroFL(local_training, masked=False, own_rows=False),
        fq.FedAvg(local_training),  # weighted by examples, of which all clients have 16
    )
    found = []
    for method in methods:
        state = world.start(method)
        for _ in range(2):
            state = world.round(method, state)
        found.append(state.params)
    learned = dict(world.setup.model.named_parameters())
    assert same(found[0], found[1], learned)


SWITCHES = {"masked": False, "own_rows": False, "scaler": False}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_what_it_names_and_nothing_else(world, local_training, switch):
    on, off = fq.HeteroFL(local_training), fq.HeteroFL(local_training, **{switch: False})
    state = world.start(on)
    recipe_name = "scale" if switch == "scaler" else switch
    for client in world.setup.clients:
        (one,), (other,) = (m.plan(world.setup, state, [client]) for m in (on, off))
        assert (one.client, one.subnets, one.seed) == (other.client, other.subnets, other.seed)
        assert getattr(one.recipe, recipe_name) is True
        assert replace(one.recipe, **{recipe_name: False}) == other.recipe


def test_what_the_switches_do_to_an_update(world, local_training, same):
    client = world.setup.clients[1]
    base = dict.fromkeys(SWITCHES, False)

    def update(**switches):
        method = fq.HeteroFL(local_training, **{**base, **switches})
        return world.done(method.plan(world.setup, world.start(method), [client]))[0].params[0]

    plain, rows = update(), update(own_rows=True)
    assert plain["classifier.bias"].shape == (4,)
    assert rows["classifier.bias"].equal(plain["classifier.bias"][[0, 1]])
    assert same(rows, plain, [n for n in plain if not n.startswith("classifier")])
    assert not same(update(masked=True), plain, ["classifier.bias"])
    assert not same(update(scaler=True), plain, ["features.0.weight"])
    foreign = update(masked=True)["classifier.bias"][[2, 3]]
    before = world.start(fq.HeteroFL()).params["classifier.bias"][[2, 3]]
    decayed = before * (1 - 0.05 * 5e-4) ** 4  # no gradient, so only decay could move it
    torch.testing.assert_close(foreign, decayed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_every_normalisation_of_the_ablation_trains(world, norm, local_training):
    torch.manual_seed(0)
    net, example = CNN(num_classes=4, width=0.0625, norm=norm), torch.zeros(2, 1, 8, 8)
    structure = fq.trace_structure(net, example)
    setup = Setup(net, structure, example, world.setup.clients, 2, 0)
    people = world.people
    for split in (people.train, people.test):
        for c, data in split.items():
            padded = torch.nn.functional.pad(data.inputs, (1, 2, 1, 2))
            split[c] = type(data)(padded, data.labels)
    here = type(world)(setup, people)
    method = fq.HeteroFL(local_training)
    assert bool(structure.statistics) == (norm == "batch")
    state = here.start(method)
    for _ in range(2):
        state = here.round(method, state)
    learned = dict(net.named_parameters())
    assert all(state.params[n].isfinite().all() for n in learned)
    assert all(not state.params[n].equal(t) for n, t in learned.items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"assignment": "dynamic"}, "widths"),
        ({"assignment": "random"}, "'random'"),
        ({"widths": (0.5, 2)}, "got 2"),
        ({"widths": (0.0,)}, "got 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        fq.HeteroFL(**settings)


def test_it_is_said_that_everyone_is_asked_for_all_statistics(world):
    assert fq.HeteroFL().exceeds_budgets(world.setup) is None
    said = fq.HeteroFL(query_everyone=True).exceeds_budgets(world.setup)
    assert "3 of 4 clients are asked for statistics of nets up to width 1 at the end" in said
    dynamic = fq.HeteroFL(assignment="dynamic", widths=(0.25, 0.125))
    assert dynamic.exceeds_budgets(world.setup) is None  # all can afford all of these
