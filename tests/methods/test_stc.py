"""STC: rounds against Algorithm 2 in NumPy, what travels, and codes that are none."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.engines.client_state import ClientStateStore, read_client_state
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import ConfigError, UpdateError
from fedquilt.federation.client import Failure
from fedquilt.methods.stc import read_codes, read_synced_rounds, select_weights
from fedquilt.runs import checkpoint
from fedquilt.runs.checkpoint import Checkpoint
from fedquilt.runs.events import RoundDone
from fedquilt.runs.loop import TrainingLoop
from fedquilt.runs.policies import Cadence
from fedquilt.structure.cut import copy_subnet_tensors
from fedquilt.structure.structure import TRACKED
from fedquilt.training.ternary import RESIDUAL, unflatten_weights

WHOLE = (fq.Subnet().excluding(TRACKED),)
UP, DOWN = 0.04, 0.06
COHORTS = ((0, 1, 2, 3), (0, 2), (1, 2), (2,), (0, 1, 3), (3, 0), (0, 1, 2, 3))


@pytest.fixture
def method(local_training):
    return fq.STC(replace(local_training, max_grad_norm=None), 1.0, UP, DOWN)


@pytest.fixture
def home(world, method):
    """The world as the method prepares it."""
    clients = (replace(c, num_examples=16 + 3 * c.id) for c in world.setup.clients)
    return world.with_clients(*clients).prepare_model(method)


def cohort(home, numbers):
    return [client for client in home.setup.clients if client.id in numbers]


def decode(method, setup, state, update):
    """What came from a client, as it is merged."""
    return method.aggregation(setup, "train").decoder.decode(setup, state, update)


class Federation:
    """Rounds with an engine whose clients keep what they keep in a folder."""

    def __init__(self, home, method, folder):
        self.local_params, self.method, self.folder = home, method, folder
        setup = home.setup
        self.engine = LocalEngine(
            setup.model, setup.structure, home.people.data, workers=0, folder=folder
        )
        self.state = home.start(method)
        self.tasks = self.came = ()

    def round(self, numbers, lost=()):
        """One round, in which the answers of some are lost on the way."""
        setup, state = self.local_params.setup, self.state
        self.tasks = self.method.plan(setup, state, cohort(self.local_params, numbers))
        self.came = [u for u in self.engine.run(self.tasks) if u.client not in lost]
        opened = [decode(self.method, setup, state, update) for update in self.came]
        merged = self.method.merge(setup, state, iter(opened))
        self.state = replace(merged, round=state.round + 1)

    @property
    def weights(self):
        """W: the server's weights."""
        return select_weights(self.local_params.setup, self.state, self.method.whole)

    def copy_of(self, client):
        """The server's weights as a client has them."""
        kept = read_client_state(
            ClientStateStore(self.folder).path(client, self.engine.client_versions()[client])
        )
        return {n.removeprefix("weights/"): t for n, t in kept.items() if "weights/" in n}


@pytest.fixture
def federation(home, method, tmp_path):
    found = Federation(home, method, tmp_path / "clients")
    yield found
    found.engine.close()


def ternary(change, p):
    """Algorithm 1 in NumPy."""
    k = max(1, math.floor(p * len(change)))
    chosen = np.argsort(-np.abs(change), kind="stable")[:k]
    chosen = chosen[change[chosen] != 0]
    found = np.zeros_like(change)
    found[chosen] = np.sign(change[chosen]) * np.abs(change[chosen]).mean()
    return found


def vector(params):
    return np.concatenate([params[n].double().numpy().reshape(-1) for n in sorted(params)])


def test_rounds_are_algorithm_2(federation, home, method):
    """Every client simply has the server's weights here, as if all had heard of all rounds."""
    state = federation.state
    names = sorted(federation.weights)
    shapes = {n: state.params[n].shape for n in names}
    weights = vector(federation.weights)
    residual, residuals = np.zeros_like(weights), {}
    for number, who in enumerate(COHORTS):
        federation.round(who)
        mean, total = 0.0, 0.0
        for client in cohort(home, who):
            parts = np.split(weights, np.cumsum([shapes[n].numel() for n in names])[:-1])
            params = {
                n: torch.from_numpy(p).float().view(shapes[n])
                for n, p in zip(names, parts, strict=True)
            }
            (task,) = method.plan(home.setup, replace(state, round=number), [client])
            task = replace(task, subnets=WHOLE, params=params, recipe=task.recipe.sgd)
            (trained,) = home.done([task])[0].params
            change = vector(trained) - vector(params) + residuals.get(client.id, 0.0)
            sent = ternary(change, UP)
            residuals[client.id] = change - sent
            mean, total = mean + client.num_examples * sent, total + client.num_examples
        change = residual + mean / total
        sent = ternary(change, DOWN)
        residual, weights = change - sent, weights + sent
        np.testing.assert_allclose(vector(federation.weights), weights, rtol=0, atol=1e-5)
    left = federation.state.server_tensors["residual"]
    np.testing.assert_allclose(left.numpy(), residual, rtol=0, atol=1e-5)


def test_what_clients_have_is_what_the_server_had_to_the_last_bit(federation, same):
    had = {}
    for who in COHORTS:
        had |= dict.fromkeys(who, federation.weights)
        federation.round(who)
        for client, params in had.items():
            assert same(params, federation.copy_of(client))
    assert not same(had[0], fq.STC().start(federation.local_params.setup).params)


def test_clients_get_the_whole_model_once_and_then_the_codes_that_they_missed(federation):
    seen = set()
    heard = {}
    for number, who in enumerate(COHORTS):
        federation.round(who)
        for task, update in zip(federation.tasks, federation.came, strict=True):
            if task.client not in seen:
                assert task.subnets == WHOLE
                assert task.params.keys() == federation.state.params.keys()
            else:
                missed = range(heard[task.client], number)
                assert (task.subnets, [*task.params]) == ((), [str(n) for n in missed])
                assert all(code.dtype == torch.uint8 for code in task.params.values())
            assert [*update.params[0]] == ["code"]
            assert update.subnets == WHOLE
            seen.add(task.client)
            heard[task.client] = number
    assert read_synced_rounds(federation.state) == dict.fromkeys(range(4), len(COHORTS) - 1)
    assert [*read_codes(federation.state)] == [len(COHORTS) - 1]  # nobody needs the older ones


def test_tasks_with_the_same_codes_share_them(federation):
    federation.round((0, 1, 2, 3))
    federation.round((2,))
    federation.round(())
    setup, state = federation.local_params.setup, federation.state
    tasks = federation.method.plan(setup, state, setup.clients)
    assert Counter(id(task.params) for task in tasks).most_common(1)[0][1] == 3
    assert [[*task.params] for task in tasks] == [["0", "1", "2"]] * 2 + [
        ["1", "2"],
        ["0", "1", "2"],
    ]


def test_a_client_whose_answer_was_lost_goes_on_with_codes(federation, same):
    federation.round((0, 1, 2, 3))
    federation.round((0, 1, 2, 3), lost=(2,))  # it has heard of round 0, unknown to the server
    assert read_synced_rounds(federation.state)[2] == 0
    expected = federation.weights
    federation.round((2,))
    assert [*federation.tasks[0].params] == ["0", "1"]
    assert same(expected, federation.copy_of(2))
    federation.round((3,), lost=(3,))
    assert read_synced_rounds(federation.state) == {0: 1, 1: 1, 2: 2, 3: 1}


def test_a_client_that_has_lost_its_copy_gets_the_whole_model_next(federation, same):
    federation.round((0, 1, 2, 3))
    federation.engine.restore(
        {c: v for c, v in federation.engine.client_versions().items() if c != 1}
    )
    federation.round((0, 1))
    assert [(u.client, len(u.params)) for u in federation.came] == [(0, 1), (1, 0)]
    assert 1 not in read_synced_rounds(federation.state)
    expected = federation.weights
    federation.round((1,))
    assert federation.tasks[0].subnets == WHOLE
    assert same(expected, federation.copy_of(1))


def changed_by(weights, generator, scale=1e-3):
    """An update that changes every weight, as it is merged."""
    change = {n: scale * torch.randn(t.shape, generator=generator) for n, t in weights.items()}
    return lambda client: fq.Update(client, WHOLE, (change,), 1.0, {})


def test_what_a_code_holds_back_is_kept_so_that_all_of_it_together_is_fedavg(home):
    method, draw = fq.STC(sparsity_down=0.1), torch.Generator().manual_seed(0)
    state = home.start(method)
    weights = select_weights(home.setup, state, method.whole)
    updates = [changed_by(weights, draw)(client) for client in range(3)]
    after = method.merge(home.setup, state, updates)
    held_back = unflatten_weights(after.server_tensors[RESIDUAL], weights)
    assert any(tensor.any() for tensor in held_back.values())
    for name, tensor in held_back.items():
        mean = torch.stack([update.params[0][name] for update in updates]).mean(0)
        torch.testing.assert_close(after.params[name] + tensor, weights[name] + mean)


def test_codes_are_kept_while_they_are_shorter_than_the_model(home):
    method, draw = fq.STC(sparsity_down=0.5), torch.Generator().manual_seed(0)
    state = home.start(method)
    weights = select_weights(home.setup, state, method.whole)
    whole = sum(tensor.nbytes for tensor in weights.values())
    state = replace(method.merge(home.setup, state, [changed_by(weights, draw)(0)]), round=1)
    lengths = [code.nbytes for code in read_codes(state).values()]
    for number in range(1, 2 * whole // lengths[0]):
        (task, other) = method.plan(home.setup, state, cohort(home, (0, 1)))
        assert other.subnets == WHOLE
        assert (task.subnets == WHOLE) == (sum(lengths) >= whole)
        if not task.subnets:
            assert sum(t.nbytes for t in task.params.values()) == sum(lengths)
        assert sum(code.nbytes for code in read_codes(state).values()) < whole
        updates = [changed_by(weights, draw)(2)] if number < 3 else []
        state = replace(method.merge(home.setup, state, updates), round=number + 1)
        lengths += [code.nbytes for n, code in read_codes(state).items() if n == number]
    assert not read_codes(state)
    assert not read_synced_rounds(state)


@pytest.fixture
def sent(federation):
    federation.round((0, 1, 2, 3))
    return federation.came[1]


def respelt(update, **tensors):
    return replace(update, params=({**update.params[0], **tensors},))


def test_codes_that_are_none_are_refused_by_name(federation, sent):
    setup, state, method = federation.local_params.setup, federation.state, federation.method
    code = sent.params[0]["code"]
    wrong_magnitude, much = code.clone(), code.clone()
    wrong_magnitude[4:8] = torch.tensor([math.nan]).view(torch.uint8)
    much[:4] = 255
    foreign = replace(method, sparsity_up=0.2).plan(
        setup, state, cohort(federation.local_params, (1,))
    )
    (other,) = federation.engine.run([replace(foreign[0], subnets=WHOLE, params=state.params)])
    for update, words in {
        respelt(sent, code=code[:-1]): "too short",
        respelt(sent, code=torch.cat([code, code[-1:]])): "too long",
        respelt(sent, code=torch.zeros(10**7, dtype=torch.uint8)): "too long",
        respelt(sent, code=much): "too long: it has 4294967295 entries",
        other: "too long",
        respelt(sent, code=wrong_magnitude): "magnitude nan, which is not finite",
        respelt(sent, code=code.half()): "torch.float16",
        respelt(sent, code=code[None]): "shape",
        respelt(sent, more=code): "differ in: more",
        replace(sent, params=({},)): "differ in: code",
        replace(sent, params=()): "0 sets of tensors",
        replace(sent, params=sent.params * 2): "2 sets of tensors",
        replace(sent, subnets=(setup.structure.subnet(0.5),)): "whole model",
        replace(sent, subnets=(fq.Subnet().with_private("me", "*"),)): "own .* of me",
        replace(
            sent, params=(copy_subnet_tensors(state.params, setup.structure, fq.Subnet()),)
        ): "than a code",
    }.items():
        with pytest.raises(UpdateError, match=f"client 1 sent .*{words}"):
            decode(method, setup, state, update)


def test_an_opened_code_is_a_change_of_all_tensors(federation, sent):
    setup, state = federation.local_params.setup, federation.state
    opened = decode(federation.method, setup, state, sent)
    assert replace(opened, params=()).__dict__ == replace(sent, params=()).__dict__
    (change,) = opened.params
    weights = federation.weights
    assert {n: t.shape for n, t in change.items()} == {n: t.shape for n, t in weights.items()}
    sizes = torch.cat([t.reshape(-1) for t in change.values()]).abs()
    assert (sizes != 0).sum() == math.floor(UP * len(sizes))
    assert len(sizes[sizes != 0].unique()) == 1


class Listening:
    """An engine that notes what travels."""

    def __init__(self, engine, structure=None):
        self._engine, self._structure = engine, structure
        self.client_versions, self.remove_unused = engine.client_versions, engine.remove_unused
        self.rounds = []

    def run(self, tasks):
        down = sum(t.nbytes for task in tasks for t in self._sent(task).values())
        results = list(self._engine.run(tasks))
        up = sum(
            t.nbytes
            for r in results
            if isinstance(r, fq.Update)
            for p in r.params
            for t in p.values()
        )
        self.rounds.append((down, up))
        yield from results

    def _sent(self, task):
        if not task.subnets:
            return task.params
        return copy_subnet_tensors(task.params, self._structure, task.subnets[0])


def test_records_count_the_bytes_of_codes(home, method):
    done = []
    setup = replace(home.setup, rounds=4)
    with LocalEngine(setup.model, setup.structure, home.people.data, workers=1) as engine:
        listening = Listening(engine, setup.structure)
        loop = TrainingLoop(
            setup,
            replace(method, fraction=0.75),
            listening,
            False,
            (),
            cadence=Cadence(),
            callbacks=[done.append],
        )
        loop.run()
    rounds = [event for event in done if isinstance(event, RoundDone)]
    assert [(r.bytes_down, r.bytes_up) for r in rounds] == listening.rounds[:4]
    whole = sum(t.nbytes for t in select_weights(setup, method.start(setup), method.whole).values())
    assert rounds[0].bytes_down == 3 * whole
    assert all(r.bytes_up < 3 * whole / 20 for r in rounds)
    assert rounds[-1].bytes_down < 3 * whole / 5


def test_a_round_goes_on_without_a_client_whose_code_is_damaged(home, method):
    class Damaging(Listening):
        def run(self, tasks):
            for result in self._engine.run(tasks):
                tensors = result.params[0] if result.client == 2 and result.params else {}
                code = tensors.get("code")  # statistics are none
                yield result if code is None else respelt(result, code=code[: len(code) // 2])

    done = []
    setup = replace(home.setup, rounds=2)
    with LocalEngine(setup.model, setup.structure, home.people.data, workers=0) as engine:
        TrainingLoop(setup, method, Damaging(engine), False, (), callbacks=[done.append]).run()
    rounds = [event for event in done if isinstance(event, RoundDone)]
    assert [r.num_clients for r in rounds] == [3, 3]
    for event in rounds:
        (failure,) = event.failures
        assert isinstance(failure, Failure)
        assert "client 2 sent a code that is too short" in failure.reason


def test_a_checkpoint_holds_all_that_the_next_round_needs(federation, tmp_path, same):
    for who in COHORTS[:4]:
        federation.round(who)
    state, setup = federation.state, federation.local_params.setup
    path = checkpoint.save_checkpoint(
        tmp_path / "saved", Checkpoint(state, federation.engine.client_versions()), "x"
    )
    loaded = checkpoint.load_checkpoint(path, "x").state
    assert loaded.method_state == state.method_state
    assert loaded.server_tensors.keys() == state.server_tensors.keys()
    assert same(state.server_tensors, loaded.server_tensors)
    plans = [federation.method.plan(setup, s, setup.clients) for s in (state, loaded)]
    for task, again in zip(*plans, strict=True):
        assert (task.subnets, task.recipe, task.seed) == (again.subnets, again.recipe, again.seed)
        assert same(task.params, again.params)
    opened = [changed_by(federation.weights, torch.Generator().manual_seed(1))(0)]
    merged = [federation.method.merge(setup, s, opened) for s in (state, loaded)]
    assert same(merged[0].params, merged[1].params)
    assert same(merged[0].server_tensors, merged[1].server_tensors)


class Numbered(nn.Module):
    """A net with a tensor of integers, which it needs."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.second = nn.Linear(25, 6, dtype=dtype), nn.Linear(6, 4, dtype=dtype)
        self.register_buffer("shift", torch.tensor([3]))

    def forward(self, x):
        return self.second(torch.relu(self.first(x.flatten(1) - self.shift)))


def test_integers_stay_and_other_numbers_are_refused(world, method):
    example = torch.zeros(2, 1, 5, 5)
    model = Numbered()
    run = fq.train(model, example, method, world.people, 3, workers=0)
    assert run.state.params["shift"].equal(model.shift)
    assert not run.state.params["second.weight"].equal(model.second.weight)
    x, y = world.people.train[0].batch(torch.arange(4))
    people = fq.make_clients((x.double(), y), count=1)
    with pytest.raises(ConfigError, match=r"'first\.weight' is torch\.float64; .*\.float\(\)"):
        fq.train(Numbered(torch.float64), example.double(), method, people, 1, workers=0)


def test_the_whole_model_comes_out(world, method):
    run = fq.train(world.setup.model, world.setup.example, method, world.people, 2, workers=0)
    assert [score.width for score in run.scores] == [1.0]
    small = run.customize()
    assert small.features[0].out_channels == 8
    assert small.features[1].running_mean is not None
    assert run.evaluate(workers=0) == run.scores


def test_settings_that_make_no_sense_are_refused():
    for value in (0, -0.1, 1.5, math.nan):
        for name in ("sparsity_up", "sparsity_down"):
            with pytest.raises(ConfigError, match=rf"{name} is the share .* got {value}"):
                fq.STC(**{name: value})
