"""What the records of a run say about its clients."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import fedquilt as fq
from fedquilt.evaluation.clients import ClientRecord
from fedquilt.federation.client import Failure
from fedquilt.runs.events import RoundDone
from fedquilt.runs.record_format import decode_clients, encode_event, expand_record
from fedquilt.structure.packing import pack_subnet

STEPS = fq.LocalTraining(lr=0.05, epochs=1, batch_size=4)


def pack(subnets, run):
    return [pack_subnet(subnet, run.setup.structure) for subnet in subnets]


def encode(structure, *clients):
    event = RoundDone(3, "train", 0.5, 2, (), 10, 20, 1.5, clients=clients)
    text = json.dumps(encode_event(event, structure))
    return json.loads(text), len(text)


def test_clients_come_back_from_a_record_as_they_were(traced):
    _, structure = traced
    half, rest = structure.subnet(0.5), structure.subnet(1.0).with_private("own", "norm.*")
    clients = (
        ClientRecord(4, (half,), (half,), 100, {"loss": 0.5, "examples": 12.0}),
        ClientRecord(7, (half, rest)),  # failed
        ClientRecord(9, (), (rest,), 30, {"loss": 2.0, "examples": 3.0, "odd": 0.25}),
    )
    record, _ = encode(structure, *clients)
    assert decode_clients(record, structure) == clients
    assert len(record["clients"]["subnets"]) == 2  # each once
    expanded = expand_record(record)
    assert expanded["sent"] == {4: 100, 9: 30}
    assert expanded["losses"] == {4: 0.5, 9: 2.0}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e300])
def test_a_loss_that_is_no_number_is_kept_apart_from_one_that_was_not_reported(traced, loss):
    silent = ClientRecord(1, (), (), 0, {})
    record, _ = encode(traced[1], silent, ClientRecord(2, (), (), 0, {"loss": loss}))
    assert expand_record(record)["losses"] == {2: None}
    (_, own) = decode_clients(record, traced[1])
    assert str(own.metrics["loss"]) == str(loss)


def test_records_of_a_thousand_clients_are_small(traced):
    _, structure = traced
    subnet = structure.subnet(0.5)
    metrics = {"loss": 0.123456789, "examples": 60.0}
    clients = [ClientRecord(i, (subnet,), (subnet,), 123456, metrics) for i in range(1000)]
    _, size = encode(structure, *clients)
    assert 100 * size < 5e6  # a hundred rounds


@pytest.mark.parametrize(
    "method",
    [fq.HeteroFL(STEPS, fraction=0.5), fq.SplitMix(STEPS, fraction=0.5, base=0.5), fq.STC(STEPS)],
    ids=["heterofl", "splitmix", "stc"],
)
def test_records_say_what_the_engine_was_asked_and_what_came_back(
    train, traced, people, tmp_path, method
):
    asked, answered = [], []

    def make(setup, people, folder):
        from fedquilt.engines.local import LocalEngine

        class Listening(LocalEngine):
            def run(self, tasks, **options):
                asked.append([(task.client, task.subnets) for task in tasks])
                results = list(super().run(tasks, **options))
                answered.append(results)
                return iter(results)

        return Listening(setup.model, setup.structure, people.data, workers=0, folder=folder)

    settings = {"method": method, "rounds": 3, "cadence": fq.Cadence(evaluate_every=0)}
    run = train(tmp_path / "run", engine=make, **settings)
    rounds = run.read_clients()
    assert len(rounds) == 3
    for record, tasks, results in zip(rounds, asked, answered, strict=False):
        assert [(c.client, pack(c.received, run)) for c in record] == [
            (client, pack(subnets, run)) for client, subnets in tasks
        ]
        for client, result in zip(record, results, strict=True):
            assert client.bytes_sent == sum(
                t.nbytes for part in result.params for t in part.values()
            )
            assert client.metrics.keys() == result.metrics.keys()
            assert client.metrics == pytest.approx(dict(result.metrics), rel=1e-4)
    alone = train(**settings)  # in memory
    assert [[c.client for c in r] for r in alone.read_clients()] == [
        [c.client for c in r] for r in rounds
    ]
    opened = fq.open_run(tmp_path / "run", traced[0], method)
    assert opened.read_clients() == rounds
    scores = opened.by_client(people, workers=0)
    assert sum(score.rounds for score in scores) == sum(len(record) for record in rounds)


def test_clients_that_failed_are_in_the_records_without_an_answer(train, tmp_path):
    def make(setup, people, folder):
        from fedquilt.engines.local import LocalEngine

        class Failing(LocalEngine):
            def run(self, tasks, **options):
                for task, result in zip(tasks, super().run(tasks, **options), strict=True):
                    yield Failure(task.client, "asleep") if task.client == 2 else result

        return Failing(setup.model, setup.structure, people.data, workers=0, folder=folder)

    method = fq.FedAvg(STEPS, fraction=1.0)
    run = train(tmp_path / "run", method=method, rounds=1, engine=make)
    (clients,) = run.read_clients()
    assert [client.is_valid for client in clients] == [True, True, False, True]
    assert clients[2] == replace(clients[2], returned=(), bytes_sent=0, metrics=None)
