"""init, list, doctor, completion: what people type first."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import fedquilt as fq
from fedquilt.cli.list_names import KINDS, describe_name
from fedquilt.cli.program import find_program
from fedquilt.runs.installation import PURPOSES, Extra, read_machine, sort_requirements
from fedquilt.settings.json_schema import make_json_schema
from fedquilt.settings.load import load_config
from fedquilt.settings.schema import list_settings
from fedquilt.settings.template import SETTINGS, make_template
from fedquilt.settings.toml import parse_dump

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
FEW = ["--set", "local_training.epochs=1", "--set", "data.fraction=0.1", "--rounds", "1"]


@pytest.fixture(scope="module")
def type_here(forking_python):
    """Types a command in a folder, and returns what it printed."""

    def run(folder, *words, status=0):
        result = forking_python.run_command([str(word) for word in words], folder)
        assert result.returncode == status, result.stderr
        return result.stdout if status == 0 else result.stderr

    return run


def save_npz(path, shape, num_classes=3, count=60):
    rng = np.random.default_rng(0)
    labels = np.arange(count) % num_classes
    inputs = rng.random((count, *shape), dtype=np.float32)
    np.savez(path, x_train=inputs, y_train=labels, x_test=inputs[:12], y_test=labels[:12])


# init


@pytest.fixture(scope="module", params=[(9, 7, 1), (6,)], ids=["images", "vectors"])
def project(request, tmp_path_factory, type_here):
    folder = tmp_path_factory.mktemp("project")
    save_npz(folder / "mine.npz", request.param)
    printed = type_here(folder, "init", "first project", "--data", "mine.npz")
    return folder / "first project", printed


def test_init_writes_files_that_run_as_they_are(project, type_here, forking_python):
    folder, printed = project
    assert "cd 'first project'" in printed
    hint = next(line for line in printed.splitlines() if "fedquilt.toml" in line and "  " in line)
    words = shlex.split(hint)
    assert words[-2:] == ["train", "fedquilt.toml"]
    trained = type_here(folder, *words[-2:], "--rounds", "1", "--workers", "0")
    assert "heterofl on mine" in trained
    result = forking_python.run_program(folder / "train.py", folder)
    assert result.returncode == 0, result.stderr
    assert "the smallest model has" in result.stdout
    assert (folder / "runs" / "python" / "model").is_dir()


def test_both_files_describe_the_same_run(project):
    folder, _ = project
    settings = tomllib.loads((folder / "fedquilt.toml").read_text())
    script = (folder / "train.py").read_text()
    assert settings["model"]["name"] == "train.py:make_model"
    assert settings["data"]["source"] == str(folder.parent / "mine.npz")
    assert json.dumps(settings["data"]["source"]) in script
    training = settings["local_training"]
    assert f"lr={training['lr']}, epochs={training['epochs']}" in script
    assert f"rounds={settings['rounds']}" in script
    assert f"budgets={settings['data']['budgets']}" in script


def test_editors_check_what_init_writes(project):
    folder, _ = project
    text = (folder / "fedquilt.toml").read_text()
    assert text.startswith("#:schema ./fedquilt.schema.json\n")
    schema = json.loads((folder / "fedquilt.schema.json").read_text())
    assert schema == make_json_schema()
    jsonschema.validate(parse_dump(text), schema)


def test_init_overwrites_nothing(tmp_path, type_here):
    (tmp_path / "train.py").write_text("mine")
    message = type_here(tmp_path, "init", status=2)
    assert "train.py exists and is not overwritten" in message
    assert os.listdir(tmp_path) == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_init_names_data_that_are_not_there(tmp_path, type_here):
    assert "'nothing.npz' which does not exist" in type_here(
        tmp_path, "init", "--data", "nothing.npz", status=2
    )


def test_every_commented_setting_of_the_template_can_be_set():
    text = make_template({})
    names = {f"{section}.{n}" if section else n for section, ns in SETTINGS.items() for n in ns}
    assert names <= set(list_settings())
    lines = text.splitlines()
    keys = {name.rpartition(".")[2] for name in names}
    opened = [
        line.removeprefix("# ") if line.removeprefix("# ").split(" =")[0] in keys else line
        for line in lines
    ]
    settings = tomllib.loads("\n".join(opened))
    assert sum(len(v) if isinstance(v, dict) else 1 for v in settings.values()) == len(names)
    load_config({**settings, "data": {**settings["data"], "validation": 0.1}})
    assert tomllib.loads(text) == {section: {} for section in SETTINGS if section}


# list


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"runs"}))
def test_everything_that_can_be_named_has_a_description(kind):
    rows = KINDS[kind]()
    assert rows
    for row in rows:
        assert row["description"]
        assert "\n" not in row["description"]


def test_list_has_all_names_and_says_where_data_are(tmp_path, type_here, monkeypatch):
    listed = json.loads(type_here(tmp_path, "list", "methods", "--json"))["methods"]
    assert [row["name"] for row in listed] == list(fq.METHODS)
    data = json.loads(type_here(tmp_path, "list", "datasets", "--json"))["datasets"]
    assert {row["name"]: row["place"] for row in data}["digits"] == "scikit-learn"
    assert type_here(tmp_path, "list", "models").splitlines()[0].startswith("mlp ")


def test_data_are_found_where_they_are_loaded_from(tmp_path, monkeypatch):
    from fedquilt.data.load import find_dataset

    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert find_dataset("mnist") is find_dataset("shakespeare") is find_dataset("digits5") is None
    save_npz(tmp_path / "mnist.npz", (4, 4, 1))
    (tmp_path / "shakespeare").mkdir()
    assert find_dataset("mnist") == str(tmp_path / "mnist.npz")
    assert len(fq.load_dataset("mnist").train) == 60
    assert find_dataset("shakespeare") == str(tmp_path / "shakespeare")


def test_list_runs_says_how_far_they_are(tmp_path, type_here):
    tiny = ["--model", "mlp", "--set", "model.hidden=[8]", "--clients", "2", "--budgets", "1,0.5"]
    type_here(tmp_path, "train", *tiny, *FEW, "--workers", "0", "--out", "runs/a")
    (row,) = json.loads(type_here(tmp_path, "list", "runs", "--json"))["runs"]
    assert (row["run"], row["method"], row["data"]) == ("a", "heterofl", "digits")
    assert (row["state"], row["rounds"], row["score"]) == ("finished", "1/1", "accuracy")
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text("damaged")
    (row,) = json.loads(type_here(tmp_path, "list", "runs", "--json"))["runs"]
    assert (row["state"], row["worst"]) == ("stopped", None)
    (tmp_path / "none").mkdir()
    assert type_here(tmp_path, "list", "runs", "none") == "there are no runs in none\n"


def test_a_list_of_something_else_is_refused(tmp_path, type_here):
    message = type_here(tmp_path, "list", "method", status=2)
    assert "kind 'method' is not known (did you mean 'methods'?)" in message
    assert "a folder is for runs" in type_here(tmp_path, "list", "models", "runs", status=2)
    assert "nowhere is not a directory" in type_here(tmp_path, "list", "runs", "nowhere", status=2)


def test_names_of_people_and_methods_keep_their_capitals():
    assert describe_name("fedavg-at", fq.fedavg_at).startswith("FedAvg ")
    assert describe_name("krum", fq.Krum).startswith("the one update")


# doctor


def test_doctor_knows_versions_machine_devices_and_extras(tmp_path, type_here):
    found = json.loads(type_here(tmp_path, "doctor", "--json"))
    assert found["versions"]["fedquilt"] == fq.__version__
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert found["devices"][0] == "cpu"
    assert found["problems"] == []
    text = type_here(tmp_path, "doctor")
    assert f"fedquilt {fq.__version__}, python " in text
    assert "Everything that a run needs is here" in text


def test_doctor_says_what_is_missing_and_what_installs_it():
    core, (shown,) = sort_requirements(
        [
            "numpy>=1",
            "torch>=99",
            "absent>=2; extra == 'shown'",
            "numpy; extra == 'shown'",
            "windows-only; sys_platform == 'win32' and extra == 'shown'",
            "fedquilt[shown]; extra == 'test'",
        ]
    )
    assert list(core.versions) == ["numpy"]
    assert core.missing[0].startswith("torch>=99 (here is ")
    assert (shown.name, shown.missing) == ("shown", ("absent>=2",))
    assert list(shown.versions) == ["numpy"]
    assert shown.remedy == "pip install 'fedquilt[shown]'"
    assert Extra("whole").remedy == ""


def test_doctor_has_a_purpose_for_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(PURPOSES) == set(project["optional-dependencies"]) - {"test"}


def test_a_full_disk_is_seen():
    machine = read_machine()
    assert machine["free_disk"] > 0
    assert machine["free_memory"] > 0


# completion


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fedquilt tra", ["train"]),
        ("fedquilt list mo", ["models"]),
        ("fedquilt train --method hetero", ["heterofl"]),
        ("fedquilt train --track ", ["csv", "mlflow", "tensorboard", "wandb"]),
        ("fedquilt train --test-lo", ["--test-locally"]),
    ],
)
def test_shells_complete_commands_options_and_names(words, offered, monkeypatch, capsys):
    from fedquilt.cli import main

    monkeypatch.setenv("_FEDQUILT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit) as ending:
        main([])
    assert ending.value.code == 0
    assert capsys.readouterr().out.split() == offered


def test_bash_takes_the_script_of_completion(tmp_path):
    """The shell is found by the program itself, so bash calls it."""
    program = f"{shlex.quote(sys.executable)} -m fedquilt --show-completion"
    asked = f"{program} > completion.sh && . ./completion.sh && complete -p fedquilt"
    shown = subprocess.run(
        ["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "_fedquilt_completion" in shown.stdout


# how the program is called


def test_commands_that_are_printed_name_the_program_as_it_was_called(tmp_path, monkeypatch):
    program = tmp_path / ".venv" / "bin" / "fedquilt"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert find_program(".venv/bin/fedquilt") == [".venv/bin/fedquilt"]  # as make demo calls it
    assert find_program(str(program), Path("/")) == [str(program)[1:]]
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    assert find_program(str(program)) == ["fedquilt"]
    assert find_program("/usr/bin/pytest") == ["fedquilt"]
    assert find_program("/src/fedquilt/__main__.py")[1:] == ["-m", "fedquilt"]
