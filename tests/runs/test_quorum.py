"""What a round may lack, and what is safe when it lacks more."""

from __future__ import annotations

import json

import pytest
import torch

import fedquilt as fq
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import TrainingError
from fedquilt.federation.client import SERVER, Failure
from fedquilt.runs.checkpoint import count_saved_rounds
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.events import RoundDone, RoundRepeated
from fedquilt.runs.from_config import is_finished
from fedquilt.runs.policies import FaultPolicy
from fedquilt.training.evaluate import Evaluate
from fedquilt.training.statistics import QueryStatistics

FEDAVG = fq.FedAvg(fq.LocalTraining(lr=0.05, epochs=1, batch_size=4), fraction=1.0)


def failing(fails):
    """Makes an engine of this machine whose clients fail where ``fails(task)`` says so."""

    class Failing(LocalEngine):
        def run(self, tasks, **_):
            for task, result in zip(tasks, super().run(tasks), strict=True):
                yield Failure(task.client, "asleep") if fails(task) else result

    def make(setup, people, folder):
        return Failing(setup.model, setup.structure, people.data, workers=0, folder=folder)

    return make


def is_training(task) -> bool:
    return not isinstance(task.recipe, (Evaluate, QueryStatistics))


def test_half_of_a_rounds_clients_are_enough_and_fewer_are_not(train, tmp_path):
    two = failing(lambda task: is_training(task) and task.client < 2)
    seen = []
    train(method=FEDAVG, engine=two, callbacks=[seen.append], rounds=1)
    (done,) = (event for event in seen if isinstance(event, RoundDone))
    assert (done.num_clients, len(done.failures)) == (2, 2)
    three = failing(lambda task: is_training(task) and task.client < 3)
    with pytest.raises(TrainingError, match=r"1 of 2 clients that are needed .* client 0: asleep"):
        train(method=FEDAVG, engine=three, rounds=1)
    train(method=FEDAVG, engine=three, rounds=1, faults=FaultPolicy(quorum=1))


@pytest.mark.parametrize("count", [1, 2])
def test_of_one_or_two_clients_one_is_enough(train, people, count):
    some = fq.make_clients([people.train[c] for c in range(count)])
    engine = failing(lambda task: is_training(task) and task.client > 0)
    train(method=FEDAVG, clients=some, engine=engine, rounds=1)
    nobody = failing(is_training)
    with pytest.raises(TrainingError, match="no client gave a usable answer"):
        train(method=FEDAVG, clients=some, engine=nobody, rounds=1)


def test_a_run_that_lacks_answers_keeps_what_it_has_learned_and_goes_on_later(train, tmp_path):
    rounds = []

    def late(task) -> bool:
        return is_training(task) and len(rounds) == 3 and task.client > 0

    def watch(event):
        rounds.extend([event] * isinstance(event, RoundDone))

    settings = {"method": FEDAVG, "rounds": 5, "cadence": fq.Cadence(checkpoint_every=0)}
    with pytest.raises(TrainingError, match="round 4"):
        train(tmp_path / "run", engine=failing(late), callbacks=[watch], **settings)
    assert count_saved_rounds(RunDirectory(tmp_path / "run").checkpoints) == 3
    again, whole = train(tmp_path / "run", resume=True, **settings), train(**settings)
    assert all(torch.equal(again.state.params[n], t) for n, t in whole.state.params.items())


def test_a_round_is_tried_again_also_in_a_closing_phase(train):
    calls, seen = [], []

    def first_time(task) -> bool:
        is_query = isinstance(task.recipe, QueryStatistics)
        calls.extend([task] * is_query)
        return is_query and len(calls) <= 4

    run = train(engine=failing(first_time), faults=FaultPolicy(attempts=2), callbacks=[seen.append])
    (lost,) = (event for event in seen if isinstance(event, RoundRepeated))
    assert (lost.num_clients, lost.quorum) == (0, 2)
    assert all(torch.equal(run.state.params[n], t) for n, t in train().state.params.items())


def test_the_model_is_safe_before_the_last_evaluation(train, tmp_path):
    held_out = failing(lambda task: task.client == SERVER)
    settings = {"rounds": 2, "cadence": fq.Cadence(evaluate_every=0)}
    with pytest.raises(TrainingError, match="held-out data could not be evaluated"):
        train(tmp_path / "run", engine=held_out, **settings)
    whole = train(tmp_path / "whole", **settings)
    for name in ("params.safetensors", "bundle.json"):
        mine, theirs = ((tmp_path / f / "model" / name).read_bytes() for f in ("run", "whole"))
        assert mine == theirs
    assert not is_finished(
        RunDirectory(tmp_path / "run"), 2
    )  # so that what is missing is made up for
    again = train(tmp_path / "run", resume=True, **settings)
    assert again.scores == whole.scores
    assert is_finished(RunDirectory(tmp_path / "run"), 2)
    finals = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line).get("is_final", False) for line in finals) == 1


def test_a_client_that_cannot_test_its_personal_model_is_left_out(train, people):
    def first(task) -> bool:
        return isinstance(task.recipe, Evaluate) and task.client == 0

    method = fq.standalone(fq.LocalTraining(lr=0.05, epochs=1, batch_size=4))
    run = train(method=method, engine=failing(first), rounds=1)
    assert run.scores[0].num_examples == 3 * len(people.test[SERVER])
    nobody = failing(lambda task: isinstance(task.recipe, Evaluate))
    with pytest.raises(TrainingError, match="held-out data could not be evaluated: asleep"):
        train(method=method, engine=nobody, rounds=1)
