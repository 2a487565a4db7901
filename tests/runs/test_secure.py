"""Runs with secure sums: the same bits however they are run, whoever drops out; and who may not."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.federation.aggregation.secure_sum import SecureSum, derive_rounding_seed, join_sums
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.rings import find_rings, list_averaged
from fedquilt.federation.secure.encoding import decode_sums, encode_change
from fedquilt.runs.events import RoundDone
from fedquilt.runs.loop import TrainingLoop
from fedquilt.structure.cut import view_subnet_tensors
from fedquilt.training.secure import MaskedReply, RevealSecrets, ShareSecrets, StartSession

SECURE = fq.SecureAggregation(threshold=3)
TRAINING = fq.LocalTraining(lr=0.1, epochs=1, batch_size=4)
STEPS = (StartSession, ShareSecrets, MaskedReply, RevealSecrets)
WIDTHS = (1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25)
METHODS = {
    "fedavg": fq.FedAvg(TRAINING, fraction=1.0),
    "heterofl": fq.HeteroFL(TRAINING, fraction=1.0, own_rows=False),
    "fedrolex": fq.FedRolex(TRAINING, fraction=1.0, own_rows=False),
    "feddrop": fq.FedDrop(TRAINING, fraction=1.0),
    "fjord": fq.FjORD(TRAINING, fraction=1.0),
    "nefl": fq.NeFL(TRAINING, fraction=1.0, gammas=(0.25, 0.5, 1.0), tolerance=0.5),
    "sheterofl": fq.SHeteroFL(TRAINING, fraction=1.0),
    "splitmix": fq.SplitMix(TRAINING, fraction=1.0, base=0.25, sort_bases=False),
}


def make_clients() -> fq.Population:
    inputs = torch.rand(56, 4, generator=torch.Generator().manual_seed(1))
    return fq.make_clients((inputs, (inputs.sum(1) * 3).long() % 3), count=7, budgets=WIDTHS)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def train(method: Any = "heterofl", secure: Any = SECURE, rounds: int = 2, **options: Any) -> Any:
    events: list[Any] = []
    method = METHODS.get(method, method) if isinstance(method, str) else method
    options = {"workers": 0, "seed": 5, "callbacks": [events.append], **options}
    run = fq.train(
        make_model(),
        torch.zeros(2, 4),
        method,
        make_clients(),
        rounds,
        secure_aggregation=secure,
        **options,
    )
    return run, [event for event in events if isinstance(event, RoundDone)]


def bits(run: Any) -> Mapping[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in run.state.params.items()}


@pytest.fixture(scope="module")
def whole() -> Any:
    """A run without any trouble."""
    return train()


class Dropouts(fq.LocalEngine):
    """An engine whose clients drop out before a step; who has dropped out is not asked again."""

    drops: Mapping[int, int]
    asked: list[tuple[int, type]]

    def run(self, tasks: Any, *, enough: Any = None) -> Iterator[Update | Failure]:
        steps = [STEPS.index(type(task.recipe)) if is_step(task) else None for task in tasks]
        there = [
            task
            for task, step in zip(tasks, steps, strict=True)
            if step is None or self.drops.get(task.client, 9) != step
        ]
        results = super().run(there, enough=enough)
        for task, step in zip(tasks, steps, strict=True):
            self.asked.append((task.client, type(task.recipe)))
            is_lost = step is not None and self.drops.get(task.client, 9) == step
            yield Failure(task.client, "it dropped out") if is_lost else next(results)


def is_step(task: Task) -> bool:
    return type(task.recipe) in STEPS


def make_dropouts(drops: Mapping[int, int]) -> Any:
    def make(setup: Any, population: Any, folder: Any) -> Dropouts:
        engine = Dropouts(setup.model, setup.structure, population.data, workers=0, folder=folder)
        engine.drops, engine.asked = drops, []
        return engine

    return make


def sum_in_the_clear(method: Any, senders: set[int], revealers: set[int], threshold: int) -> Any:
    """One round by hand: the integers of all senders, added up without masks."""
    people = make_clients()
    model = make_model()
    structure = fq.trace_structure(model, torch.zeros(2, 4))
    given = fq.Setup(model, structure, torch.zeros(2, 4), people.clients, 1, 5)
    setup = method.prepare_model(given)
    state = replace(method.start(setup), phase="train")
    tasks = method.plan(setup, state, setup.clients)
    with fq.LocalEngine(setup.model, setup.structure, people.data, workers=0) as engine:
        updates = list(engine.run(tasks))
    rings = find_rings(setup.structure, [u.subnets for u in updates], list_averaged(setup))
    quantizer = SECURE.make_quantizer(max(u.weight for u in updates), len(tasks))
    totals: dict[int, Any] = {}
    counts, revealed = Counter[int](), Counter[int]()
    for update in updates:
        if update.client not in senders:
            continue
        before = [view_subnet_tensors(state.params, setup.structure, s) for s in update.subnets]
        encoded = encode_change(
            rings,
            update.subnets,
            before,
            update.params,
            quantizer,
            client=update.client,
            weight=update.weight,
            seed=derive_rounding_seed(setup, state, update.client),
        )
        for ring, vector in encoded.items():
            totals[ring] = totals.get(ring, 0) + vector
            counts[ring] += 1
            revealed[ring] += update.client in revealers
    opened = {ring: total for ring, total in totals.items() if revealed[ring] >= threshold}
    sums, refused = decode_sums(quantizer, opened, counts)
    assert not refused
    pipeline = method.aggregation(setup, "train")
    aggregate = pipeline.aggregator.aggregate_sums(setup, state, join_sums(rings, sums))
    replies = tuple(replace(u, params=()) for u in updates if u.client in senders)
    after = pipeline.finish(setup, state, replace(aggregate, replies=replies))
    return {name: tensor.numpy().tobytes() for name, tensor in after.params.items()}


@settings(max_examples=8, deadline=None)
@given(steps=st.lists(st.sampled_from([9, 9, 9, 0, 1, 2, 3]), min_size=7, max_size=7))
def test_a_round_is_the_sum_of_integers_in_the_clear_with_every_pattern_of_dropouts(steps):
    method = replace(METHODS["heterofl"], query_statistics=False)
    drops = dict(enumerate(steps))
    senders = {client for client, step in drops.items() if step in (3, 9)}
    revealed = [client for client, step in drops.items() if step == 9]
    faults = fq.FaultPolicy(quorum=1)
    start = partial(train, method, rounds=1, engine=make_dropouts(drops), faults=faults)
    if len(revealed) < 3:  # nobody's masks can be removed
        with pytest.raises(TrainingError):
            start()
        return
    run, (done,) = start()
    assert bits(run) == sum_in_the_clear(method, senders, set(revealed), threshold=3)
    assert {failure.client for failure in done.failures} == set(drops) - senders
    closed = sum(size for size, _ in done.secure.closed)
    assert done.secure.opened + closed == sum(t.numel() for t in trained(run))


def trained(run: Any) -> list[torch.Tensor]:
    named = run.setup.model.state_dict().items()
    return [t for n, t in named if t.is_floating_point() and "running" not in n]


@pytest.mark.filterwarnings("ignore:with NeFL")  # it draws which client trains which submodel
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_linear_method_has_the_bits_of_the_same_integers_in_the_clear(name):
    """And these are the plain mean, up to a step of rounding."""
    case = METHODS[name]
    method = case if name == "splitmix" else replace(case, query_statistics=False)
    run, (done,) = train(method, rounds=1)
    assert not done.failures
    assert done.secure.clipped == 0
    if name != "fjord":  # whose clients send less than they might: the rest counts as unchanged
        clear = sum_in_the_clear(method, set(range(7)), set(range(7)), threshold=3)
        compared = {n: b for n, b in bits(run).items() if "running" not in n}
        assert compared == {n: clear[n] for n in compared}
    if done.secure.closed:
        return
    plain, (other,) = train(method, secure=None, rounds=1)
    for tensor_name, tensor in plain.state.params.items():
        is_private = name == "fjord" and "@" in tensor_name
        if tensor.is_floating_point() and not is_private:
            torch.testing.assert_close(run.state.params[tensor_name], tensor, atol=1e-6, rtol=0)
    assert done.loss == pytest.approx(sum(other.losses.values()) / 7, abs=1e-4)


def test_bits_do_not_depend_on_workers(whole):
    run, rounds = train(workers=2)
    assert bits(run) == bits(whole[0])
    assert [replace(r, seconds=0) for r in rounds] == [replace(r, seconds=0) for r in whole[1]]


def test_bits_do_not_depend_on_being_stopped_and_resumed(whole, tmp_path):
    def stop(event: Any) -> None:
        if isinstance(event, fq.RoundStarted) and event.round == 2:
            raise KeyboardInterrupt

    cadence = fq.Cadence(checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        train(out=tmp_path / "run", callbacks=[stop], cadence=cadence)
    run, rounds = train(out=tmp_path / "run", resume=True, cadence=cadence)
    assert bits(run) == bits(whole[0])
    assert [r.round for r in rounds] == [2]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if "secret" in path.name]
    with pytest.raises(fq.FedquiltError, match=r"settings"):
        train(out=tmp_path / "run", resume=True, rounds=3, secure=replace(SECURE, clip=1.0))


def test_secrets_of_a_session_are_gone_after_its_last_step():
    kept: list[str] = []

    class Watching(Dropouts):
        def run(self, tasks: Any, *, enough: Any = None) -> Iterator[Update | Failure]:
            yield from super().run(tasks, enough=enough)
            if tasks and isinstance(tasks[0].recipe, RevealSecrets):
                folder = self._scratch.folder / "secrets"
                assert folder.stat().st_mode & 0o777 == 0o700
                for path in folder.iterdir():
                    assert path.stat().st_mode & 0o777 == 0o600
                    kept.append(path.read_text())

    def make(setup: Any, population: Any, folder: Any) -> Watching:
        engine = Watching(setup.model, setup.structure, population.data, workers=0)
        engine.drops, engine.asked = {}, []
        return engine

    train(rounds=1, engine=make)
    assert len(kept) >= 7
    for text in kept:
        stored = json.loads(text)
        names = ("channel_key", "mask_seed", "own_secret", "own_shares")
        assert [stored[name] for name in names] == ["", "", "", ""]


def test_masked_replies_tell_the_server_nothing_but_integers():
    replies: list[tuple[Task, Update]] = []

    class Watching(Dropouts):
        def run(self, tasks: Any, *, enough: Any = None) -> Iterator[Update | Failure]:
            for task, result in zip(tasks, super().run(tasks, enough=enough), strict=True):
                if isinstance(task.recipe, MaskedReply):
                    replies.append((task, result))
                yield result

    def make(setup: Any, population: Any, folder: Any) -> Watching:
        engine = Watching(setup.model, setup.structure, population.data, workers=0)
        engine.drops, engine.asked = {}, []
        return engine

    _, (done,) = train(rounds=1, engine=make)
    training = [(task, reply) for task, reply in replies if "LocalSGD" in repr(task.recipe)]
    assert len(training) == 7
    for task, reply in training:
        assert (reply.weight, reply.metrics) == (1.0, {})
        assert all(tensor.dtype == torch.int32 for tensor in reply.params[0].values())
        sizes = sum(t.numel() for t in reply.params[0].values())
        assert sizes == sum(size for _, size in task.recipe.sizes)
    assert not done.losses
    assert all(record.metrics == {} for record in done.clients)


def test_rings_with_too_few_clients_keep_their_values_and_the_record_says_so(tmp_path):
    method = replace(METHODS["heterofl"], query_statistics=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run, (done,) = train(
            method, secure=fq.SecureAggregation(threshold=4), rounds=1, out=tmp_path / "run"
        )
    assert "fewer than 4 of all clients send them, down to 3" in str(told[0].message)
    (closed,) = done.secure.closed
    assert closed[1] == "3 clients sent it, and 4 are needed"
    before = make_model().state_dict()
    structure = run.setup.structure
    half = fq.copy_subnet_tensors(before, structure, structure.subnet(0.5))
    moved = {n: t.ne(before[n]) for n, t in run.state.params.items() if t.is_floating_point()}
    assert moved["3.weight"].sum() > 0
    assert not moved["3.weight"][4:].any()
    assert not moved["3.weight"][:, 4:].any()
    assert tuple(half["3.weight"].shape) == (4, 4)
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    stored = next(record for record in records if "loss" in record)
    assert stored["secure"]["closed"] == [[closed[0], closed[1]]]


def test_the_bytes_of_all_steps_are_counted():
    _, (secure,) = train("fedavg", rounds=1)
    _, (plain,) = train("fedavg", secure=None, rounds=1)
    num_rings = 1  # the loss is sent behind the weights
    per_client = 64 + 6 * (17 * (1 + num_rings) + 16) + 7 * 17 * num_rings
    integers = 4 * (2 + 3)  # behind the ring, and the loss
    counters = 8  # of batch normalization, which is no part of the sum
    expected = sum(plain.sent.values()) + 7 * (per_client + integers - counters)
    assert secure.bytes_up == expected
    assert secure.bytes_up == sum(record.bytes_sent for record in secure.clients)


def refused(method: Any, rule: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        train(method, **options)
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (fq.HeteroFL(fraction=1.0), "which labels they have; set method.own_rows = false"),
        (fq.APFL(warm_up=0.5), "with APFL they choose by their data"),
        (fq.ADDS(), "with ADDS they choose by their data"),
        (fq.STC(), "has to see single updates"),
        (fq.Centralised(), "trains on the server"),
        (fq.standalone(), "sends nothing that could be summed"),
        (fq.SplitMix(base=0.25, sort_bases=True), "SortBases.* has to see each of them"),
        (fq.FedDrop(width=0.5, per_client=True, query_statistics=False), "divide the model into"),
        (fq.FedAvg(fraction=0.3), "2 clients take part in a round, .*threshold is 3"),
    ],
)
def test_what_cannot_be_summed_securely_is_refused_in_one_sentence(method, rule):
    refused(method, rule)


def test_settings_that_cannot_work_are_refused():
    rule = "7 clients take part in a round, .*threshold is 8"
    refused("fedavg", rule, secure=replace(SECURE, threshold=8))
    refused("fedavg", "leave out run.test_locally", cadence=fq.Cadence(test_locally=True))
    with pytest.raises(ConfigError, match="at least 3 neighbors"):
        fq.SecureAggregation(threshold=3, neighbors=2)
    with pytest.raises(ConfigError, match="greater than or equal to 2"):
        fq.SecureAggregation(threshold=1)


@pytest.mark.parametrize("part", ["validator", "transform", "aggregator"])
def test_parts_that_see_single_updates_are_refused(part):
    class CapWeight(fq.UpdateTransform):
        def transform(self, setup: Any, state: Any, update: Any) -> Any:
            return update

    class Refuse(fq.Validator):
        def validate(self, setup: Any, state: Any, update: Any) -> None:
            pass

    class Median(fq.Aggregator):
        is_linear = False

        def aggregate(self, setup: Any, state: Any, updates: Any) -> Any:
            raise NotImplementedError

    parts = {"validator": [Refuse()], "transform": [CapWeight()], "aggregator": []}[part]
    with pytest.raises(ConfigError, match=r"see each of them|has to see single updates"):
        fq.chain(*parts, SecureSum(SECURE, Median() if part == "aggregator" else fq.Mean()))


def test_a_neighborhood_gives_the_same_bits_as_all_neighbors(whole):
    run, rounds = train(secure=replace(SECURE, neighbors=4))
    assert bits(run) == bits(whole[0])
    assert not any(r.secure.closed for r in rounds)


def test_a_round_that_cannot_be_opened_is_repeated_and_then_fails():
    drops = {client: 3 for client in range(5)}  # two reveal, three are needed
    with pytest.raises(TrainingError, match=r"nothing could be opened: masks of client"):
        train("fedavg", rounds=1, engine=make_dropouts(drops))


def test_diverged_training_drops_out_on_the_client():
    diverging = replace(TRAINING, lr=1e30, max_grad_norm=None, epochs=3)
    with pytest.raises(TrainingError, match=r"not finite; its training diverged"):
        train(fq.FedAvg(diverging, fraction=1.0), rounds=1)


def test_the_loop_is_the_plain_one_without_secure_aggregation():
    assert TrainingLoop.__dataclass_fields__["secure"].default is None


@pytest.fixture(scope="module")
def private_change() -> Any:
    """How a round of no training moves a model under noise that seven clients share, per cell."""
    still = fq.LocalTraining(lr=1e-12, epochs=1, batch_size=8)
    inputs = torch.rand(56, 40, generator=torch.Generator().manual_seed(1))
    people = fq.make_clients((inputs, torch.arange(56) % 3), count=7, budgets=[1.0])
    model = nn.Sequential(nn.Linear(40, 100), nn.Linear(100, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = fq.train(
        model,
        inputs[:1],
        fq.FedAvg(still, fraction=1.0),
        people,
        1,
        workers=0,
        sampling="fixed",
        privacy=fq.Privacy(noise_multiplier=2.0, clip=0.5, mechanism="local"),
        secure_aggregation=fq.SecureAggregation(threshold=4),
    )
    moved = [(run.state.params[name] - before[name]).double().flatten() for name in before]
    return torch.cat(moved)


def test_clients_share_the_noise_of_a_sum(private_change):
    """Each adds σC/√t, so seven of them with t = 4 give σC √(7/4), divided by seven."""
    expected = 2.0 * 0.5 * (7 / 4) ** 0.5 / 7
    count = len(private_change)
    assert float(private_change.std()) == pytest.approx(expected, rel=5 / (2 * count) ** 0.5)
    assert abs(float(private_change.mean())) < 5 * expected / count**0.5


@pytest.mark.parametrize("mechanism", ["central", "local"])
@pytest.mark.parametrize("name", ["fedavg", "heterofl"])
def test_a_private_mean_of_sums_is_that_of_updates(name, mechanism):
    """Without noise, so that both runs are the same but for rounding."""
    privacy = fq.Privacy(noise_multiplier=0.0, clip=0.3, mechanism=mechanism)
    options = {"privacy": privacy, "sampling": "fixed", "rounds": 1}
    secure, (done,) = train(name, **options)
    plain, _ = train(name, secure=None, **options)
    for key, tensor in plain.state.params.items():
        torch.testing.assert_close(secure.state.params[key], tensor, atol=2e-6, rtol=0)
    assert (done.secure is None) == (mechanism == "central")


@pytest.mark.parametrize("mechanism", ["central", "local"])
def test_private_secure_runs_have_the_same_bits_with_workers_and_after_a_kill(
    mechanism, tmp_path, monkeypatch
):
    """A process is killed after its second round, before that is saved: another session."""
    monkeypatch.setattr("fedquilt.runs.plan.make_secret", lambda: b"k" * 32)
    options = {
        "privacy": fq.Privacy(noise_multiplier=0.3, mechanism=mechanism),
        "sampling": "fixed",
        "rounds": 3,
        "cadence": fq.Cadence(checkpoint_every=1, evaluate_every=0),
    }
    method = replace(METHODS["heterofl"], fraction=0.8)  # who takes part is secret too
    whole, _ = train(method, **options)
    noiseless = replace(options["privacy"], noise_multiplier=0.0)
    assert bits(train(method, **{**options, "privacy": noiseless})[0]) != bits(whole)
    assert bits(train(method, **options, workers=2)[0]) == bits(whole)

    def die(event: Any) -> None:
        if isinstance(event, RoundDone) and event.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    out = tmp_path / "run"
    child = get_context("fork").Process(
        target=train, args=(method,), kwargs={**options, "out": out, "callbacks": [die]}
    )
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["round-000001"]
    assert bits(train(method, **options, out=out, resume=True)[0]) == bits(whole)


def test_clients_tell_nothing_of_their_own_test_data():
    inputs = torch.rand(40, 4)
    data = inputs, inputs.argmax(1) % 3
    people = fq.make_clients(data, test=data, count=4)
    options: Any = {"workers": 0, "secure_aggregation": fq.SecureAggregation(threshold=2)}
    run = fq.train(make_model(), inputs[:2], METHODS["fedavg"], people, 1, **options)
    (score,) = run.scores
    assert score.value is not None
    assert score.user_value is score.local_value is None
    alone = replace(people, test={c: d for c, d in people.test.items() if c >= 0})
    assert not alone.has_server_test
    with pytest.warns(UserWarning, match="so this run has no scores; give the server test data"):
        fq.train(make_model(), inputs[:2], METHODS["fedavg"], alone, 1, **options)
    chosen = fq.make_clients(data, test=data, count=4, validation=0.5)
    with pytest.raises(ConfigError, match="leave out selection"):
        fq.train(
            make_model(), inputs[:2], METHODS["fedavg"], chosen, 1,
            selection=fq.Selection(keep="best"), cadence=fq.Cadence(evaluate_every=1), **options,
        )  # fmt: skip


def test_clipping_that_needs_single_updates_is_refused():
    for clipping in ("rings", "adaptive"):
        privacy = fq.Privacy(noise_multiplier=1.0, clipping=clipping)
        refused("fedavg", "clients clip their changes themselves", privacy=privacy)


def test_a_cohort_that_is_too_small_by_chance_releases_nothing():
    privacy = fq.Privacy(noise_multiplier=1.0, mechanism="local")
    method = replace(METHODS["fedavg"], fraction=0.5)
    _, rounds = train(method, privacy=privacy, sampling="poisson", rounds=6)
    assert len(rounds) == 6
    reasons = [r.secure.closed[0][1] for r in rounds if r.secure.closed]
    assert all("clients were drawn, and 3 are needed" in reason for reason in reasons)
    assert all(r.privacy.epsilon is None or r.privacy.epsilon > 0 for r in rounds)
