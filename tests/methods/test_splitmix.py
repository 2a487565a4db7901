"""Split-Mix, beside its paper."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.customize.ensemble import Ensemble
from fedquilt.data import to_examples
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.evaluation.accuracy import evaluate
from fedquilt.federation.client import SERVER, Client, Update, derive_seed
from fedquilt.federation.state import Setup, State, sample_cohort
from fedquilt.methods.splitmix import shuffle_deck
from fedquilt.runs import checkpoint
from fedquilt.runs.checkpoint import Checkpoint
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.cut import build_module, load_tensors
from fedquilt.structure.structure import NORMS, STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.training.loop import iterate_batches
from fedquilt.training.objectives import Adversarial, PlainLoss
from fedquilt.training.scaler import scale_outputs
from fedquilt.training.statistics import QueryStatistics


@pytest.fixture(scope="module")
def little() -> Setup:
    """For questions about who trains what, which no tensor answers."""
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    example = torch.zeros(2, 4)
    return Setup(net, fq.trace_structure(net, example), example, (), rounds=9, seed=0)


# Algorithm 2: SampleBaseModels

BASES = {1.0: "1", 0.7: "7/10", 0.5: "1/2", 1 / 3: "1/3", 0.3: "3/10", 0.25: "1/4", 0.125: "1/8"}


def visits(little, numbers, method, budgets, seed, rounds) -> list[list[int]]:
    """The bases of one client after another, over rounds as the loop makes them."""
    clients = tuple(Client(i, 1, (), Budget(w)) for i, w in enumerate(budgets))
    setup = method.prepare_model(replace(little, clients=clients, seed=seed))
    state = State(0, "train", {}, {"visits": 0, "together": False})
    found = []
    for round in range(rounds):
        cohort = sample_cohort(setup.clients, method.phases(setup)[0], derive_seed(seed, round))
        tasks = method.plan(setup, replace(state, round=round), cohort)
        assert [task.client for task in tasks] == [client.id for client in cohort]
        found += [numbers(task) for task in tasks]
        state = method.merge(setup, state, [])
    return found


@settings(max_examples=80, deadline=None)
@given(
    base=st.sampled_from(sorted(BASES)),
    budgets=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    fraction=st.floats(0.01, 1),
    seed=st.integers(0, 2**32),
)
def test_every_deck_deals_every_base_once(little, numbers, base, budgets, fraction, seed):
    """M visits that start at a multiple of M have each base as their first, whatever else."""
    method = fq.SplitMix(base=base, fraction=fraction, stacked=False)
    exact = Fraction(BASES[base])
    widths = [max(Fraction(k, 24), exact) for k in budgets]
    rounds = math.ceil(20 / max(1, round(fraction * len(budgets))))
    slim = visits(little, numbers, method, [base] * len(widths), seed, rounds)
    firsts = [first for (first,) in slim]  # the budget of one base leaves no choice
    count = math.floor(1 / exact)
    for start in range(0, len(firsts), count):
        stretch = firsts[start : start + count]
        assert len(set(stretch)) == len(stretch)
        assert set(stretch) <= set(range(count))
    mixed = visits(little, numbers, method, [float(w) for w in widths], seed, rounds)
    sizes = Counter(min(count, math.floor(w / exact)) for w in widths)
    for first, chosen in zip(firsts, mixed, strict=True):
        assert first in chosen
        assert len(set(chosen)) == len(chosen)
        assert len(chosen) in sizes
        assert set(chosen) <= set(range(count))


def test_a_client_trains_as_many_bases_as_its_budget_holds(little, numbers):
    method = fq.SplitMix(base=0.125, stacked=False)
    found = visits(little, numbers, method, [0.125, 0.25, 0.3, 0.5, 0.99, 1.0], 0, 4)
    assert [len(chosen) for chosen in found] == [1, 2, 2, 4, 7, 8] * 4


def test_other_bases_are_drawn_uniformly_without_replacement(little, numbers):
    method = fq.SplitMix(base=0.125, stacked=False)
    client = Client(5, 1, (), Budget(0.375))
    setup = method.prepare_model(replace(little, clients=(client,)))
    state = State(0, "train", {}, {"visits": 11, "together": False})
    first = shuffle_deck(setup.seed, 1, 8)[3]
    tasks = [method.plan(setup, replace(state, round=r), setup.clients)[0] for r in range(3000)]
    pairs = Counter(tuple(sorted(set(numbers(task)) - {first})) for task in tasks)
    others = [i for i in range(8) if i != first]
    assert set(pairs) == set(itertools.combinations(others, 2))
    # 21 pairs: mean 142.9, standard deviation 11.7
    assert all(abs(count - 3000 / 21) < 5 * 11.7 for count in pairs.values())


def test_others_are_drawn_anew_for_every_client(little, numbers):
    method = fq.SplitMix(base=0.125, stacked=False)
    found = visits(little, numbers, method, [0.5] * 40, 0, 1)
    assert len({tuple(chosen) for chosen in found}) > 20  # of 70


def test_decks_are_shuffled_uniformly_and_by_the_seed():
    counts = Counter(tuple(shuffle_deck(0, number, 3)) for number in range(3000))
    assert set(counts) == set(itertools.permutations(range(3)))
    # mean 500, standard deviation 20.4
    assert all(abs(count - 500) < 5 * 20.4 for count in counts.values())
    assert [shuffle_deck(0, n, 8) for n in range(5)] != [shuffle_deck(1, n, 8) for n in range(5)]


@pytest.fixture
def dealt(world, local_training):
    """Three clients a round and a deck of four."""
    method = fq.SplitMix(local_training, fraction=0.75, base=0.25, stacked=False)
    return method, world.prepare_model(method)


def cohort_of(world, round):
    return [c for c in world.setup.clients if c.id != round % 4]


def test_the_place_in_the_deck_survives_a_checkpoint(dealt, numbers, tmp_path):
    method, world = dealt
    state, found, kept = world.start(method), [], []
    for round in range(5):
        state = replace(state, round=round, phase="train")
        path = checkpoint.save_checkpoint(tmp_path, Checkpoint(state, {}), "same")
        resumed = checkpoint.load_checkpoint(path).state
        cohort = cohort_of(world, round)
        found.append([numbers(t) for t in method.plan(world.setup, state, cohort)])
        kept.append([numbers(t) for t in method.plan(world.setup, resumed, cohort)])
        state = method.merge(world.setup, state, [])
        assert state.method_state["visits"] == 3 * (round + 1)
    assert found == kept
    firsts = [shuffle_deck(3, visit // 4, 4)[visit % 4] for visit in range(15)]
    chosen = [some for round in found for some in round]
    assert all(first in some for first, some in zip(firsts, chosen, strict=True))


def test_clients_that_fail_do_not_disturb_the_deck(dealt, numbers):
    method, world = dealt
    state = world.start(method)
    updates = world.done(method.plan(world.setup, state, cohort_of(world, 0)))
    states = [method.merge(world.setup, state, some) for some in (updates, updates[1:], [])]
    plans = [
        [numbers(t) for t in method.plan(world.setup, replace(s, round=1), cohort_of(world, 1))]
        for s in states
    ]
    assert plans[0] == plans[1] == plans[2]


def test_a_closing_phase_moves_no_card(world, local_training):
    method = fq.SplitMix(
        local_training, base=0.25, statistics="post", sort_bases=True, stacked=False
    )
    world = world.prepare_model(method)
    state = replace(world.start(method), phase="statistics")
    assert world.round(method, state).method_state == state.method_state
    state = replace(state, phase="sort")
    assert world.round(method, state).method_state == state.method_state


# Algorithm 1: aggregation


@pytest.mark.parametrize("who", [(0, 1, 2, 3), (2, 3)])
def test_bases_are_averaged_as_algorithm_1_writes_it(world, local_training, who):
    sizes = (30, 10, 25, 4)
    clients = [replace(world.setup.clients[k], num_examples=sizes[k]) for k in who]
    method = fq.SplitMix(local_training, base=0.25, statistics="tracked", stacked=False)
    world = world.with_clients(*clients).prepare_model(method)
    state = world.start(method)
    tasks = method.plan(world.setup, state, world.setup.clients)
    updates = world.done(tasks)
    sums = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in state.params.items()}
    c = [0] * 4
    for client, task, update in zip(clients, tasks, updates, strict=True):
        for subnet, base in zip(task.subnets, update.params, strict=True):
            for name, w in base.items():
                sums[f"{name}@{subnet.owner}"] += w.double() * client.num_examples
            c[int(subnet.owner)] += client.num_examples
    after = method.merge(world.setup, state, updates).params
    assert after.keys() == state.params.keys()
    assert 0 in c or len(who) == 4
    for name, tensor in after.items():
        i = int(name.partition("@")[2])
        if not tensor.is_floating_point() or c[i] == 0:  # a base that nobody trained
            assert tensor.equal(state.params[name])
        else:
            expected = (sums[name] / c[i]).to(tensor.dtype)
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("base", "count"),
    [(1, 1), (0.51, 1), (0.5, 2), (0.4, 2), (0.34, 2), (1 / 3, 3), (0.3, 3), (0.15, 6), (0.125, 8),
     (1 / 7, 7), (0.1, 10), (0.07, 14), (1 / 49, 49), (0.16666666667, 6)],
)  # fmt: skip
def test_there_are_as_many_bases_as_fit_into_the_whole(world, base, count):
    method = fq.SplitMix(base=base, stacked=False)
    assert method.num_bases == count
    wide = world.with_clients(replace(world.setup.clients[0], budget=Budget(1.0)))
    setup = wide.prepare_model(method).setup
    state = replace(method.start(setup), phase="train")
    (task,) = method.plan(setup, state, setup.clients)
    assert len(task.subnets) == count
    sizes = method.sizes(setup)
    assert sizes == pytest.approx([k * base for k in range(count, 0, -1)])
    assert [len(method.ensemble(setup, state, width)) for width in sizes] == list(
        range(count, 0, -1)
    )
    assert max(sizes) <= 1
    assert len(method.ensemble(setup, state, 1.0)) == count


@pytest.mark.parametrize(("widest", "count"), [(0.5, 4), (0.375, 3), (0.125, 1), (1.0, 8)])
def test_within_budgets_there_are_no_more_bases_than_a_client_can_train(
    little, numbers, widest, count
):
    """Otherwise there are all, and what nobody can train at once is trained in turn."""
    budgets = [0.125, widest]
    for is_within, expected in ((True, count), (False, 8)):
        method = fq.SplitMix(base=0.125, within_budgets=is_within, sort_bases=True, stacked=False)
        dealt = visits(little, numbers, method, budgets, 0, 20)
        assert {number for chosen in dealt for number in chosen} == set(range(expected))
        clients = tuple(Client(i, 1, (), Budget(w)) for i, w in enumerate(budgets))
        setup = method.prepare_model(replace(little, clients=clients))
        state = method.start(setup)
        assert {name.rpartition("@")[2] for name in state.params} == set(map(str, range(expected)))
        assert method.sizes(setup) == tuple(k / 8 for k in range(expected, 0, -1))
        assert len(method.ensemble(setup, state, 1.0)) == expected
        task, _ = method.plan(setup, replace(state, phase="sort"), setup.clients)
        assert len(task.subnets) == expected


# Algorithm 3: local training

STEPS = {
    "plain": fq.LocalTraining(
        momentum=0, weight_decay=0, epochs=1, batch_size=4, max_grad_norm=None
    ),
    "momentum": fq.LocalTraining(
        momentum=0.9, weight_decay=0, epochs=2, batch_size=5, max_grad_norm=None
    ),
    "clipped": fq.LocalTraining(
        momentum=0.9, weight_decay=5e-4, epochs=2, batch_size=4, max_grad_norm=0.05
    ),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["batch", "post", "tracked", "local"])
@pytest.mark.parametrize("steps", STEPS)
def test_bases_of_a_client_are_trained_as_if_each_were_alone(world, together, kind, steps):
    local_training = replace(STEPS[steps], lr=0.1)
    method = fq.SplitMix(local_training, base=0.25, statistics=kind, stacked=together)
    world = world.prepare_model(method)
    state = world.start(method)
    far = {n: 3 * t if n.endswith("@1") else t for n, t in state.params.items()}  # longer gradients
    (task,) = method.plan(world.setup, replace(state, params=far), world.setup.clients[:1])
    (update,) = world.done([task])
    alone = world.done([replace(task, subnets=(subnet,)) for subnet in task.subnets])
    assert len(update.params) == 4
    for one, (base,) in zip(update.params, (u.params for u in alone), strict=True):
        for name, tensor in one.items():
            if together:
                torch.testing.assert_close(tensor, base[name], rtol=2e-4, atol=2e-5)
            else:
                assert tensor.equal(base[name]), name
    losses = [u.metrics["loss"] for u in alone]
    assert update.metrics["loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)


def test_attacked_bases_of_a_client_learn_in_one_pass_what_they_do_in_turn(world, local_training):
    pixels = {c: to_examples((d.inputs.sigmoid(), d.labels)) for c, d in world.people.train.items()}
    found = []
    for stacked in (False, True):
        method = fq.SplitMix(local_training, base=0.25, robust=True, steps=2, stacked=stacked)
        here = type(world)(world.setup, replace(world.people, train=pixels)).prepare_model(method)
        (task,) = method.plan(here.setup, here.start(method), here.setup.clients[:1])
        assert task.recipe.stacked is stacked
        (update,) = here.done([task])
        found.append(update.params)
    torch.testing.assert_close(*found, rtol=2e-4, atol=2e-5)
    in_turn, in_one_pass = (bases[0]["features.0.weight"] for bases in found)
    assert not in_turn.equal(in_one_pass)  # but for rounding, which shows that there was one


def test_a_step_of_one_base_is_sgd_on_its_own_loss(world):
    """Algorithm 3, line 5, for one batch."""
    local_training = fq.LocalTraining(
        lr=0.1, momentum=0, weight_decay=0, epochs=1, batch_size=16, max_grad_norm=None
    )
    method = fq.SplitMix(local_training, base=0.25, masked=False, stacked=False)
    world = world.prepare_model(method)
    state = world.start(method)
    (task,) = method.plan(world.setup, state, world.setup.clients[:1])
    (update,) = world.done([task])
    data = world.people.train[0]
    for i, sent in enumerate(update.params):
        net = build_module(world.setup.model, world.setup.structure, Subnet(), own(state.params, i))
        loss = F.cross_entropy(net.train()(data.inputs), data.labels)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for (name, w), g in zip(net.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(sent[name], w - 0.1 * g, rtol=1e-4, atol=1e-6)


def own(params, number: int) -> dict[str, Tensor]:
    """The tensors of one base, by their plain names."""
    named = (name.partition("@") for name in params)
    return {n: params[f"{n}@{i}"] for n, _, i in named if int(i) == number}


def test_a_robust_base_minimises_equation_1(world, local_training):
    method = fq.SplitMix(
        local_training, robust=True, robust_fraction=0.3, epsilon=0.1, steps=2, base=0.5
    )
    world = world.with_clients(*world.setup.clients[:2]).prepare_model(method)
    state = world.start(method)
    for task in method.plan(world.setup, state, world.setup.clients):
        objective = task.recipe.objective
        assert isinstance(objective, Adversarial)
        assert (objective.share, objective.attack.epsilon, objective.attack.steps) == (0.3, 0.1, 2)
    stepped = fq.SplitMix(local_training, robust=True, step_size=2 / 255)
    assert stepped.objective.attack.step == stepped.statistics_recipe.attack.step == 2 / 255
    plain = fq.SplitMix(local_training).objective
    assert plain == PlainLoss()
    halves = {n.partition("@")[0] for n in state.params}
    assert {"features.1.clean.weight", "features.1.noise.running_mean"} <= halves


@pytest.mark.parametrize("kind", ["batch", "tracked", "local"])
def test_only_the_chosen_bases_travel(world, local_training, traffic, kind):
    method = fq.SplitMix(local_training, base=0.25, statistics=kind, stacked=False)
    world = world.prepare_model(method)
    tasks = method.plan(world.setup, world.start(method), world.setup.clients)
    convolutions, norms, classifier = (2 * 9 + 2) + (2 * 9 + 1), 2 * (2 + 1), 4 * 1 + 4
    one = 4 * (convolutions + norms + classifier)
    counters = 2 * 8  # num_batches_tracked, as int64
    one += {"batch": 0, "tracked": 4 * norms + counters, "local": counters}[kind]
    for task, count in zip(tasks, (4, 2, 1, 1), strict=True):
        (update,) = world.done([task])
        assert traffic(world, task, update) == (count * one, count * one)


# Sec. 4.2: rescaled initialisation


@pytest.mark.parametrize("rescale_init", [True, False])
def test_bases_start_apart_and_as_small_as_the_whole_net(rescale_init):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 48), nn.ReLU(),
        nn.Linear(48, 5),
    )  # fmt: skip
    example = torch.zeros(2, 3, 5, 5)
    structure = fq.trace_structure(net, example)
    method = fq.SplitMix(base=0.125, rescale_init=rescale_init, stacked=False)
    setup = method.prepare_model(Setup(net, structure, example, (Client(0, 1),), 1, 4))
    params = method.start(setup).params
    # fan-in of the whole net: 3 · 9, 32 · 9, 64, 48; of a base: 3 · 9, 4 · 9, 8, 6
    fans = {"0": (27, 27), "3": (288, 36), "6": (64, 8), "8": (48, 6)}
    for layer, pair in fans.items():
        bound = 1 / math.sqrt(pair[0] if rescale_init else pair[1])
        for tensor in ("weight", "bias"):
            values = torch.stack([params[f"{layer}.{tensor}@{i}"] for i in range(8)])
            assert 0.9 * bound < values.abs().max() <= bound * (1 + 1e-6)
            assert len(values.unique()) == values.numel()  # no two bases share a value
    again = method.start(setup).params
    assert all(again[n].equal(t) for n, t in params.items())
    other = method.start(replace(setup, seed=5)).params
    assert not other["3.weight@0"].equal(params["3.weight@0"])
    assert params["1.weight@7"].eq(1).all()  # normalisation starts as it always does


# Algorithm 1, lines 9 to 11: mixing and sorting


@pytest.fixture
def trained(world, local_training):
    """A finished run whose bases say different things."""

    def run(**settings):
        method = fq.SplitMix(local_training, base=0.25, stacked=False, **settings)
        here, net = world.setup, world.setup.model
        return fq.train(
            net, here.example, method, world.people, 3, structure=here.structure, workers=0, seed=3
        )

    return run


def answers(run, number: int, x: Tensor) -> Tensor:
    """What one base says, built by hand."""
    net = build_module(
        run.setup.model, run.setup.structure, Subnet(), own(run.state.params, number)
    )
    is_scaled = run.method.scales_outputs
    with torch.no_grad(), scale_outputs(net, run.setup.structure) if is_scaled else nullcontext():
        return net.eval()(x)


@pytest.mark.parametrize("kind", ["batch", "post", "tracked"])
def test_a_customized_model_is_the_mean_of_the_first_bases(trained, kind):
    run = trained(statistics=kind)
    x = torch.randn(9, 1, 5, 5)
    for width, count in ((None, 4), (1.0, 4), (0.8, 3), (0.75, 3), (0.5, 2), (0.3, 1), (0.25, 1)):
        model = run.customize(width=width)
        expected = sum(answers(run, i, x) for i in range(count)) / count
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
        assert not model.training
        assert isinstance(model, Ensemble)
        assert model.fedquilt_info.width == pytest.approx(0.25 * count)
    with pytest.raises(ConfigError, match=r"one base of width 0\.25, got width 0\.2"):
        run.customize(width=0.2)


def test_a_customized_model_holds_as_many_bases_as_limits_allow(trained):
    run = trained()
    one = compute_cost(run.setup.model, run.setup.structure, Subnet(), run.setup.example)
    for count, params in ((1, one.params), (1, 2 * one.params - 1), (3, 3 * one.params + 5)):
        assert len(run.customize(params=params).nets) == count
        assert len(run.customize(macs=count * one.macs).nets) == count
    with pytest.raises(BudgetError, match="the smallest possible costs"):
        run.customize(params=one.params - 1)


def test_scores_are_those_of_the_mean_of_the_first_bases(trained, world):
    run = trained(statistics="tracked")
    server = world.people.test[SERVER]
    assert [s.width for s in run.scores] == [1.0, 0.75, 0.5, 0.25]
    one = compute_cost(run.setup.model, run.setup.structure, Subnet(), run.setup.example)
    for score, count in zip(run.scores, (4, 3, 2, 1), strict=True):

        def logits(x, count=count):
            return sum(answers(run, i, x) for i in range(count)) / count

        hits = (logits(server.inputs).argmax(1) == server.labels).sum().item()
        assert score.accuracy == pytest.approx(hits / 12)
        loss = F.cross_entropy(logits(server.inputs), server.labels).item()
        assert score.loss == pytest.approx(loss, rel=1e-5)
        shares = []
        for client in range(4):
            own_data = world.people.test[client]
            right = logits(own_data.inputs).argmax(1) == own_data.labels
            shares.append(right.double().mean().item())
        assert score.user_accuracy == pytest.approx(sum(shares) / 4)
        assert (score.params, score.macs) == (count * one.params, count * one.macs)


def validated(run, people) -> list[float]:
    """Right answers of each base on all clients' validation data."""
    return [
        sum(
            (answers(run, i, d.inputs).argmax(1) == d.labels).sum().item()
            for d in people.validation.values()
        )
        for i in range(4)
    ]


def test_sorting_puts_the_best_base_on_validation_data_first(trained, world):
    plain, run = trained(statistics="tracked"), trained(statistics="tracked", sort_bases=True)
    hits = validated(plain, world.people)
    assert hits != sorted(hits, reverse=True)  # so that there is something to sort
    assert validated(run, world.people) == sorted(hits, reverse=True)
    order = sorted(range(4), key=lambda i: -hits[i])  # equals in their order
    for new, old in enumerate(order):
        base, before = own(run.state.params, new), own(plain.state.params, old)
        assert all(base[n].equal(t) for n, t in before.items())


def test_sorting_adds_up_the_hits_of_all_clients(world):
    """By hand: 5, 9, 9 and 12 hits put bases in the order 3, 1, 2, 0."""
    method = fq.SplitMix(base=0.25, sort_bases=True, stacked=False)
    state = replace(method.start(world.prepare_model(method).setup), phase="sort")
    said = ((5, 0, 9, 1), (0, 9, 0, 11))
    updates = [
        Update(k, (), (), 0.0, {"examples": 20, **{f"hits:{i}": n for i, n in enumerate(hits)}})
        for k, hits in enumerate(said)
    ]
    after = method.merge(world.setup, state, updates).params
    assert after.keys() == state.params.keys()
    for new, old in enumerate((3, 1, 2, 0)):
        base, before = own(after, new), own(state.params, old)
        assert all(base[n].equal(t) for n, t in before.items())
    hits = {f"hits:{i}": n for i, n in enumerate((1, 9, 5, 0))}
    cycle = [Update(0, (), (), 0.0, {"examples": 20, **hits})]
    after = method.merge(world.setup, state, cycle).params  # order 1, 2, 0, 3
    assert after["classifier.bias@2"].equal(state.params["classifier.bias@0"])


def test_sorting_is_a_closing_phase_on_what_clients_hold_back(world, local_training):
    method = fq.SplitMix(local_training, base=0.25, sort_bases=True, stacked=False)
    world = world.prepare_model(method)
    train, _, closing = method.phases(world.setup)
    assert (train.name, train.is_closing) == ("train", False)
    assert (closing.name, closing.rounds, closing.fraction) == ("sort", 1, 1.0)
    assert closing.is_closing
    state = replace(world.start(method), phase="sort")
    for task in method.plan(world.setup, state, world.setup.clients):
        assert task.recipe.split == "validation"
        (update,) = world.done([task])
        assert update.metrics["examples"] == 7
        assert not update.subnets


def test_bases_whose_statistics_stay_at_home_cannot_be_renamed():
    with pytest.raises(ConfigError, match=r"sort.*local"):
        fq.SplitMix(statistics="local", sort_bases=True)


# Table 4: statistics of batch normalisation


def test_defaults_are_what_table_4_advises():
    plain = fq.SplitMix()
    assert (plain.statistics_kind, plain.rescale_init, plain.scales_outputs) == (
        "batch",
        True,
        False,
    )
    assert fq.SplitMix(statistics="post").scales_outputs
    for kind in ("tracked", "local"):
        assert not fq.SplitMix(statistics=kind).scales_outputs
    assert fq.SplitMix(robust=True).statistics_kind == "tracked"
    assert fq.SplitMix().base == 0.125
    assert fq.SplitMix().robust_fraction == 0.5


@pytest.mark.parametrize("kind", ["batch", "local"])
def test_the_query_of_a_robust_model_finds_statistics_of_attacked_inputs_too(
    world, local_training, kind
):
    method = fq.SplitMix(
        local_training, base=0.25, robust=True, statistics=kind, epsilon=2.0, steps=2, stacked=False
    )
    pixels = {c: to_examples((d.inputs.sigmoid(), d.labels)) for c, d in world.people.train.items()}
    here = type(world)(world.setup, replace(world.people, train=pixels)).prepare_model(method)
    state = replace(here.start(method), phase="statistics")
    params = here.round(method, state).params
    clean, noise = (params[f"features.1.{half}.running_mean@0"] for half in ("clean", "noise"))
    first = state.params["features.1.noise.running_mean@0"]
    assert not torch.allclose(noise, clean)
    assert not torch.allclose(noise, first)


@pytest.mark.parametrize("kind", ["tracked", "local"])
def test_rescaled_layers_with_tracked_statistics_are_warned_of(kind):
    with pytest.warns(UserWarning, match=rf"'{kind}'.*collapses to chance.*Table 4"):
        fq.SplitMix(statistics=kind, rescale_layer=True)
    with pytest.warns(UserWarning, match="'tracked'"):
        fq.SplitMix(robust=True, rescale_layer=True)
    for quiet in ("batch", "post"):
        fq.SplitMix(statistics=quiet, rescale_layer=True)
    fq.SplitMix(statistics=kind, rescale_layer=False)


@pytest.mark.parametrize("kind", ["batch", "post", "tracked"])
@pytest.mark.filterwarnings("ignore:rescale_layer with statistics")
def test_layers_that_are_rescaled_in_training_alone_are_not_in_use(world, local_training, kind):
    method = fq.SplitMix(
        local_training, base=0.25, statistics=kind, rescale_layer="training", stacked=False
    )
    world = world.prepare_model(method)
    state = world.start(method)
    assert all(t.recipe.scale for t in method.plan(world.setup, state, world.setup.clients))
    assert not method.scales_outputs  # of scores, and of models that are taken away
    if kind != "tracked":
        closing = replace(state, phase="statistics")
        tasks = method.plan(world.setup, closing, world.setup.clients)
        assert not any(task.recipe.scale for task in tasks)  # so that statistics fit


def test_rescaled_layers_speak_as_loudly_as_the_whole_net(world, local_training):
    found = []
    for rescale_layer in (True, False):
        method = fq.SplitMix(local_training, base=0.25, rescale_layer=rescale_layer, stacked=False)
        here = world.prepare_model(method)
        (task,) = method.plan(here.setup, here.start(method), here.setup.clients[3:])
        assert task.recipe.scale == rescale_layer
        (update,) = here.done([task])
        found.append(update.params[0]["features.3.weight"])
    assert not found[0].equal(found[1])


def test_without_the_closing_query_every_batch_is_normalised_by_itself(trained):
    run = trained(statistics="batch", query_statistics=False)
    with pytest.warns(UserWarning, match="every batch by itself"):
        model = run.customize(width=0.5)
    x = torch.randn(6, 1, 5, 5)
    expected = []
    for i in (0, 1):
        p = own(run.state.params, i)

        def norm(y, p=p, layer=0):
            mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), False, keepdim=True)
            weight, bias = (
                p[f"features.{layer}.{t}"].view(1, -1, 1, 1) for t in ("weight", "bias")
            )
            return (y - mean) / (var + 1e-5).sqrt() * weight + bias

        y = F.conv2d(x, p["features.0.weight"], p["features.0.bias"], padding=1)
        y = F.conv2d(norm(y, layer=1).relu(), p["features.3.weight"], p["features.3.bias"])
        y = norm(y, layer=4).relu().mean((2, 3))
        expected.append(F.linear(y, p["classifier.weight"], p["classifier.bias"]))
    with torch.no_grad():
        torch.testing.assert_close(model(x), sum(expected) / 2, rtol=1e-4, atol=1e-5)


def test_post_statistics_come_from_the_closing_phase_alone(world, local_training):
    method = fq.SplitMix(local_training, base=0.25, statistics="post", stacked=False)
    world = world.prepare_model(method)
    names = world.setup.structure.statistics
    assert [p.name for p in method.phases(world.setup)] == ["train", "statistics"]
    state = world.start(method)
    first = {n: t for n, t in state.params.items() if n.partition("@")[0] in names}
    for _ in range(2):
        tasks = method.plan(world.setup, state, world.setup.clients)
        assert not any(set(p) & names for u in world.done(tasks) for p in u.params)
        state = world.round(method, state)
    assert all(state.params[n].equal(t) for n, t in first.items())
    closing = replace(state, phase="statistics")
    for task in method.plan(world.setup, closing, world.setup.clients):
        assert task.recipe == QueryStatistics(4, epochs=20, scale=True)
        assert [s.owner for s in task.subnets] == ["0", "1", "2", "3"]  # one at a time fits
    after = world.round(method, closing).params
    assert {n for n, t in after.items() if not t.equal(state.params[n])} == set(first)
    for i in range(4):
        torch.testing.assert_close(
            after[f"features.1.running_mean@{i}"], cumulative(world, state, i), rtol=1e-4, atol=1e-5
        )


def cumulative(world, state, number: int) -> Tensor:
    """The mean of the first normalisation's batch means over 20 epochs of every client."""
    p, means = own(state.params, number), []
    for client in world.setup.clients:
        data = world.people.train[client.id]
        generator = torch.Generator().manual_seed(derive_seed(3, state.round, client.id))
        for _ in range(20):
            for rows in iterate_batches(16, 4, generator):
                y = F.conv2d(
                    data.inputs[rows], p["features.0.weight"], p["features.0.bias"], padding=1
                )
                means.append(y.mean((0, 2, 3)) / 0.25)  # as it is scaled in training
    return torch.stack(means).mean(0)


def test_tracked_statistics_are_averaged_like_weights(world, local_training):
    method = fq.SplitMix(local_training, base=0.5, statistics="tracked", stacked=False)
    clients = [replace(world.setup.clients[k], num_examples=n) for k, n in ((0, 30), (1, 10))]
    world = world.with_clients(*clients).prepare_model(method)
    state = world.start(method)
    updates = world.done(method.plan(world.setup, state, world.setup.clients))
    assert [len(u.params) for u in updates] == [2, 1]
    shared = int(updates[1].subnets[0].owner)
    one, other = updates[0].params[shared], updates[1].params[0]
    after = method.merge(world.setup, state, updates).params
    for name in world.setup.structure.statistics:
        expected = 0.75 * one[name] + 0.25 * other[name]
        torch.testing.assert_close(after[f"{name}@{shared}"], expected, rtol=1e-5, atol=1e-6)


def kept_by(engine, client: int) -> dict[str, Tensor]:
    path = engine._states.current_path(client)
    return {} if path is None else load_file(path)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_local_normalization_stays_on_the_client_base_by_base(
    world, local_training, workers, together, is_whole
):
    """Statistics alone, or with the affine part."""
    method = fq.SplitMix(
        local_training, base=0.25, statistics="local", local_affine=is_whole, stacked=together
    )
    world = world.prepare_model(method)
    names = world.setup.structure.match_names((NORMS if is_whole else STATISTICS,))
    state = world.start(method)
    with world.engine(workers) as engine:
        for _ in range(4):
            before = {c.id: kept_by(engine, c.id) for c in world.setup.clients}
            tasks = method.plan(world.setup, state, world.setup.clients)
            updates = world.done(tasks, engine)
            for client, task, update in zip(world.setup.clients, tasks, updates, strict=True):
                assert not any(set(part) & names for part in update.params)
                after, old = kept_by(engine, client.id), before[client.id]
                trained = {f"{n}@{s.owner}" for n in names for s in task.subnets}
                assert set(after) == set(old) | trained
                moved = {n for n, t in after.items() if n not in old or not t.equal(old[n])}
                assert moved == trained  # the other bases' statistics are as they were
            state = replace(method.merge(world.setup, state, updates), round=state.round + 1)
    first = method.start(world.setup).params
    assert all(state.params[f"{n}@{i}"].equal(first[f"{n}@{i}"]) for n in names for i in range(4))
    if is_whole:  # clients have nets of their own, and there is none to take away
        assert not method.closing_phases(world.setup)
        return
    after = world.round(method, replace(state, phase="statistics")).params
    asked = {n for n, t in after.items() if not t.equal(state.params[n])}
    assert asked == {f"{n}@{i}" for n in names for i in range(4)}  # at the end, for the server


def test_local_statistics_go_on_from_where_the_client_left_them(world, local_training):
    method = fq.SplitMix(local_training, base=1, statistics="local", stacked=False)
    world = world.with_clients(world.setup.clients[0]).prepare_model(method)
    state = world.start(method)
    with world.engine() as engine:
        state = world.round(method, state, engine)
        before = kept_by(engine, 0)
        (task,) = method.plan(world.setup, state, world.setup.clients)
        world.done([task], engine)
        after = kept_by(engine, 0)
    net = build_module(world.setup.model, world.setup.structure, Subnet(), own(state.params, 0))
    load_tensors(net, {n.partition("@")[0]: t for n, t in before.items()})
    data, generator = world.people.train[0], torch.Generator().manual_seed(task.seed)
    weights = list(net.parameters())
    momenta = [torch.zeros_like(w) for w in weights]
    for rows in iterate_batches(16, 4, generator):
        loss = F.cross_entropy(net.train()(data.inputs[rows]), data.labels[rows])
        gradients = torch.autograd.grad(loss, weights)
        scale = min(1.0, 1 / torch.cat([g.flatten() for g in gradients]).norm().item())
        with torch.no_grad():
            for w, g, v in zip(weights, gradients, momenta, strict=True):
                v.mul_(0.9).add_(g * scale + 5e-4 * w)
                w -= 0.05 * v
    for name, tensor in after.items():
        expected = net.state_dict()[name.partition("@")[0]]
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


def test_clients_answer_with_statistics_of_their_own(world, local_training):
    method = fq.SplitMix(local_training, base=0.5, statistics="local", stacked=False)
    world = world.with_clients(*world.setup.clients[:2]).prepare_model(method)
    state = world.start(method)
    with world.engine() as engine:
        for _ in range(2):
            state = world.round(method, state, engine)
        scores = evaluate(
            world.setup, method, state, engine, has_server_test=False, testers=(0, 1), widths=(1.0,)
        )
        kept = {c: kept_by(engine, c) for c in (0, 1)}
    shares = []
    for client in (0, 1):
        data, logits = world.people.test[client], torch.zeros(5, 4)
        for i in (0, 1):
            net = build_module(
                world.setup.model, world.setup.structure, Subnet(), own(state.params, i)
            )
            load_tensors(net, {n[:-2]: t for n, t in kept[client].items() if n.endswith(f"@{i}")})
            with torch.no_grad():
                logits += net.eval()(data.inputs) / 2
        shares.append((logits.argmax(1) == data.labels).double().mean().item())
    assert scores[0].user_accuracy == pytest.approx(sum(shares) / 2)


def normalize_personally(net, structure, train, kind, seed):
    """A net that answers as Appendix A.3 has it, by hand."""
    if kind == "batch":
        return net.train()  # each batch of test data by itself
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), scale_outputs(net.train(), structure):
        for _ in range(20):
            for rows in iterate_batches(16, 4, generator):
                net(train.inputs[rows])
    return net.eval()


@pytest.mark.parametrize("kind", ["batch", "post", "tracked"])
def test_personal_accuracy_is_that_of_the_paper_and_user_accuracy_that_of_what_is_taken_away(
    trained, world, kind
):
    run = trained(statistics=kind)
    plain, scored = run.evaluate(workers=0), run.evaluate(workers=0, personal_statistics=True)
    assert [s.user_accuracy for s in scored] == [s.user_accuracy for s in run.scores]
    assert all(score.personal_accuracy is None for score in plain)
    if kind == "tracked":  # a client has no others
        assert [s.personal_accuracy for s in scored] == [s.user_accuracy for s in scored]
        return
    setup, people = run.setup, world.people
    for score, count in zip(scored, (4, 3, 2, 1), strict=True):
        shares = []
        for client in range(4):
            test, logits = people.test[client], torch.zeros(5, 4)
            for number in range(count):
                tensors = own(run.state.params, number)
                net = build_module(setup.model, setup.structure, Subnet(), tensors)
                seed = derive_seed(derive_seed(0, client), 1)
                train = people.train[client]
                net = normalize_personally(net, setup.structure, train, kind, seed)
                scaled = scale_outputs(net, setup.structure) if kind == "post" else nullcontext()
                with torch.no_grad(), scaled:
                    logits += net(test.inputs) / count
            shares.append((logits.argmax(1) == test.labels).double().mean().item())
        assert score.personal_accuracy == pytest.approx(sum(shares) / 4)
    assert [s.personal_accuracy for s in scored] != [s.user_accuracy for s in scored]


def test_statistics_do_not_change_what_is_learned_so_one_training_is_scored_in_every_way(trained):
    tracked = trained(statistics="tracked", rescale_layer=False)
    for kind, choice in (("batch", "batch"), ("post", "refreshed")):
        run = trained(statistics=kind, rescale_layer=False)
        for name, tensor in run.state.params.items():
            if not name.partition("@")[0].endswith(("running_mean", "running_var", "tracked")):
                assert torch.equal(tensor, tracked.state.params[name]), name
        expected = run.evaluate(workers=0, personal_statistics=True)
        for asked in (run, tracked):
            scores = asked.evaluate(workers=0, personal_statistics=choice)
            assert [s.personal_accuracy for s in scores] == [s.personal_accuracy for s in expected]


def test_statistics_are_refreshed_from_nothing_whether_the_model_has_any_or_not(trained):
    found = [
        trained(statistics="batch", rescale_layer=False, query_statistics=asked).evaluate(
            workers=0, personal_statistics="refreshed"
        )
        for asked in (True, False)
    ]
    ours, without = ([score.personal_accuracy for score in scores] for scores in found)
    assert ours == without
    assert without != [score.user_accuracy for score in found[1]]  # which are those of batches


@pytest.mark.parametrize("choice", ["refresh", "post", "", 1, ["batch"], None])
def test_statistics_that_there_are_not_are_refused(trained, choice):
    with pytest.raises(ConfigError, match="true, false, 'batch' or 'refreshed', got"):
        trained(statistics="batch").evaluate(workers=0, personal_statistics=choice)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (fq.SplitMix(), "batch"),
        (fq.SplitMix(statistics="local"), None),  # they are the client's own anyway
        (fq.SHeteroFL(), "batch"),
        (fq.SHeteroFL(statistics="tracked"), None),
        (fq.FedAvg(statistics="batch"), "batch"),
        (fq.FedAvg(), None),
        (fq.HeteroFL(), None),  # its paper scores with statistics that all clients find together
    ],
)
def test_a_method_knows_the_statistics_that_its_paper_scores_with(method, expected):
    assert method.personal_statistics == expected


# Budgets


def priced(world, method):
    slim = world.with_clients(world.setup.clients[0]).prepare_model(method).setup
    return compute_cost(slim.model, slim.structure, Subnet(), slim.example)


@pytest.mark.parametrize("limit", ["params", "macs", "memory", "upload"])
def test_physical_budgets_hold_as_many_bases_as_fit(world, local_training, limit):
    method = fq.SplitMix(local_training, base=0.25, stacked=False)
    one = getattr(priced(world, method), "bytes" if limit == "upload" else limit)
    limits = {1: one, 2: 3 * one - 1, 3: 3 * one, 4: 100 * one}
    clients = [Client(i, 16, (0,), Budget(**{limit: n})) for i, n in enumerate(limits.values())]
    setup = world.with_clients(*clients).prepare_model(method).setup
    assert [c.budget.width for c in setup.clients] == [0.25, 0.5, 0.75, 1.0]
    state = replace(method.start(setup), phase="train")
    tasks = method.plan(setup, state, setup.clients)
    assert [len(task.subnets) for task in tasks] == list(limits)
    both = Client(0, 16, (0,), Budget(0.5, **{limit: 3 * one}))
    (narrow,) = world.with_clients(both).prepare_model(method).setup.clients
    assert narrow.budget.width == 0.5


@pytest.mark.parametrize("budget", [Budget(0.2), Budget(params=3), Budget(0.1, params=10**9)])
def test_a_budget_below_one_base_is_refused(world, budget):
    client = replace(world.setup.clients[2], budget=budget)
    said = r"client 2 cannot train even one base of width 0\.25 .* choose a smaller method\.base"
    with pytest.raises(BudgetError, match=said):
        world.with_clients(client).prepare_model(fq.SplitMix(base=0.25, stacked=False))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"base": 0}, r"in \(0, 1\], got 0; 1/8 is 0\.125"),
        ({"base": 1.5}, "got 1.5"),
        ({"statistics": "mean"}, "'post', 'tracked' or 'local', got 'mean'"),
        ({"local_affine": True}, "these are 'batch'; set statistics to 'local'"),
        ({"masked": "client"}, "setting 'masked' of SplitMix"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        fq.SplitMix(**wrong)


# Any model


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(torch.relu(self.norm(x)))
        return self.head(torch.relu(x).mean((2, 3)))


class Transformer(nn.Module):
    """The rows of an image as five tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 32)
        self.place = nn.Parameter(torch.randn(5, 32) / 10)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1)) + self.place
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(self.norm2(x))).mean(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention on a stack
@pytest.mark.parametrize("make", [Residual, Transformer])
@pytest.mark.parametrize("together", [False, True])
def test_any_traceable_model_can_be_split_and_mixed(world, local_training, make, together):
    torch.manual_seed(0)
    net = make()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    method = fq.SplitMix(local_training, base=0.25, stacked=together)
    run = fq.train(net, world.setup.example, method, world.people, 2, workers=0)
    assert all(t.equal(before[n]) for n, t in net.state_dict().items())
    first = method.start(run.setup).params
    trained = {n for n, t in run.state.params.items() if not t.equal(first[n])}
    learned = {n for n, _ in run.setup.model.named_parameters()} | run.setup.structure.statistics
    assert trained == {f"{n}@{i}" for n in learned for i in range(4)}
    x = torch.randn(3, 1, 5, 5)
    for count in (1, 2, 4):
        with torch.no_grad():
            expected = sum(answers(run, i, x) for i in range(count)) / count
            torch.testing.assert_close(run.customize(width=count / 4)(x), expected)
    assert [len(method.ensemble(run.setup, run.state, s.width)) for s in run.scores] == [4, 3, 2, 1]
    assert all(s.accuracy is not None for s in run.scores)
