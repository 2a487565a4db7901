"""Runs in this process: their folders, records, interruptions, and what can be asked of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.engines import client_work
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import BudgetError, CheckpointError, ConfigError, DataError, TrainingError
from fedquilt.federation.client import Recipe
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.events import ClientDone, ClientProgress, Evaluated, RoundDone, RoundStarted
from fedquilt.runs.identity import compute_fingerprint
from fedquilt.runs.loop import TrainingLoop
from fedquilt.runs.policies import Cadence
from fedquilt.runs.records import read_records
from fedquilt.training.local_test import RIGHT, TESTED

STEPS = fq.LocalTraining(lr=0.05, epochs=1, batch_size=4)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_an_interrupt_saves_the_last_completed_round(train, interrupting, tree, tmp_path):
    train(tmp_path / "whole")
    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):  # two clients a round: in the middle of round 4
        train(out, callbacks=[interrupting(ClientDone, 2 * 3 + 4 + 1)])
    assert checkpoints(out) == ["round-000002", "round-000003"]
    train(out, resume=True)
    assert tree(out) == tree(tmp_path / "whole")


def test_an_interrupt_in_the_first_round_leaves_a_run_that_can_be_resumed(
    train, interrupting, tree, tmp_path
):
    train(tmp_path / "whole")
    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        train(out, callbacks=[interrupting(ClientDone, 1)])
    assert not (out / "checkpoints").exists()
    train(out, resume=True)
    assert tree(out) == tree(tmp_path / "whole")


def test_an_evaluation_that_was_interrupted_is_made_up_for(train, interrupting, tree, tmp_path):
    train(tmp_path / "whole")
    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):  # round 2 is over, its evaluation under way
        train(out, callbacks=[interrupting(Evaluated, 1)])
    assert [r["round"] for r in records(out)] == [1, 2]
    assert checkpoints(out) == ["round-000002"]
    train(out, resume=True)
    assert tree(out) == tree(tmp_path / "whole")


def test_a_problem_of_the_server_loses_only_the_rounds_since_the_checkpoint(
    train, interrupting, tree, tmp_path
):
    train(tmp_path / "whole")
    out = tmp_path / "cut"
    with pytest.raises(ZeroDivisionError):
        train(out, callbacks=[interrupting(RoundStarted, 5, ZeroDivisionError)])
    assert checkpoints(out) == ["round-000002"]
    train(out, resume=True)
    assert tree(out) == tree(tmp_path / "whole")


def test_records_of_rounds_that_are_done_again_are_forgotten(train, interrupting, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        train(out, callbacks=[interrupting(RoundDone, 4, ZeroDivisionError)])
    assert [r["round"] for r in records(out)] == [1, 2, 2, 3]
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "loss": 0.12')  # killed while it wrote
    train(out, resume=True)
    rounds = [(r["round"], "scores" in r) for r in records(out)]
    expected = [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True), (5, False)]
    assert rounds == [*expected, (5, True)]


def test_times_are_recorded_apart(train, tmp_path):
    train(tmp_path / "run")
    assert not any("seconds" in r for r in records(tmp_path / "run"))
    times = [json.loads(x) for x in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert len(times) == len(records(tmp_path / "run"))
    assert all(t["seconds"] >= 0 for t in times)


def test_a_folder_that_holds_a_run_is_not_overwritten(train, tree, tmp_path):
    out = tmp_path / "run"
    train(out, rounds=1)
    before = tree(out)
    with pytest.raises(CheckpointError, match="already holds a run"):
        train(out, rounds=1)
    assert tree(out) == before


def test_a_folder_of_something_else_is_left_alone(train, tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(CheckpointError, match="not empty and holds no run"):
        train(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_killed_before_its_first_file_was_whole_can_be_started_again(train, tmp_path):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / ".initial.part").write_bytes(b"half")
    (tmp_path / ".config.toml.part").write_text("half")
    train(tmp_path, rounds=1)
    assert not (tmp_path / ".initial.part").exists()


def test_a_run_goes_on_with_the_examples_that_it_began_with(tmp_path):
    x, y = torch.rand(12, 4), torch.arange(12) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))

    def go(inputs, rounds, **more):
        people = fq.make_clients((inputs, y), count=2)
        method = fq.HeteroFL(STEPS, fraction=1.0)
        return fq.train(model, x[:1], method, people, rounds, workers=0, out=tmp_path, **more)

    go(x, 1)
    before = records(tmp_path)
    with pytest.raises(CheckpointError, match="was begun with other examples"):
        go(x + 1, 2, resume=True)
    assert records(tmp_path) == before
    go(x.clone(), 2, resume=True)
    assert max(record["round"] for record in records(tmp_path)) == 2


def test_there_must_be_a_run_to_resume(train, tmp_path):
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        train(tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_at_the_start_is_said_in_one_sentence(train, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedquilt.runs.directory.write_sealed", full)
    with pytest.raises(CheckpointError, match=r"could not be started .*No space left"):
        train(tmp_path / "run")


def test_the_model_given_is_left_as_it_is(train, traced):
    before = {n: t.clone() for n, t in traced[0].state_dict().items()}
    run = train(rounds=1)
    assert all(t.equal(before[n]) for n, t in traced[0].state_dict().items())
    assert not run.state.params["hidden.weight"].equal(before["hidden.weight"])


def test_a_resumed_run_starts_from_the_models_first_values(train, interrupting, traced, tmp_path):
    """The process that resumes may have initialised its model differently."""
    import copy

    train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", callbacks=[interrupting(ClientDone, 1)])
    other = copy.deepcopy(traced[0])
    torch.nn.init.normal_(other.hidden.weight)
    train(tmp_path / "cut", resume=True, model=other)
    found = [(tmp_path / n / "model" / "params.safetensors").read_bytes() for n in ("whole", "cut")]
    assert found[0] == found[1]


def test_a_customized_model_is_the_one_that_was_evaluated(train, people):
    run = train()
    examples = people.test[-1]
    x, y = examples.batch(torch.arange(len(examples)))
    for score in run.scores:
        small = run.customize(score.width)
        with torch.no_grad():
            accuracy = (small(x).argmax(1) == y).double().mean().item()
        assert accuracy == pytest.approx(score.accuracy)
        assert sum(p.numel() for p in small.parameters()) == score.params
    assert not small.training


def test_sizes_are_those_of_the_run_whoever_evaluates(train, people):
    run = train()
    x, y = people.test[-1].batch(torch.arange(6))
    richer = fq.make_clients((x, y), test=(x, y), count=1, budgets=1.0)
    poorer = fq.make_clients((x, y), test=(x, y), count=1, budgets=0.1)
    for others in (richer, poorer):
        assert [s.width for s in run.evaluate(others, workers=0)] == [s.width for s in run.scores]


def test_labels_that_the_model_cannot_give_are_refused_in_an_evaluation(train, people):
    x, y = people.test[-1].batch(torch.arange(4))
    others = fq.make_clients((x, y), test=(x, y + 90), count=2)
    with pytest.raises(DataError, match=r"labels go up to 9\d, so .* the model has"):
        train().evaluate(others, workers=0)


def test_an_opened_run_gives_the_same_models_and_scores(train, traced, people, tmp_path):
    run = train(tmp_path / "run")
    again = fq.open_run(tmp_path / "run", traced[0], run.method)
    for width in (1.0, 0.5):
        one, other = (r.customize(width).state_dict() for r in (run, again))
        assert all(other[n].equal(t) for n, t in one.items())
    assert again.scores == run.scores
    assert again.evaluate(people, workers=0) == run.scores
    assert run.evaluate(workers=0) == run.scores


def test_a_run_is_opened_by_a_string_with_its_clients_and_the_name_of_its_method(
    train, traced, people, tmp_path
):
    run = train(tmp_path / "run", method="fedavg")
    again = fq.open_run(str(tmp_path / "run"), traced[0], "fedavg", clients=people)
    assert again.method == run.method
    assert again.scores == run.scores
    assert again.evaluate(workers=0) == run.scores


def test_a_run_tells_itself_in_a_few_lines(train, traced, people, tmp_path):
    run = train(tmp_path / "run")
    head, *lines = repr(run).splitlines()
    assert head == f"Run of HeteroFL, 5 rounds, seed 2, in {tmp_path / 'run'}"
    assert lines == [
        f"  width {s.width:g}: {s.params:,} parameters, accuracy {s.accuracy:.1%}"
        for s in run.scores
    ]
    assert repr(fq.open_run(tmp_path / "run", traced[0], run.method)) == repr(run)
    parts = list(people.train.values())
    alone = train(
        clients=fq.make_clients(parts, test=parts), rounds=1
    )  # the server has no test data
    assert repr(alone).splitlines()[0] == "Run of HeteroFL, 1 round, seed 2"
    assert re.search(r"parameters, (user|local) accuracy \d", repr(alone))


@pytest.mark.parametrize("make", [fq.standalone, fq.lg_fedavg])
def test_personal_models_are_evaluated_where_they_were_kept(train, traced, people, tmp_path, make):
    run = train(tmp_path / "run", method=make(STEPS, fraction=0.5))
    again = fq.open_run(tmp_path / "run", traced[0], run.method)
    assert again.evaluate(people, workers=0) == run.scores
    lost = train(method=make(STEPS, fraction=0.5))
    assert lost.scores == run.scores
    with pytest.raises(ConfigError, match="ended with the run"):
        lost.evaluate(workers=0)


def test_only_states_that_are_needed_stay(train, traced, people, tmp_path):
    """Without checkpoints one version a client; with them, theirs too."""
    net, structure = traced
    method = fq.standalone(STEPS, fraction=1.0)
    run = train(rounds=1, method=method)
    setup, folder = replace(run.setup, rounds=5), tmp_path / "clients"
    seen = []

    def watch(event):
        if isinstance(event, RoundStarted):
            seen.append(len(list(folder.glob("*"))))

    with LocalEngine(net, structure, people.data, workers=0, folder=folder) as engine:
        TrainingLoop(
            setup, method, engine, people.has_server_test, people.testers, callbacks=[watch]
        ).run()
    assert seen == [0, 4, 4, 4, 4]
    train(tmp_path / "run", method=method, rounds=5, cadence=Cadence(checkpoint_every=2))
    versions = {p.name for p in (tmp_path / "run" / "clients").iterdir()}
    assert versions == {f"client-{c}.{v}.safetensors" for c in range(4) for v in (4, 5)}


def test_a_closing_phase_that_nobody_answers_is_refused(train, traced, people):
    net, structure = traced
    run = train(rounds=1)

    class Broken(LocalEngine):
        def run(self, tasks):
            from fedquilt.federation.client import Failure
            from fedquilt.training.statistics import QueryStatistics

            for task, result in zip(tasks, super().run(tasks), strict=True):
                is_query = isinstance(task.recipe, QueryStatistics)
                yield Failure(task.client, "asleep") if is_query else result

    with (
        Broken(net, structure, people.data, workers=0) as engine,
        pytest.raises(TrainingError, match="phase statistics, round 1; client 0: asleep"),
    ):
        TrainingLoop(run.setup, run.method, engine, people.has_server_test, people.testers).run()


@dataclass(frozen=True)
class Aloud:
    """A recipe that tells how far it is with another."""

    inner: Recipe

    def run(self, task, context):
        context.report_progress(0.25)
        result = self.inner.run(task, context.for_client(context.client_state))  # in silence
        context.report_progress(0.75)
        return result


class AloudEngine(LocalEngine):
    """An engine in which whatever clients do is told, evaluation too."""

    def run(self, tasks):
        return super().run([replace(t, recipe=Aloud(t.recipe)) for t in tasks])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rounds_clients_tell_how_far_they_are_before_they_are_done(
    train, traced, people, monkeypatch, workers
):
    monkeypatch.setattr(client_work, "MIN_REPORT_SECONDS", 0.0)
    run, exchanges = train(rounds=3), []

    def watch(event):
        if isinstance(event, RoundStarted):
            exchanges.append([])
        elif isinstance(event, ClientProgress | ClientDone):
            exchanges[-1].append(event)

    with AloudEngine(*traced, people.data, workers=workers) as engine:
        loop = TrainingLoop(
            run.setup, run.method, engine, people.has_server_test, people.testers, callbacks=[watch]
        )
        state, scores = loop.run()
    assert [sum(isinstance(e, ClientDone) for e in x) for x in exchanges] == [2, 2, 2, 4]
    for events in exchanges:
        clients = {e.client for e in events}
        for client in clients:
            shares = [ClientProgress(client, share) for share in (0.25, 0.75, 1.0)]
            assert [e for e in events if e.client == client] == [*shares, ClientDone(client)]
    assert scores == run.scores
    assert all(t.equal(run.state.params[n]) for n, t in state.params.items())


def test_fingerprints_do_not_depend_on_the_process(train):
    run = train(rounds=1)
    assert len(compute_fingerprint(run.setup, run.method)) == 64
    assert compute_fingerprint(run.setup, run.method) == compute_fingerprint(
        replace(run.setup), run.method
    )


def test_personal_models_cannot_be_taken_away(train):
    run = train(method=fq.standalone(STEPS), rounds=1)
    with pytest.raises(ConfigError, match="stay on the clients"):
        run.customize(width=0.5)


def test_limits_choose_the_widest_size_that_was_trained(train):
    run = train(rounds=1)
    sizes = run.method.sizes(run.setup)
    limit = sum(p.numel() for p in run.customize(width=sizes[1]).parameters()) + 1
    small = run.customize(params=limit)
    assert small.fedquilt_info.width == sizes[1]
    assert run.customize().fedquilt_info.width == sizes[0]


# clients that test their own models

TESTING = Cadence(evaluate_every=2, checkpoint_every=2, test_locally=True)


def without_local(folder):
    """The records but for the metrics of local tests."""
    found = records(folder)
    for record in found:
        metrics = record.get("clients", {}).get("metrics", {})
        for name in (RIGHT, TESTED):
            metrics.pop(name, None)
    return found


def without_records(state):
    return {n: v for n, v in json.loads(state).items() if n not in ("records", "digest")}


@pytest.mark.parametrize(
    "method",
    [
        fq.HeteroFL(STEPS, fraction=0.5),
        fq.standalone(STEPS, fraction=0.5),
        fq.lg_fedavg(STEPS, fraction=0.5),
        fq.ADDS(STEPS, fraction=0.5, keep_fraction=0.7, keep_lr=0.1),
        fq.fed_uniform(STEPS, fraction=0.5),
        fq.SplitMix(STEPS, fraction=0.5, base=0.5, statistics="local", stacked=False),
    ],
    ids=lambda method: type(method).__name__,
)
def test_that_clients_test_their_models_changes_nothing_else(train, tree, tmp_path, method):
    found = []
    for name, pace in (("plain", replace(TESTING, test_locally=False)), ("tested", TESTING)):
        train(tmp_path / name, method=method, cadence=pace)
        files = tree(tmp_path / name)
        files.pop("metrics.jsonl")
        states = [without_records(files.pop(n)) for n in [*files] if n.endswith("state.json")]
        found.append((files, states, without_local(tmp_path / name)))
    assert found[0] == found[1]
    tested, plain = (read_records(RunDirectory(tmp_path / n)) for n in ("tested", "plain"))
    rounds = [r for r in tested if "scores" not in r]
    assert [len(r["local"]) for r in rounds] == [2] * 5
    assert all(0 <= share <= 1 for r in rounds for share in r["local"].values())
    assert not any(r.get("local") for r in plain)


def test_the_only_clients_own_model_is_the_global_one(train, people):
    """Their mean is itself, so that before and after are the same."""
    alone = replace(
        people, clients=people.clients[:1], test={0: people.test[0], -1: people.test[-1]}
    )
    events = []
    train(
        method=fq.FedAvg(STEPS, fraction=1.0),
        clients=alone,
        cadence=Cadence(evaluate_every=1, test_locally=True),
        callbacks=[events.append],
    )
    local = [dict(e.local) for e in events if isinstance(e, RoundDone)]
    shared = [{0: e.scores[0].user_accuracy} for e in events if isinstance(e, Evaluated)]
    assert local == shared
    assert len({found[0] for found in local}) > 1


def test_models_that_are_never_merged_are_as_good_afterwards(train, people):
    events = []
    run = train(method=fq.standalone(STEPS), cadence=TESTING, callbacks=[events.append])
    *_, last = (e for e in events if isinstance(e, RoundDone))
    assert set(last.local) == {0, 1, 2, 3}
    assert last.local_accuracy == pytest.approx(run.scores[0].user_accuracy)


@pytest.mark.parametrize("workers", [1, 2])
def test_own_models_are_tested_alike_by_any_number_of_workers(train, tmp_path, workers):
    for count in (0, workers):
        train(tmp_path / str(count), cadence=TESTING, workers=count)
    found = [(tmp_path / str(n) / "metrics.jsonl").read_bytes() for n in (0, workers)]
    assert found[0] == found[1]
    assert any(r.get("local") for r in read_records(RunDirectory(tmp_path / "0")))


def test_own_models_are_tested_alike_in_a_resumed_run(train, interrupting, tree, tmp_path):
    train(tmp_path / "whole", cadence=TESTING)
    with pytest.raises(KeyboardInterrupt):
        train(
            tmp_path / "cut", cadence=TESTING, callbacks=[interrupting(ClientDone, 2 * 3 + 4 + 1)]
        )
    train(tmp_path / "cut", cadence=TESTING, resume=True)
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


def test_only_clients_with_test_data_are_asked_and_only_where_models_are_trained(
    train, traced, people
):
    asked = []

    class Listening(LocalEngine):
        def run(self, tasks):
            asked.extend((t.client, type(t.recipe).__name__) for t in tasks)
            return super().run(tasks)

    run = train(rounds=2, method=fq.HeteroFL(STEPS, fraction=1.0))
    some = replace(people, test={1: people.test[1]})
    events = []
    with Listening(*traced, some.data, workers=0) as engine:
        TrainingLoop(
            run.setup,
            run.method,
            engine,
            some.has_server_test,
            some.testers,
            cadence=replace(TESTING, evaluate_every=0),
            callbacks=[events.append],
        ).run()
    round = [(c, "WithLocalTest" if c == 1 else "LocalSGD") for c in range(4)]
    closing = [(c, "QueryStatistics") for c in range(4)]
    assert asked == [*round, *round, *closing, (1, "Evaluate")]
    assert [set(e.local) for e in events if isinstance(e, RoundDone)] == [{1}, {1}]


def test_a_run_is_opened_only_with_the_method_that_it_was_trained_with(train, traced, tmp_path):
    folder = tmp_path / "run"
    method = fq.HeteroFL(STEPS, fraction=0.5)
    train(folder, method=method)
    other_training = fq.HeteroFL(replace(STEPS, lr=1.0), fraction=1.0)  # does not matter any more
    assert fq.open_run(folder, traced[0], other_training).customize(0.5)
    with pytest.raises(CheckpointError, match="trained with HeteroFL, got FedAvg; open it with"):
        fq.open_run(folder, traced[0], "fedavg")
    with pytest.raises(CheckpointError, match="with scaler = True, got scaler = False"):
        fq.open_run(folder, traced[0], replace(method, scaler=False))


def test_a_refused_start_leaves_no_folder_behind(train, tmp_path):
    too_wide = fq.SplitMix(STEPS, base=0.9)  # more than some clients can afford
    with pytest.raises(BudgetError, match="even one base"):
        train(tmp_path / "new" / "run", method=too_wide)
    no_subnets = fq.FedPA(STEPS, subnets=())  # refused when it starts, in the run's own folder
    with pytest.raises(ConfigError, match="give one for each client"):
        train(tmp_path / "new" / "run", method=no_subnets)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(BudgetError):
        train(tmp_path / "mine" / "run", method=too_wide)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_population_tells_itself_in_a_line(people):
    assert repr(people) == "4 clients, budgets 1, 0.5; 8 examples each"
    assert len(people) == 4


def test_a_budget_that_no_client_has_is_no_problem_of_a_checkpoint(tmp_path):
    data = torch.rand(12, 4), torch.arange(12) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    people = fq.make_clients(data, count=2, budgets=(1.0, 0.5, 0.25))
    method = fq.fed_uniform(local_training=STEPS)
    run = fq.train(model, data[0][:1], method, people, 1, workers=0, out=tmp_path / "run")
    assert fq.open_run(tmp_path / "run", model, method).scores == run.scores


def test_clients_that_could_not_be_evaluated_are_told():
    inputs, labels = torch.rand(25, 4), torch.arange(25) % 3
    rows = slice(0, 1), slice(1, 13), slice(13, 25)  # one example has no variance
    data = [(inputs[r], labels[r]) for r in rows]
    clients = fq.make_clients(data, test=data)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    method = fq.FedAvg(fq.LocalTraining(epochs=1, batch_size=4))
    run = fq.train(net, inputs[:1], method, clients, 1, workers=0)
    with pytest.warns(UserWarning, match="1 of 3 clients could not be evaluated.*client 0: "):
        scores = run.evaluate(workers=0, personal_statistics="refreshed")
    assert scores[0].personal_accuracy is not None
