"""What is sent to Flower, and what is refused before anything is started."""

import io
import json
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fedquilt.cli import main
from fedquilt.deploy import flower_cli
from fedquilt.deploy.federation import Federation
from fedquilt.deploy.flower_cli import SuperLinkConnection
from fedquilt.deploy.launch import (
    RunningFederation,
    find_federation,
    resolve_for_nodes,
    train_on_flower,
    write_sample_app,
)
from fedquilt.deploy.node_config import make_node_configs
from fedquilt.deploy.node_context import parse_run_config
from fedquilt.errors import CheckpointError, ConfigError
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import load_source, resolve_config
from fedquilt.settings.toml import dump_toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FLOWER = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "run":
    app = pathlib.Path(sys.argv[2]) / "pyproject.toml"
    pathlib.Path({seen!r}).write_text(app.read_text())
    print(json.dumps({{"success": True, "run-id": "42"}}))
elif sys.argv[1] == "log":
    print("INFO :      Starting logstream")
    print("WARNING :   [fedquilt] a node was rejected")
else:
    run = {{"status": "finished:completed", "status-details": "N/A"}}
    print(json.dumps({{"runs": [run]}}))
"""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """The app that Flower's command is given; a script plays its part."""
    script, found = tmp_path / "flwr", tmp_path / "seen.toml"
    script.write_text(FLOWER.format(python=sys.executable, seen=str(found)))
    script.chmod(0o700)
    monkeypatch.setattr(flower_cli, "find_executable", lambda name: str(tmp_path / name))
    return found


def settings(**changes):
    return load_config(override_settings({}, {k.replace("__", "."): v for k, v in changes.items()}))


def app_settings(path):
    return parse_run_config(tomllib.loads(path.read_text())["tool"]["flwr"]["app"]["config"])


def refused(*arguments):
    """The sentence with which a command ends."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ending:
        main([str(a) for a in arguments])
    assert ending.value.code == 2
    assert err.getvalue().count("\n") == 1
    return err.getvalue()


def test_budgets_are_dealt_in_turn_and_data_one_to_each(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    limits = "params=1000 macs=20000"
    assert make_node_configs(3, f"0.5, {limits}", [str(path) for path in paths]) == [
        {"partition-id": 0, "data": str(paths[0]), "budget": 0.5},
        {"partition-id": 1, "data": str(paths[1]), "budget": limits},
        {"partition-id": 2, "data": str(paths[2]), "budget": 0.5},
    ]
    assert make_node_configs(2) == [{"partition-id": 0}, {"partition-id": 1}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budgets", "1,wide"], "got 'wide'"),
        (["--budgets", "1,speed=3"], "got 'speed=3'"),
        (["--budgets", "1.5"], "1.5"),
        (["--data", "nowhere"], "3 nodes and data for 1"),
        (["--nodes", "1", "--data", "nowhere"], "'nowhere'"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(tmp_path, arguments, words):
    assert words in refused("up", "--out", tmp_path / "f", *arguments)
    assert not (tmp_path / "f").exists()


def test_a_taken_port_is_refused(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} cannot be used" in refused("up", "--out", tmp_path, "--port", port)


def test_without_flower_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fedquilt\[flower\]"):
        Federation(tmp_path)
    assert "fedquilt[flower]" in refused("train", "--federation", "mine")


def test_a_federation_is_a_folder_where_one_runs_or_a_name(tmp_path):
    assert find_federation("mine") == RunningFederation(SuperLinkConnection("mine"))
    with pytest.raises(ConfigError, match="fedquilt up --out"):
        find_federation(str(tmp_path))
    with pytest.raises(ConfigError, match="fedquilt up"):
        find_federation(str(tmp_path / "none"))
    (tmp_path / "federation.json").write_text(
        json.dumps({"port": 1, "is_insecure": True, "nodes": []})
    )
    with pytest.raises(ConfigError, match="no federation is running"):  # it did, and was killed
        find_federation(str(tmp_path))


def test_paths_hold_wherever_they_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # a known set is no path, whatever there is here
    (tmp_path / "own").mkdir()
    mine = RunningFederation(SuperLinkConnection("mine"))
    sent = resolve_for_nodes(
        settings(data__source="own", model__name="m.py:net", model__weights="w.pt"), mine
    )
    assert sent.data.source == str(tmp_path / "own")
    assert sent.model.name == f"{tmp_path / 'm.py'}:net"
    assert sent.model.weights == str(tmp_path / "w.pt")
    assert resolve_for_nodes(settings(data__source="digits"), mine).data.source == "digits"


def test_clients_are_the_nodes_unless_somebody_says_how_many():
    three = RunningFederation(
        SuperLinkConnection("mine"), tuple({"partition-id": i} for i in range(3))
    )
    assert resolve_for_nodes(settings(), three).data.clients == 3
    assert resolve_for_nodes(settings(data__clients=2), three).data.clients == 2
    assert resolve_for_nodes(settings(), None).data.clients == 10


def test_settings_are_those_of_a_local_run_unless_nodes_have_data_of_their_own():
    config = settings(data__clients=1)
    assert resolve_for_nodes(config, None) == resolve_config(config, load_source(config))
    for node in ({"partition-id": 0, "data": "/somewhere"},), None:
        sent = resolve_for_nodes(config, RunningFederation(SuperLinkConnection("mine"), node))
        assert "num_classes" not in (sent.model.model_extra or {})


def test_the_app_has_the_settings_and_only_its_own_lines_are_shown(seen, tmp_path):
    config = resolve_for_nodes(settings(data__clients=2, method__name="nefl"), None)
    place, lines = RunningFederation(SuperLinkConnection("mine"), ({"partition-id": 0},)), []
    assert train_on_flower(config, tmp_path / "run", lines.append, federation=place) is None
    assert lines == ["a node was rejected"]
    sent = app_settings(seen)
    assert sent.flower.out == str(tmp_path / "run")
    assert not sent.flower.resume
    same = {"flower.out": None}
    assert load_config(override_settings(sent.model_dump(), same)) == config


def test_a_directory_that_holds_something_else_is_refused_before_anything_is_sent(seen, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    place = RunningFederation(SuperLinkConnection("mine"), ())
    with pytest.raises(CheckpointError, match="not empty"):
        train_on_flower(settings(), tmp_path / "run", print, federation=place)
    assert not seen.exists()


def test_the_sample_app_is_for_the_federations_nodes(tmp_path):
    federation = Federation(tmp_path, [{"partition-id": i} for i in range(4)])
    found = app_settings(write_sample_app(federation) / "pyproject.toml")
    assert found.data.clients == 4
    assert Path(found.flower.out).parent == tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "ray"], "engine 'ray' is not known"),
        (["--engine", "local", "--federation", "mine"], "--engine flower"),
        (["--engine", "flower-simulation", "--federation", "mine"], "--engine flower"),
    ],
)
def test_engines_that_make_no_sense_are_refused(arguments, words):
    assert words in refused("train", *arguments)


@pytest.mark.parametrize(("name", "remedy"), [(None, "leave out --engine"), ("a1", "add --engine")])
def test_a_resumed_run_keeps_its_engine(tmp_path, name, remedy):
    (tmp_path / "config.toml").write_text(dump_toml(settings(flower__name=name)))
    other = ["--engine", "flower"] if name is None else []
    assert remedy in refused("train", "--resume", tmp_path, *other)


def test_a_resumed_run_does_not_tell_the_server_which_code_to_run(tmp_path):
    """Unless the app that was sent names the same file: then its author did."""
    from fedquilt.deploy.server_app import _restore_config

    name = f"{tmp_path}/theirs.py:net"
    stored = load_config({"model": {"name": name}, "flower": {"name": "abc"}})
    (tmp_path / "config.toml").write_text(dump_toml(stored))
    with pytest.raises(ConfigError, match="names code as its model"):
        _restore_config(load_config({}), tmp_path)
    assert _restore_config(load_config({"model": {"name": name}}), tmp_path).model.name == name
