"""APFL: three phases, architectures within budgets, statistics that stay at home."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.evaluation.accuracy import evaluate
from fedquilt.federation.client import SERVER, Failure
from fedquilt.federation.state import sample_cohort
from fedquilt.methods.apfl import HOME, with_private_statistics
from fedquilt.runs.loop import TrainingLoop
from fedquilt.runs.policies import Cadence
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.cut import build_module, global_name, load_tensors
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.sandwich import Sandwich
from fedquilt.training.search import Search

FREE = ("features.0", "features.3")  # the width groups of the net


@pytest.fixture
def method(local_training):
    return fq.APFL(local_training, warm_up=0.5, ratio=0.25)


def price(setup, subnet):
    return compute_cost(setup.model, setup.structure, subnet, setup.example)


def at(state, phase, round=0):
    return replace(state, phase=phase, round=round)


def searched(world, method):
    """The state after the search."""
    return world.round(method, at(method.start(world.setup), "search", 1))


def test_phases_are_warm_up_search_training_and_the_rounds_are_those_of_training(world, method):
    setup = replace(world.setup, rounds=20)
    warm, search, train, query = replace(method, warm_up=0.3, fraction=0.5).phases(setup)
    assert (warm.name, warm.rounds, warm.fraction) == ("warm-up", 6, 0.5)
    assert (search.name, search.rounds, search.fraction) == ("search", 1, 1.0)
    assert (train.name, train.rounds, train.fraction) == ("train", 20, 0.5)
    assert [phase.is_closing for phase in (warm, search, train, query)] == [False] * 3 + [True]


def test_clients_that_can_afford_the_whole_net_warm_it_up(world, method):
    warm, *_ = method.phases(world.setup)
    assert warm.restrict_to == (0,)
    for seed in range(5):
        assert [c.id for c in sample_cohort(world.setup.clients, warm, seed)] == [0]


def test_where_nobody_can_afford_the_whole_net_the_richest_do_it_or_nobody(world, method):
    whole = price(world.setup, fq.Subnet())
    limits = (
        fq.Budget(macs=whole.macs // 2),
        fq.Budget(params=whole.params // 4),
        fq.Budget(macs=whole.macs // 2),
        fq.Budget(0.3),
    )
    pairs = zip(world.setup.clients, limits, strict=True)
    poor = world.with_clients(*(replace(c, budget=b) for c, b in pairs))
    warm, *_ = method.phases(poor.setup)
    assert warm.restrict_to == (0, 2)
    with pytest.raises(BudgetError, match=r"no client can afford the whole net.*'richest'"):
        replace(method, warm_up_by="able").prepare_model(poor.setup)
    replace(method, warm_up_by="able").prepare_model(world.setup)


def test_every_phase_has_its_own_work(world, method):
    state = method.start(world.setup)
    for phase, recipe in (("warm-up", Sandwich), ("search", Search), ("train", LocalSGD)):
        tasks = method.plan(world.setup, at(state, phase), world.setup.clients)
        assert [type(task.recipe) for task in tasks] == [recipe] * 4
    warm, search = (
        method.plan(world.setup, at(state, phase), world.setup.clients[:1])[0]
        for phase in ("warm-up", "search")
    )
    assert warm.subnets == search.subnets == (fq.Subnet().excluding(*HOME),)
    assert warm.recipe.weight == 16
    assert search.recipe.budget == world.setup.clients[0].budget


def test_learning_rates_start_anew_with_training(world, method):
    falling = fq.LocalTraining(lr=1.0, epochs=1, round_decay=0.5)
    setup, method = replace(world.setup, rounds=4), replace(method, local_training=falling)
    state = method.start(setup)
    rates = [
        method.plan(setup, at(state, phase, round), setup.clients[:1])[0].recipe.lr
        for phase, round in (("warm-up", 0), ("warm-up", 1), ("train", 3), ("train", 5))
    ]
    assert rates == [1.0, 0.5, 1.0, 0.25]  # rounds 0, 1 | 2: search | 3 ... 6


def test_every_architecture_that_is_found_is_within_its_budget_and_no_tensor_is_sent(world, method):
    state = at(method.start(world.setup), "search", 1)
    updates = world.done(method.plan(world.setup, state, world.setup.clients))
    assert all(update.params == ({},) for update in updates)
    chosen = method.merge(world.setup, state, updates).chosen_subnets
    for client in world.setup.clients:
        own, uniform = chosen[client.id], world.setup.structure.subnet(client.budget.width)
        assert price(world.setup, own.shape).params <= price(world.setup, uniform).params
        assert price(world.setup, own.shape).macs <= price(world.setup, uniform).macs
        assert own == with_private_statistics(updates[client.id].subnets[0])
    assert chosen[0].shape == fq.Subnet()


@pytest.mark.parametrize("inherit", [True, False])
def test_training_starts_from_the_initial_values_or_from_those_of_the_warm_up(
    world, method, same, inherit
):
    method = replace(method, inherit=inherit)
    warm = world.round(method, at(method.start(world.setup), "warm-up"))
    initial = method.start(world.setup).params
    assert not same(warm.params, initial)
    after = world.round(method, at(warm, "search", 1))
    assert same(after.params, warm.params if inherit else initial)


def test_a_client_whose_search_failed_has_the_uniform_net_of_its_budget(world, method):
    state = at(method.start(world.setup), "search", 1)
    tasks = method.plan(world.setup, state, world.setup.clients)
    answers = [u for u in world.done(tasks) if u.client != 1]
    chosen = method.merge(world.setup, state, answers).chosen_subnets
    assert chosen[1].shape == world.setup.structure.subnet(0.5)
    assert sorted(chosen) == [0, 1, 2, 3]


def test_a_budget_that_nothing_can_meet_is_refused_before_anything_with_the_smallest_cost(
    world, method
):
    smallest = price(world.setup, world.setup.structure.subnet(0.25))
    tight = replace(world.setup.clients[2], budget=fq.Budget(params=smallest.params))
    method.prepare_model(world.with_clients(tight).setup)
    tighter = replace(tight, budget=fq.Budget(params=smallest.params - 1))
    with pytest.raises(BudgetError, match=rf"client 2: .*params={smallest.params}, .*bytes="):
        method.prepare_model(world.with_clients(world.setup.clients[0], tighter).setup)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warm_up_by": "all"}, "'richest' or 'able', got 'all'"),
        ({"warm_up": -0.1}, "at least 0, got -0.1"),
        ({"nets": 1}, "largest and smallest, got 1"),
        ({"smallest": 0.0}, r"smallest is a fraction in \(0, 1\), got 0.0"),
        ({"ratio": 1.0}, r"ratio is a fraction in \(0, 1\), got 1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        fq.APFL(**settings)


def test_groups_that_stay_whole_are_cut_in_no_client(world, local_training):
    method = fq.APFL(local_training, ratio=0.25, whole=("*.3",))
    chosen = searched(world, method).chosen_subnets
    assert all(subnet.count("features.3") is None for subnet in chosen.values())
    assert chosen[3].count("features.0") < 8
    uniform = fq.fed_uniform(local_training, whole=("*.3",)).start(world.setup).chosen_subnets
    assert uniform[1].kept == world.setup.structure.subnet({"features.0": 0.5}).kept
    with pytest.raises(ConfigError, match=r"'head' stays whole.*features\.0, features\.3"):
        fq.fed_uniform(local_training, whole=("head",)).start(world.setup)


def test_fed_uniform_has_the_widest_net_of_one_width_within_every_limit(world, local_training):
    whole = price(world.setup, fq.Subnet())
    budgets = (
        fq.Budget(macs=whole.macs // 3),
        fq.Budget(0.5),
        fq.Budget(params=whole.params // 2, macs=whole.macs - 1),
        fq.Budget(upload=whole.bytes // 3),
    )
    pairs = zip(world.setup.clients, budgets, strict=True)
    setup = world.with_clients(*(replace(c, budget=b) for c, b in pairs)).setup
    chosen = fq.fed_uniform(local_training).start(setup).chosen_subnets
    widths = sorted({k / 8 for k in range(1, 9)})
    for client in setup.clients:
        fitting = [
            width
            for width in widths
            if width <= client.budget.width
            and client.budget.allows(price(setup, setup.structure.subnet(width).excluding(*HOME)))
        ]
        assert chosen[client.id].shape == setup.structure.subnet(max(fitting))


def test_subnets_of_ones_own_are_trained_by_partial_averaging(world, local_training):
    """FedPA alone, against Algorithm 3: the mean over all clients of the round, by their data.

    A cell that a client does not hold is the server's; with ``Mean`` only its holders count.
    """
    structure = world.setup.structure
    subnets = (
        structure.subnet(),
        structure.subnet(channels={"features.0": [1, 2, 5]}),
        structure.subnet({"features.3": 0.5}),
        structure.subnet(0.25),
    )
    counts = (16, 4, 8, 2)
    pairs = zip(world.setup.clients, counts, strict=True)
    world = world.with_clients(*(replace(c, num_examples=n) for c, n in pairs))
    method = fq.FedPA(local_training, subnets=subnets)
    state = world.start(method)
    updates = world.done(method.plan(world.setup, state, world.setup.clients))
    after = method.merge(world.setup, state, updates).params
    name = "features.3.weight"
    total, weight = torch.zeros(4, 8, 3, 3), torch.zeros(4, 8, 1, 1)
    for update, subnet, count in zip(updates, subnets, counts, strict=True):
        rows = subnet.channels("features.3")
        columns = subnet.channels("features.0")
        rows = torch.arange(4) if rows is None else rows
        columns = torch.arange(8) if columns is None else columns
        total[rows[:, None], columns] += count * update.params[0][name]
        weight[rows[:, None], columns] += count
    assert (weight > 0).all()
    kept = (sum(counts) - weight) * state.params[name]
    torch.testing.assert_close(after[name], (total + kept) / sum(counts))
    holders = replace(method, aggregator=fq.Mean()).merge(world.setup, state, updates).params
    torch.testing.assert_close(holders[name], total / weight)
    with pytest.raises(ConfigError, match="there are 4 clients and 1 subnets"):
        fq.FedPA(local_training, subnets=subnets[:1]).start(world.setup)


def test_statistics_never_leave_a_client_and_are_those_of_its_own_net(world, method, tmp_path):
    state = searched(world, method)
    with LocalEngine(
        world.setup.model, world.setup.structure, world.people.data, workers=0, folder=tmp_path
    ) as engine:
        for round in (2, 3):
            tasks = method.plan(world.setup, at(state, "train", round), world.setup.clients)
            for update in world.done(tasks, engine):
                assert not any("running" in n or "tracked" in n for n in update.params[0])
        kept = {c: engine._states.current_path(c) for c in engine.client_versions()}
        assert sorted(kept) == [0, 1, 2, 3]
        from fedquilt.engines.client_state import read_client_state

        for client, path in kept.items():
            tensors = read_client_state(path)
            assert all(name.endswith("@own") for name in tensors)
            width = world.setup.structure.kept_count(state.chosen_subnets[client], "features.0")
            mean = tensors["features.1.running_mean@own"]
            assert mean.shape == (width,)
            assert mean.abs().sum() > 0
            assert int(tensors["features.1.num_batches_tracked@own"]) == 8  # 2 rounds of 4


def test_the_global_model_is_what_some_client_holds(world, method):
    poor = world.with_clients(*world.setup.clients[1:])  # nobody has all channels
    structure, state = poor.setup.structure, searched(poor, method)
    (held,) = method.ensemble(poor.setup, state, 1.0)
    for group in FREE:
        most = max(structure.kept_count(subnet, group) for subnet in state.chosen_subnets.values())
        assert structure.kept_count(held, group) == most
    (narrow,) = method.ensemble(poor.setup, state, 0.25)
    assert narrow == structure.subnet(0.25)
    (before,) = method.ensemble(poor.setup, method.start(poor.setup), 1.0)
    assert before == fq.Subnet()


@pytest.fixture
def trained(world, method, tmp_path):
    """A whole run, with its folder."""
    return fq.train(
        world.setup.model,
        world.setup.example,
        method,
        world.people,
        4,
        seed=3,
        workers=0,
        out=tmp_path / "run",
    )


def own_net(run, client):
    """A client's net, put together from the run's files."""
    from fedquilt.engines.client_state import read_client_state

    setup, subnet = run.setup, run.state.chosen_subnets[client]
    net = build_module(setup.model, setup.structure, subnet, run.state.params)
    (path,) = (run.folder / "clients").glob(f"client-{client}.{run.info.client_versions[client]}.*")
    kept = read_client_state(path)
    names = {global_name(n, setup.structure, subnet): n for n in named_tensors(net)}
    load_tensors(net, {names[n]: t for n, t in kept.items()})
    return net.eval()


def share(net, data):
    x, y = data.batch(torch.arange(len(data)))
    with torch.no_grad():
        return float((net(x).argmax(-1) == y).float().mean())


def test_loc_is_every_clients_own_net_on_its_own_test_data(trained, world):
    expected = [share(own_net(trained, c), world.people.test[c]) for c in range(4)]
    (score,) = trained.scores
    assert score.personal_accuracy == pytest.approx(sum(expected) / 4)
    again = trained.evaluate()
    assert again[0].personal_accuracy == score.personal_accuracy


def test_glo_is_the_global_net_with_statistics_of_the_clients_training_data(trained, world):
    setup = trained.setup
    (held,) = trained.method.ensemble(setup, trained.state, 1.0)
    expected, right, count = [], 0.0, 0
    for client in range(4):
        net = build_module(setup.model, setup.structure, held, trained.state.params)
        x, _ = world.people.train[client].batch(torch.arange(16))
        for layer in (net.features[1], net.features[4]):
            layer.momentum = 1.0
        with torch.no_grad():
            net.train()(x)  # all 16 in one batch: its mean and variance
        data = world.people.test[client]
        expected.append(share(net.eval(), data))
        right, count = right + expected[-1] * len(data), count + len(data)
    (score,) = trained.scores
    assert score.user_accuracy == pytest.approx(sum(expected) / 4)
    held_out = world.people.test[SERVER]
    assert score.accuracy == pytest.approx(share(trained.customize(), held_out))
    assert score.num_examples == len(held_out)
    silent = replace(trained.method, query_statistics=False)  # then there is no global model
    with world.engine() as engine:
        (by_clients,) = evaluate(
            setup, silent, trained.state, engine, has_server_test=True, testers=world.people.testers
        )
    assert by_clients.accuracy == pytest.approx(right / count)
    assert by_clients.num_examples == count


def test_a_clients_net_can_be_taken_and_the_global_one_has_the_mean_of_statistics(trained, world):
    x, _ = world.people.test[1].batch(torch.arange(5))
    with torch.no_grad():
        for client in range(4):
            mine = trained.customize(client=client)
            torch.testing.assert_close(mine(x), own_net(trained, client)(x))
        reopened = fq.open_run(trained.folder, trained.setup.model, trained.method)
        torch.testing.assert_close(reopened.customize(client=1)(x), own_net(trained, 1)(x))
        with pytest.warns(UserWarning, match=r"no client trained a model of size 0\.5"):
            small = trained.customize(width=0.5)
        assert small.features[0].out_channels == 4
        torch.testing.assert_close(small(x)[:1], small(x[:1]))
        name, layer = "features.1.running_mean", trained.customize().features[1]
        kept = [n for n in trained.state.params if n.startswith(name)]
        assert kept == [name]  # those of clients are not on the server
        assert not layer.running_mean.equal(trained.setup.model.features[1].running_mean)
        silent = replace(trained, method=replace(trained.method, query_statistics=False))
        with pytest.warns(UserWarning, match="every batch by itself"):
            bare = silent.customize()
        assert bare.features[1].running_mean is None
    with pytest.raises(
        ConfigError, match=r"client 7 has no net of its own; those that have are \[0, 1, 2, 3"
    ):
        trained.customize(client=7)


def test_methods_whose_clients_choose_nothing_have_no_nets_of_clients(world, local_training):
    run = fq.train(
        world.setup.model,
        world.setup.example,
        fq.HeteroFL(local_training),
        world.people,
        1,
        workers=0,
    )
    assert run.scores[0].personal_accuracy is None
    with pytest.raises(ConfigError, match="client 0 has no net of its own; no client has one"):
        run.customize(client=0)


def test_records_say_which_subnets_clients_chose(trained):
    *_, last = trained.read_clients()
    assert {client.client: client.returned for client in last} == {
        c: (s,) for c, s in trained.state.chosen_subnets.items()
    }


def test_a_run_that_is_resumed_in_another_phase_is_refused(world, method, tmp_path):
    def stop(event):
        if type(event).__name__ == "CheckpointSaved" and event.round == 3:
            raise KeyboardInterrupt

    def go(rounds, **more):
        return fq.train(
            world.setup.model,
            world.setup.example,
            method,
            world.people,
            rounds,
            workers=0,
            out=tmp_path / "run",
            cadence=Cadence(0, 1),
            **more,
        )

    with pytest.raises(KeyboardInterrupt):
        go(4, callbacks=[stop])  # 2 of warm-up, then the search
    with pytest.raises(ConfigError, match=r"was in its phase search; with 8 .* would be warm-up"):
        go(8, resume=True)
    assert go(4, resume=True).state.round == 7


def test_a_search_that_is_not_answered_does_not_stop_the_run(world, method):
    class Deaf(LocalEngine):
        def run(self, tasks):
            for task, result in zip(tasks, super().run(tasks), strict=True):
                lost = isinstance(task.recipe, Search) and task.client == 2
                yield Failure(2, "gone") if lost else result

    setup = world.setup
    with Deaf(setup.model, setup.structure, world.people.data, workers=0) as engine:
        state, _ = TrainingLoop(setup, method, engine, False, ()).run()
    assert state.chosen_subnets[2].shape == setup.structure.subnet(0.25)


def test_evaluation_without_test_data_of_clients_asks_everyone_about_the_servers(world, method):
    setup, state = world.setup, searched(world, method)
    with world.engine() as engine:
        (score,) = evaluate(setup, method, state, engine, has_server_test=True, testers=())
    assert score.num_examples == 12  # by the server's own statistics
    assert score.personal_accuracy is None
    silent = replace(method, query_statistics=False)
    with world.engine() as engine:
        (score,) = evaluate(setup, silent, state, engine, has_server_test=True, testers=())
    assert score.num_examples == 4 * 12


def test_layers_get_as_narrow_as_the_narrowest_budget_needs(world, method):
    def floors(*widths):
        pairs = zip(world.setup.clients, widths, strict=False)
        setup = world.with_clients(*(replace(c, budget=fq.Budget(w)) for c, w in pairs)).setup
        state = at(method.start(setup), "warm-up")
        warm = method.plan(setup, state, setup.clients)[0].recipe.smallest
        searches = method.plan(setup, at(state, "search"), setup.clients)
        return {warm, *(task.recipe.smallest for task in searches)}

    assert floors(1.0, 0.5) == {0.25}
    assert floors(1.0, 0.125) == {0.125}
    method = replace(method, smallest=0.5)
    assert floors(1.0, 0.6) == {0.5}


def test_a_run_that_is_refused_leaves_nothing_in_the_way_of_the_next(world, method, tmp_path):
    def go(budget):
        people = replace(
            world.people, clients=tuple(replace(c, budget=budget) for c in world.setup.clients)
        )
        setup = world.setup
        return fq.train(setup.model, setup.example, method, people, 1, workers=0, out=tmp_path)

    with pytest.raises(BudgetError, match="client 0: no architecture meets"):
        go(fq.Budget(params=1))
    assert go(fq.Budget(0.5)).scores


def test_the_global_model_may_be_what_several_clients_hold(world, local_training):
    structure = world.setup.structure
    subnets = tuple(structure.subnet({"features.0": w}) for w in (1.0, 0.75, 0.5, 0.25))
    for holders, count in ((1, 8), (2, 6), (3, 4), (4, 2), (9, 2)):
        method = fq.FedPA(local_training, subnets=subnets, holders=holders)
        (held,) = method.ensemble(world.setup, method.start(world.setup), 1.0)
        assert structure.kept_count(held, "features.0") == count
        assert structure.kept_count(held, "features.3") == 4


def test_what_a_killed_run_left_half_removed_is_gone_once_it_is_resumed(world, method, tmp_path):
    def stop(event):
        if type(event).__name__ == "CheckpointSaved" and event.round == 2:  # the last one
            raise KeyboardInterrupt

    def go(**more):
        setup = world.setup
        people, pace = world.people, Cadence(0, 1)
        fq.train(
            setup.model,
            setup.example,
            method,
            people,
            1,
            workers=0,
            out=tmp_path,
            cadence=pace,
            **more,
        )

    with pytest.raises(KeyboardInterrupt):
        go(callbacks=[stop])
    left = tmp_path / "checkpoints" / ".round-000000.old"
    left.mkdir()
    (left / "params.safetensors").write_bytes(b"half")
    go(resume=True)
    assert not left.exists()
