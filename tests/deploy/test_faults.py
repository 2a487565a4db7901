"""What a run survives, on real processes: clients, nodes, servers and SuperLinks that fail.

Every story ends with a finished run, and what it has learned is compared with a run on this machine
in which the same clients fail in the same rounds: the bits agree only if every accepted update
counts exactly once, and nothing else does.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedquilt.deploy.app_folder import write_app
from fedquilt.deploy.federation import Federation
from fedquilt.deploy.launch import RunningFederation, resolve_for_nodes
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.client import Failure
from fedquilt.federation.state import Setup
from fedquilt.runs.from_config import plan_run_over
from fedquilt.runs.plan import start_run
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import (
    build_model,
    build_population,
    build_structure,
    load_source,
    make_example,
)
from fedquilt.settings.toml import read_toml

from .test_federation import assert_same_bits

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(1800)]
NODES = 3
COMMON = {
    "seed": 3,
    "data.budgets": [1.0, 0.5, 0.25],
    "model.name": "heterofl-cnn",
    "model.width": 0.125,
    "local_training.epochs": 1,
    "run.evaluate_every": 0,
    "run.checkpoint_every": 1,
}


def records(folder):
    """What a run has recorded about its rounds so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if "num_clients" in record]


def missing(folder):
    """By round, which clients failed, and why."""
    return [{f["client"]: f["reason"] for f in r["failures"]} for r in records(folder)]


class Missing(LocalEngine):
    """This machine's engine, with clients that fail in given rounds without having worked."""

    rounds = iter(())

    def run(self, tasks):
        failing = next(self.rounds, {})
        results = super().run([task for task in tasks if task.client not in failing])
        for task in tasks:
            yield Failure(task.client, "failed") if task.client in failing else next(results)


def replayed(folder, out):
    """The same run on this machine, with the same failures."""
    config = load_config(read_toml(folder / "config.toml"))
    source = load_source(config)
    model, example = build_model(config), make_example(source)
    people, structure = build_population(config, source), build_structure(config, model, example)
    whole = Setup(model, structure, example, people.clients, config.rounds, config.seed)
    rounds = iter(missing(folder))

    def engine(setup, people, folder):
        made = Missing(setup.model, setup.structure, people.data, workers=0, folder=folder)
        made.rounds = rounds
        return made

    start_run(plan_run_over(config, whole, people, out, engine=engine)).train()
    return out


def assert_exactly_once(folder, out):
    """Every update that was accepted counts once, and the records agree."""
    assert_same_bits(folder, replayed(folder, out))
    ours, theirs = records(folder), records(out)
    for name in ("round", "num_clients", "loss", "bytes_up"):
        assert [record[name] for record in ours] == [record[name] for record in theirs]


FAULTS = (
    {},
    {1: "raises", 2: "NaN", 3: "another shape", 4: "another run", 5: "another round"},
    {1: "hangs", 2: "dies", 3: "is late", 5: "is stopped"},
)
DEADLINE, PATIENCE = 30.0, 90.0  # seconds; Flower needs 70 to see that a process is dead


def test_clients_that_misbehave_are_missed_by_name_and_the_others_work_counts(tmp_path):
    nodes = []
    for number, faults in enumerate(FAULTS):
        notes = tmp_path / f"notes-{number}"
        notes.mkdir()
        nodes.append(
            {"partition-id": number, "faults": json.dumps(faults), "notes": str(notes)},
        )
    out = tmp_path / "run"
    settings = {
        **COMMON,
        "rounds": 6,
        "method.name": "heterofl",
        "flower.out": str(out),
        "flower.deadline": DEADLINE,
        "flower.timeout": PATIENCE,
        "flower.quorum": 1,  # the healthy client alone is enough
    }
    with Federation(tmp_path / "federation", nodes) as federation:
        federation.wait()
        place = RunningFederation(federation.connection, federation.nodes)
        app = write_app(
            tmp_path / "app", resolve_for_nodes(load_config(override_settings({}, settings)), place)
        )
        shutil.copy(Path(__file__).with_name("faults.py"), app)
        about = app / "pyproject.toml"
        about.write_text(
            about.read_text().replace("fedquilt.deploy.client_app:app", "faults:client")
        )
        federation.connection.run(app, lambda line: None)
        stopped = int((tmp_path / "notes-2" / "pid-5").read_text())
        assert Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    failures = missing(out)
    assert not any(0 in found for found in failures)  # the healthy one
    assert [1 in found for found in failures] == [True] * 5 + [False]
    for number, words in enumerate(
        ["it raised", "not finite", "shape", "another message", "another message"]
    ):
        assert words in failures[number][1]
    assert f"took longer than {DEADLINE:g} seconds" in failures[0][2]
    assert "stopped responding" in failures[1][2]  # so Flower says
    assert f"not reply within {PATIENCE:g} seconds" in failures[2][2]
    assert any(2 in found for found in failures[3:])  # the stopped one; when, is a matter of time
    assert any(2 not in found for found in failures[3:])  # it is there again, after all that
    assert_exactly_once(out, tmp_path / "replayed")


def fedquilt(*words):
    command = [sys.executable, "-m", "fedquilt", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(is_so, process, seconds=600):
    """Waits while a command runs."""
    end = time.monotonic() + seconds
    while not is_so():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)


def the_process(federation, words):
    """The one process of a federation whose command has these words."""
    pids = federation.list_processes()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    (pid,) = [pid for pid, command in commands.items() if words.encode() in command]
    return pid


def test_nodes_servers_and_superlinks_may_be_killed_and_the_run_is_finished(tmp_path):
    """STC's clients keep what they have not sent yet; it must survive all of it."""
    out, folder = tmp_path / "run", tmp_path / "federation"
    settings = {**COMMON, "rounds": 9, "method.name": "stc", "flower.timeout": PATIENCE}
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    nodes = [{"partition-id": number} for number in range(NODES)]
    with Federation(folder, nodes) as federation:
        federation.wait()
        run = fedquilt("train", "--federation", folder, "--out", out, *changes)
        until(lambda: len(records(out)) >= 1, run)
        federation.stop_node(2, signal.SIGKILL)
        until(lambda: any(2 in failed for failed in missing(out)), run)
        federation.start_node(2)
        federation.wait()
        until(lambda: 2 not in missing(out)[-1], run)

        the_server = the_process(federation, "flwr-serverapp")
        os.kill(the_server, signal.SIGKILL)
        said, _ = run.communicate(timeout=600)
        assert run.returncode != 0
        assert f"--resume {out}" in " ".join(said.split())
        done = len(records(out))
        assert done < 9

        run = fedquilt("train", "--federation", folder, "--resume", out)
        until(lambda: len(records(out)) > done, run)
        federation.restart_link(signal.SIGKILL)
        said, _ = run.communicate(timeout=600)
        assert run.returncode != 0
        assert len(records(out)) < 9
        federation.wait()

        run = fedquilt("train", "--federation", folder, "--resume", out)
        said, _ = run.communicate(timeout=900)
        assert run.returncode == 0, said
    assert [record["round"] for record in records(out)] == list(range(1, 10))
    assert_exactly_once(out, tmp_path / "replayed")
