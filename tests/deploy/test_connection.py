"""Runs sent with Flower's command, whose part a script plays here."""

import json
import sys

import pytest

from fedquilt.deploy import connection
from fedquilt.deploy.connection import Connection
from fedquilt.errors import FederationError, TrainingError

STARTED = ["\x1b[92mINFO\x1b[0m", "Successfully started run 42", "round 1/1", ""]
SCRIPT = """#!{python}
import json, sys
with open({calls!r}, "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
lines, status, code = json.loads({part!r})
if sys.argv[1] == "run":
    print(*lines, sep="\\n", flush=True)
    sys.exit(code)
if sys.argv[1] == "list":
    print(status)
"""


@pytest.fixture
def flower(tmp_path, monkeypatch):
    """Makes Flower say these lines of a run, this about its end, and end with this code."""

    def play(lines=STARTED, status="", code=0):
        part = json.dumps([lines, status, code])
        script = SCRIPT.format(python=sys.executable, calls=str(calls), part=part)
        (tmp_path / "flwr").write_text(script)
        (tmp_path / "flwr").chmod(0o700)

    calls = tmp_path / "calls"
    monkeypatch.setattr(connection, "executable", lambda name: str(tmp_path / name))
    play.calls = lambda: [json.loads(line) for line in calls.read_text().splitlines()]
    return play


def ended(status, details="N/A"):
    run = {"run-id": "42", "status": status, "status-details": details}
    return json.dumps({"success": True, "runs": [run]})


def test_every_line_is_handed_on_without_colours(flower, tmp_path):
    flower(status=ended("finished:completed"))
    lines = []
    Connection("link").run(tmp_path, lines.append)
    assert lines == ["INFO", *STARTED[1:]]
    assert flower.calls()[0] == ["run", str(tmp_path), "link", "--stream"]


def test_what_to_simulate_is_said(flower, tmp_path):
    flower(status=ended("finished:completed"))
    asked = {"num-supernodes": 3, "client-resources-num-gpus": 0.5}
    Connection("link").run(tmp_path, print, asked)
    words = "num-supernodes=3 client-resources-num-gpus=0.5"
    assert flower.calls()[0][-2:] == ["--federation-config", words]


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
        Connection("link").run(tmp_path, lambda line: None)


def test_a_run_that_did_not_start_says_what_flower_said(flower, tmp_path):
    flower(["╭─ Error ───╮", "│ no such   │", "│ SuperLink │", "╰───────────╯"], code=1)
    with pytest.raises(FederationError, match=r"not start the run: Error no such SuperLink$"):
        Connection("link").run(tmp_path, lambda line: None)


@pytest.mark.parametrize("status", ["", json.dumps({"success": False}), ended("running")[:-9]])
def test_a_superlink_that_is_gone_is_named(flower, tmp_path, status):
    flower(status=status, code=1)
    with pytest.raises(FederationError, match="SuperLink is not there"):
        Connection("link").run(tmp_path, lambda line: None)


def test_a_run_that_is_interrupted_is_stopped(flower, tmp_path):
    flower(status=ended("running"))

    def interrupt(line):
        if line == "round 1/1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Connection("link").run(tmp_path, interrupt)
    assert [call[0] for call in flower.calls()] == ["run", "stop"]
    assert flower.calls()[1] == ["stop", "42", "link"]


def test_flower_stays_offline_and_in_its_own_folder(tmp_path):
    found = connection.environment(tmp_path)
    assert found["FLWR_HOME"] == str(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["PATH"].split(":")[0] == connection.executable("x").removesuffix("/x")
