"""The runs of a comparison: none twice, none lost, the same randomness for all."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.comparison.conftest import merged, run

import fedquilt as fq
from fedquilt.comparison.from_settings import TrialMaker, split_settings
from fedquilt.comparison.trial import compute_address
from fedquilt.comparison.variants import list_variants
from fedquilt.settings.load import flatten_settings
from fedquilt.settings.schema import Config
from fedquilt.settings.toml import format_value


def test_a_finished_run_is_never_done_again(small):
    _, log, folder = small
    runs = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*.jsonl")}
    again, second = run(folder)
    assert len(log.done) == 4
    assert second.done == []
    assert second.reused == 4
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*.jsonl")} == runs
    assert again.to_csv() == small[0].to_csv()


def test_only_what_is_new_is_done(small):
    _, log = run(small[2], compare={"methods": ["heterofl", "fedavg"], "seeds": 2})
    assert sorted(log.done) == [("fedavg", 0), ("fedavg", 1)]


def address(tmp_path=None, **changes):
    options, flat = split_settings(merged(**changes))
    variant = list_variants(flat, ["heterofl"])[0]
    return compute_address(TrialMaker(options).make(variant, {"seed": 0}))


def test_an_address_knows_what_changes_a_result_and_nothing_else(tmp_path):
    usual = address()
    assert address(run={"workers": 3, "checkpoint_every": 1}) == usual
    assert address(local_training={"lr": 0.2}) != usual
    assert address(rounds=3) != usual
    assert address(data={"budgets": [1.0, 0.25]}) != usual
    assert address(run={"evaluate_every": 2}) != usual  # which the records depend on
    assert address(run={"clients_per_pass": 1}) == usual
    assert address(run={"clients_per_pass": 4}) != usual  # which changes the last bits


def test_data_and_models_are_known_by_their_contents(tmp_path):
    def write(name, seed):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(40, 4, generator=draw).numpy()
        y = (torch.arange(40) % 2).numpy()
        np.savez(tmp_path / name, x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
        return {"source": str(tmp_path / name), "fraction": 1.0, "clients": 2, "budgets": [1.0]}

    def write_model(width):
        (tmp_path / "net.py").write_text(
            "from torch import nn\n"
            f"def make(): return nn.Sequential(nn.Linear(4, {width}), nn.Linear({width}, 2))\n"
        )
        return {"name": f"{tmp_path / 'net.py'}:make"}

    def find(data, model):
        flat = {f"data.{n}": v for n, v in data.items()} | {"model.name": model["name"]}
        variant = list_variants({**flat, "rounds": 1}, ["heterofl"])[0]
        return compute_address(TrialMaker(split_settings({})[0]).make(variant, {"seed": 0}))

    model = write_model(4)
    one, copy, other = write("a.npz", 0), write("b.npz", 0), write("c.npz", 1)
    assert find(one, model) == find(copy, model) != find(other, model)
    before = find(one, model)
    write_model(6)
    assert find(one, model) != before


ROUNDS = 40  # enough that a signal comes before the end
MANY = {"rounds": ROUNDS, "run": {"checkpoint_every": 2, "evaluate_every": 10}}


def command(out):
    """``fedquilt compare`` with the small settings."""
    words = ["--methods", "heterofl,fjord", "--seeds", "2", "--workers", "2", "--out", str(out)]
    settings = merged(**MANY)
    del settings["compare"]
    for name, value in flatten_settings(settings).items():
        words += ["--set", f"{name}={format_value(value)}"]
    return [sys.executable, "-m", "fedquilt", "compare", *words]


def stop(out, number):
    """Starts a comparison, and sends it a signal when it has written a checkpoint of its own."""
    before = set(out.glob("runs/*/checkpoints/*"))
    process = subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while set(out.glob("runs/*/checkpoints/*")) <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=100)
    return process.returncode, errors.decode()


def test_a_comparison_that_is_stopped_and_called_again_is_as_if_it_was_not(tmp_path):
    out = tmp_path / "stopped"
    code, errors = stop(out, signal.SIGKILL)
    assert code == -signal.SIGKILL, errors
    code, errors = stop(out, signal.SIGTERM)  # shells let programs in the background ignore SIGINT
    assert code == 130, errors
    assert re.search("go on with: .*python.* -m fedquilt compare ", errors)  # as it was called
    done = {path: path.stat().st_mtime_ns for path in out.glob("results/*.json")}
    assert len(done) < 4
    subprocess.run(command(out), check=True, capture_output=True)
    assert {path: path.stat().st_mtime_ns for path in done} == done  # none was done twice
    table, _ = run(tmp_path / "whole", **MANY)
    assert (out / "table.csv").read_text() == table.to_csv()
    for records in (tmp_path / "whole" / "runs").glob("*/metrics.jsonl"):
        other = out / "runs" / records.parent.name / "metrics.jsonl"
        assert other.read_bytes() == records.read_bytes()


class LoggedExamples:
    """Examples that write down which rows are drawn for training."""

    def __init__(self, examples, log, client):
        self._examples, self._log, self._client = examples, log, client

    def __len__(self):
        return len(self._examples)

    @property
    def labels(self):
        return self._examples.labels

    @property
    def label_set(self):
        return self._examples.label_set

    def select(self, rows):
        return LoggedExamples(self._examples.select(rows), self._log, self._client)

    def batch(self, rows, generator=None):
        if generator is not None:
            self._log.add((self._client, tuple(rows.tolist())))
        return self._examples.batch(rows, generator)


METHODS = ["fedavg", "feddrop", "fedrolex", "fjord", "heterofl", "sheterofl", "splitmix"]


def is_trial(rows):
    """Whether these are the first examples, in order: on them it is tried whether nets stack."""
    return rows == tuple(range(len(rows)))


def test_all_methods_have_the_same_initial_weights_cohorts_and_batches_at_one_seed(tmp_path):
    batches, cohorts, weights = {}, {}, {}
    digits = fq.load_dataset("digits").take_first(0.1)
    for method in METHODS:
        log = set()

        def clients(seed, log=log):
            made = fq.make_clients(
                digits.train, test=digits.test, count=4, budgets=(1.0, 0.5), seed=seed
            )
            train = {c: LoggedExamples(data, log, c) for c, data in made.train.items()}
            return fq.Population(made.clients, train, made.test)

        fq.compare(
            lambda: fq.make_model("mlp", {"image_size": 8, "hidden": [8]}),
            digits.example,
            [method],
            clients,
            rounds=2,
            seeds=[3],
            fraction=0.5,
            local_training=fq.LocalTraining(epochs=1, batch_size=10),
            out=tmp_path / method,
            workers=0,
        )
        (folder,) = (tmp_path / method / "runs").iterdir()
        batches[method] = {entry for entry in log if not is_trial(entry[1])}
        weights[method] = (folder / "initial.safetensors").read_bytes()
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        cohorts[method] = [line["clients"]["id"] for line in lines if "clients" in line]
    assert len(set(weights.values())) == 1
    assert cohorts["heterofl"][0] != cohorts["heterofl"][1]  # they are drawn
    for method in METHODS:
        assert cohorts[method] == cohorts["heterofl"], method
        assert batches[method] == batches["heterofl"], method


def test_what_methods_choose_by_themselves_is_the_same_for_all_in_a_comparison():
    """Their own defaults differ: learning rates, epochs, cohorts, budgets."""
    options, flat = split_settings({})
    configs = [
        TrialMaker(options).make(variant, {"seed": 0}).config
        for variant in list_variants(flat, ["all"])
        if variant.name != "centralised"
    ]
    shared = {
        (str(c.local_training), str(c.data), c.method.fraction, c.rounds, str(c.model))
        for c in configs
    }
    assert len(configs) > 15
    assert len(shared) == 1
    assert isinstance(configs[0], Config)


@dataclass(frozen=True)
class FailsLate(fq.HeteroFL):
    def plan_training(self, setup, state, cohort):
        if state.round == 1 and setup.seed == 1:
            raise fq.FedquiltError("round 1 is not for us")
        return super().plan_training(setup, state, cohort)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_fails_is_a_row_with_its_sentence_and_the_others_go_on(workers):
    data = (torch.rand(24, 4), torch.arange(24) % 3)
    clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    training = fq.LocalTraining(epochs=1)
    methods = {"good": fq.HeteroFL(training), "late": FailsLate(training)}
    table = fq.compare(model, data[0][:1], methods, clients, 2, seeds=2, workers=workers)
    rows = {row["variant"]: row for row in table}
    assert rows["late"]["problem"] == "round 1 is not for us"
    assert rows["late"]["seeds"] == 1
    assert rows["good"]["problem"] is None
    assert rows["good"]["seeds"] == 2
    assert table.rows[0].variant == "good"


def test_a_run_in_a_process_that_starts_anew_has_the_bits_of_this_one(monkeypatch):
    """As on macOS and Windows: classes and functions that no module has are sent."""
    monkeypatch.setattr("fedquilt.comparison.queue.choose_start_method", lambda: "spawn")
    slope = 0.25

    class Leaky(torch.nn.Module):
        def forward(self, x):
            return x.relu() + slope * x

    class Halved(fq.HeteroFL):
        def choose_width(self, setup, round, client):
            return super().choose_width(setup, round, client) / 2

    data = (torch.rand(24, 4), torch.arange(24) % 3)
    clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))

    def make_model():
        return torch.nn.Sequential(torch.nn.Linear(4, 8), Leaky(), torch.nn.Linear(8, 3))

    methods = {"halved": Halved(fq.LocalTraining(epochs=1))}
    here, anew = (
        fq.compare(make_model, data[0][:1], methods, clients, 2, seeds=1, workers=workers)
        for workers in (0, 1)
    )
    assert list(anew) == list(here)
    assert next(iter(here))["problem"] is None


def test_what_no_new_process_can_get_is_said_before_a_run_starts(monkeypatch, tmp_path):
    monkeypatch.setattr("fedquilt.comparison.queue.choose_start_method", lambda: "spawn")
    data = (torch.rand(24, 4), torch.arange(24) % 3)
    clients = fq.make_clients(data, test=data, count=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    with (tmp_path / "log").open("w") as log:

        def make_model():
            log.write("made")
            return model

        with pytest.raises(fq.FedquiltError, match=r"data and methods of .* workers = 0"):
            fq.compare(make_model, data[0][:1], ["fedavg"], clients, 1, seeds=1, workers=1)


def test_a_run_whose_process_dies_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPARING", str(os.getpid()))
    table, log = run(
        tmp_path,
        workers=2,
        compare={
            "methods": ["heterofl"],
            "seeds": 1,
            "variants": {"dies": {"model": dying(tmp_path)}},
        },
    )
    (failure,) = log.failed
    assert failure.trial.variant == "dies"
    assert "SIGKILL" in failure.problem
    assert {row["variant"]: row["seeds"] for row in table} == {"heterofl": 1, "dies": 0}


def dying(tmp_path):
    """A model that ends the process in which it is trained."""
    (tmp_path / "net.py").write_text(
        "import os, signal, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x.flatten(1)))\n"
        "def make(hidden):\n"
        "    if str(os.getpid()) != os.environ['COMPARING']:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return Net()\n"
    )
    return {"name": f"{tmp_path / 'net.py'}:make"}
