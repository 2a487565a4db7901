"""Runs through Flower's commands; a script stands in for ``flwr``."""

import json
import sys

import pytest

from fedquilt.deploy import flower_cli
from fedquilt.deploy.flower_cli import SuperLinkConnection
from fedquilt.errors import FederationError, TrainingError

LOG = [
    "\x1b[92mINFO\x1b[0m :      Starting logstream",
    "\x1b[92mINFO\x1b[0m :      [fedquilt] round 1/1 · loss 1",
    "\x1b[93mWARNING\x1b[0m :   [fedquilt] a node was rejected",
    "(ClientAppActor pid=1) INFO :  noise",
    "",
]
SCRIPT = """#!{python}
import json, sys
with open({calls!r}, "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
lines, status, started = json.loads({part!r})
if sys.argv[1] == "run":
    print(started)
if sys.argv[1] == "log":
    print(*lines, sep="\\n", flush=True)
if sys.argv[1] == "list":
    print(status)
"""


STARTED = json.dumps({"success": True, "run-id": "42"})


@pytest.fixture
def flower(tmp_path, monkeypatch):
    """Makes Flower print this when a run starts, as its log, and as its status at the end."""

    def play(status="", lines=LOG, started=STARTED):
        part = json.dumps([lines, status, started])
        script = SCRIPT.format(python=sys.executable, calls=str(calls), part=part)
        (tmp_path / "flwr").write_text(script)
        (tmp_path / "flwr").chmod(0o700)

    calls = tmp_path / "calls"
    monkeypatch.setattr(flower_cli, "find_executable", lambda name: str(tmp_path / name))
    play.calls = lambda: [json.loads(line) for line in calls.read_text().splitlines()]
    return play


def ended(status, details="N/A"):
    run = {"run-id": "42", "status": status, "status-details": details}
    return json.dumps({"success": True, "runs": [run]})


def test_the_lines_for_users_are_handed_on(flower, tmp_path):
    flower(status=ended("finished:completed"))
    lines = []
    SuperLinkConnection("link").run(tmp_path, lines.append)
    assert lines == ["round 1/1 · loss 1", "a node was rejected"]
    assert flower.calls() == [
        ["run", str(tmp_path), "link", "--format", "json"],
        ["log", "42", "link", "--stream"],
        ["list", "link", "--run-id", "42", "--format", "json"],
    ]


def test_what_to_simulate_is_said(flower, tmp_path):
    flower(status=ended("finished:completed"))
    asked = {"num-supernodes": 3, "client-resources-num-gpus": 0.5}
    SuperLinkConnection("link").run(tmp_path, print, asked)
    words = "num-supernodes=3 client-resources-num-gpus=0.5"
    assert flower.calls()[0][3:5] == ["--federation-config", words]


@pytest.mark.parametrize(
    ("status", "details", "sentence"),
    [
        ("finished:failed", "ServerApp failed with exception: set it: so", "^set it: so$"),
        ("finished:failed", "No heartbeat received.", "^No heartbeat received.$"),
        ("finished:stopped", "N/A", "^the run is finished:stopped$"),
        ("running", "N/A", "^the run is running$"),
    ],
)
def test_a_run_that_did_not_complete_says_why(flower, tmp_path, status, details, sentence):
    flower(status=ended(status, details))
    with pytest.raises(TrainingError, match=sentence):
        SuperLinkConnection("link").run(tmp_path, lambda line: None)


def test_a_run_that_did_not_start_says_what_flower_said(flower, tmp_path):
    flower(started=json.dumps({"success": False, "error-message": "no such\n SuperLink\n"}))
    with pytest.raises(FederationError, match=r"not start the run: no such SuperLink$"):
        SuperLinkConnection("link").run(tmp_path, lambda line: None)
    flower(started="a traceback")
    with pytest.raises(FederationError, match=r"not start the run: a traceback$"):
        SuperLinkConnection("link").run(tmp_path, lambda line: None)


@pytest.mark.parametrize("status", ["", json.dumps({"success": False}), ended("running")[:-9]])
def test_a_superlink_that_is_gone_is_named(flower, tmp_path, status):
    flower(status=status)
    with pytest.raises(FederationError, match="SuperLink does not respond"):
        SuperLinkConnection("link").run(tmp_path, lambda line: None)


def test_a_run_that_is_interrupted_is_stopped(flower, tmp_path):
    flower(status=ended("running"))

    def interrupt(line):
        if line.startswith("round 1/1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SuperLinkConnection("link").run(tmp_path, interrupt)
    assert [call[0] for call in flower.calls()] == ["run", "log", "stop"]
    assert flower.calls()[2] == ["stop", "42", "link", "--format", "json"]


def test_flower_stays_offline_and_in_its_own_folder(tmp_path):
    found = flower_cli.make_environment(tmp_path)
    assert found["FLWR_HOME"] == str(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["PATH"].split(":")[0] == flower_cli.find_executable("x").removesuffix("/x")
