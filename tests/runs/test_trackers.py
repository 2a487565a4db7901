"""Trackers: what they log, that a run goes on without them, and that they go on with a run."""

import ast
import csv
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.runs.events import Evaluated, RoundDone
from fedquilt.runs.measurements import measure_event
from fedquilt.runs.trackers.catalog import make_tracker

SOURCE = Path(fq.__file__).parent
STOP_AFTER, ROUNDS = 3, 5


def train(out=None, callbacks=(), **options):
    torch.manual_seed(0)
    inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    data = (inputs, labels)
    clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    return fq.train(
        model,
        inputs[:1],
        fq.HeteroFL(fq.LocalTraining(epochs=1)),
        clients,
        options.pop("rounds", ROUNDS),
        workers=0,
        out=out,
        cadence=fq.Cadence(evaluate_every=2, checkpoint_every=2),
        callbacks=callbacks,
        **options,
    )


def stop(event):
    """Presses Ctrl-C in a round whose numbers are logged already."""
    if isinstance(event, RoundDone) and event.round == STOP_AFTER:
        raise KeyboardInterrupt


def train_in_two_parts(folder, make):
    with pytest.raises(KeyboardInterrupt):
        train(folder, [make(), stop])
    return train(folder, [make()], resume=True)


@pytest.fixture(scope="module")
def expected():
    """What an uninterrupted run logs: by round, the numbers but for the time."""
    logged = {}

    class Memory(fq.Tracker):
        def log(self, values, round):
            kept = {name: v for name, v in values.items() if name != "train/seconds"}
            logged.setdefault(round, {}).update(kept)

    train(callbacks=[Memory()])
    return logged


def list_points(expected, name):
    return [(round, values[name]) for round, values in expected.items() if name in values]


def test_names_say_the_group_the_number_and_the_size(expected):
    assert sorted(expected) == [1, 2, 3, 4, 5]
    assert {"train/loss", "train/clients", "train/bytes_up"} <= set(expected[1])
    assert {"accuracy/1", "accuracy/0.5", "accuracy/worst", "loss/0.5"} <= set(expected[2])
    assert expected[5]["final/accuracy/0.5"] == expected[5]["accuracy/0.5"]
    assert not any(name.startswith("final/") for name in expected[4])


def test_csv_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path, expected):
    train_in_two_parts(tmp_path / "run", fq.CSVTracker)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {
        int(row.pop("round")): {n: float(v) for n, v in row.items() if v and n != "train/seconds"}
        for row in rows
    }
    assert len(rows) == ROUNDS
    assert found == {round: pytest.approx(values) for round, values in expected.items()}


def test_tensorboard_has_every_round_once_after_a_run_was_resumed(tmp_path, expected):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    train_in_two_parts(tmp_path / "run", fq.TensorBoardTracker)
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("train/loss", "accuracy/0.5", "final/accuracy/1"):
        points = [(scalar.step, scalar.value) for scalar in events.Scalars(name)]
        assert points == [(r, pytest.approx(v)) for r, v in list_points(expected, name)]
    settings = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| method.local_training.epochs | 1 |" in settings


def test_mlflow_goes_on_with_the_run_that_it_knows(tmp_path, expected, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "store").as_uri()
    train_in_two_parts(tmp_path / "run", lambda: fq.MLflowTracker("digits", uri=uri))
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["rounds"] == str(ROUNDS)
    for name in ("train/loss", "accuracy/0.5", "final/accuracy/1"):
        points = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        assert points == [(r, pytest.approx(v)) for r, v in list_points(expected, name)]


def read_wandb(path):
    """The history in an offline file of W&B."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(path))
    rows = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its reader's files
def test_wandb_offline_goes_on_under_the_same_id(tmp_path, expected, monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    train_in_two_parts(folder, lambda: fq.WandbTracker("digits", mode="offline"))
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    run_id = json.loads((folder / "trackers.json").read_text())["wandb digits"]
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    before, after = map(read_wandb, files)
    assert [row["round"] for row in before if "train/loss" in row] == [1, 2, 3]
    points = [(row["round"], row["train/loss"]) for row in after if "train/loss" in row]
    assert points == [(r, pytest.approx(expected[r]["train/loss"])) for r in (3, 4, 5)]
    assert after[-1]["final/accuracy/0.5"] == pytest.approx(expected[5]["accuracy/0.5"])


# what goes wrong


class Broken(fq.Tracker):
    def __init__(self, place):
        self.place, self.calls = place, []

    def _at(self, place):
        self.calls.append(place)
        if place == self.place:
            raise OSError("no   route\nto host")

    def start(self, run):
        self._at("start")

    def log(self, values, round):
        self._at("log")

    def finish(self, end):
        self._at("finish")


@pytest.mark.parametrize(
    ("place", "calls"),
    [
        ("start", ["start"]),
        ("log", ["start", "log"]),
        ("finish", ["start", *["log"] * 5, "finish"]),
    ],
)
def test_a_tracker_that_fails_is_switched_off_and_the_run_goes_on(place, calls, caplog):
    broken, seen = Broken(place), []
    with pytest.warns(UserWarning, match=r"Broken failed .*\(OSError: no route to host\)"):
        run = train(callbacks=[broken, seen.append], rounds=3)
    assert len(run.scores) == 2
    assert broken.calls == calls
    assert seen[-1] == fq.RunEnded("finished")
    (record,) = [r for r in caplog.records if r.name == "fedquilt.runs.trackers.tracker"]
    assert record.exc_info[0] is OSError


def test_a_tracker_that_failed_is_tried_again_in_the_next_run():
    broken = Broken("start")
    with pytest.warns(UserWarning, match="switched off"):
        train(callbacks=[broken], rounds=1)
    broken.place = None
    train(callbacks=[broken], rounds=1)
    assert broken.calls == ["start", "start", "log", "log", "finish"]


def test_an_error_of_a_callback_that_is_no_tracker_ends_the_run():
    def fail(event):
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        train(callbacks=[fail])


def test_a_tracker_without_a_place_is_an_error_before_the_first_round():
    seen = []
    with pytest.raises(ConfigError, match=r'CSVTracker writes .* train with out="..."'):
        train(callbacks=[seen.append, fq.CSVTracker()])
    assert not any(isinstance(event, fq.RoundStarted) for event in seen)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord", "tracker 'tensorbord' is not known.*did you mean 'tensorboard'"),
        ("csv(3 + x)", r"a tracker is a name such as csv, a call .* got 'csv\(3 \+ x\)'"),
        ("csv(file='a')", "does not fit the settings of csv"),
        ("wandb(mode='ofline')", "mode of wandb 'ofline' is not known"),
        ("missing.py:make", "tracker file 'missing.py' does not exist"),
        ("os:getcwd", "makes a callback, a callable that takes an event, got str"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_one_sentence(text, message):
    with pytest.raises(ConfigError, match=message) as problem:
        make_tracker(text)
    assert "\n" not in str(problem.value)


def test_a_package_that_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedquilt\[mlflow\]'"):
        fq.MLflowTracker()


# the start and the end of a run


def test_a_run_says_how_it_starts_and_how_it_ends(tmp_path):
    seen = []
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a", [seen.append, stop])
    first, last = seen[0], seen[-1]
    assert (first.total, first.round, first.folder) == (ROUNDS, 0, tmp_path / "a")
    assert first.settings["method"] == "HeteroFL"
    assert first.settings["method.local_training.epochs"] == 1
    assert last == fq.RunEnded("stopped")
    train(tmp_path / "a", [seen.append], resume=True)
    again = [event for event in seen if isinstance(event, fq.RunStarted)][-1]
    assert (again.round, again.is_resumed) == (2, True)
    assert seen[-1] == fq.RunEnded("finished")


def test_a_run_that_fails_says_why():
    def fail(event):
        if isinstance(event, RoundDone):
            raise TrainingError("out of luck")

    seen = []
    with pytest.raises(TrainingError):
        train(callbacks=[seen.append, fail])
    assert seen[-1] == fq.RunEnded("failed", "out of luck")


def test_numbers_of_other_events_are_none():
    assert measure_event(fq.RoundStarted(1, "train", 2, 3)) == {}
    assert measure_event(Evaluated(1, (), (), 0, 0, False, 0.1)) == {}


# logging


def test_a_run_is_logged_rounds_as_infos_and_clients_as_debug(caplog):
    with caplog.at_level(logging.DEBUG, logger="fedquilt"):
        train(rounds=1)
    by_level = {}
    for record in caplog.records:
        by_level.setdefault(record.levelname, []).append(record.getMessage())
    assert by_level["INFO"][0] == "run starts: 1 round"
    assert by_level["INFO"][-1] == "run finished"
    assert any(line.startswith("round 1/1 · loss ") for line in by_level["INFO"])
    assert "client 0 has answered" in by_level["DEBUG"]
    assert set(by_level) == {"INFO", "DEBUG"}


def test_the_library_leaves_the_set_up_of_logging_to_programs():
    handlers = logging.getLogger("fedquilt").handlers
    assert [type(handler) for handler in handlers] == [logging.NullHandler]
    assert logging.getLogger("fedquilt").level == logging.NOTSET


def test_only_commands_print():
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] != "cli":
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
            assert "print" not in names, path
