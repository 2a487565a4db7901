"""Trackers and logs on the command line and in TOML."""

import csv
import io
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fedquilt.cli import main
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import list_code

TINY = [
    *("--model", "mlp", "--set", "model.hidden=[8]", "--clients", "2", "--budgets", "1,0.5"),
    *("--workers", "0", "--set", "local_training.epochs=1", "--set", "data.fraction=0.05"),
]
MINE = """
from fedquilt import Tracker

class Mine(Tracker):
    def log(self, values, round):
        with open("rounds.txt", "a") as file:
            file.write(f"{round} ")
"""


def fedquilt(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ending:
        main([str(a) for a in arguments])
    return ending.value.code or 0, out.getvalue(), err.getvalue()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_options_and_toml_name_trackers_and_their_settings(here):
    Path("mine.py").write_text(MINE)
    Path("run.toml").write_text("[run]\ntrackers = [\"csv(path='other/numbers.csv')\"]\n")
    status, _, err = fedquilt("train", "run.toml", *TINY, "--rounds", "1", "--out", "a")
    assert (status, err) == (0, "")
    tracked = ["--track", "csv", "--track", "mine.py:Mine"]
    status, _, err = fedquilt("train", "run.toml", *TINY, "--rounds", "2", *tracked, "--out", "b")
    assert (status, err) == (0, "")
    for path, rounds in (("other/numbers.csv", ["1"]), ("b/metrics.csv", ["1", "2"])):
        with Path(path).open(newline="") as file:
            assert [row["round"] for row in csv.DictReader(file)] == rounds
    assert Path("rounds.txt").read_text() == "1 2 2 "
    status, _, err = fedquilt("train", "--resume", "b", "--rounds", "3")
    assert status == 2
    assert "names code as its trackers, 'mine.py:Mine'" in err
    assert fedquilt("train", "--resume", "b", "--rounds", "3", "--trust")[0] == 0
    assert Path("rounds.txt").read_text() == "1 2 2 3 3 "


def test_a_tracker_that_is_not_known_is_refused_before_anything_is_written(here):
    status, out, err = fedquilt("train", *TINY, "--track", "cvs", "--out", "a")
    assert (status, out) == (2, "")
    assert "tracker 'cvs' is not known (did you mean 'csv'?)" in err
    assert os.listdir() == []


def test_an_address_in_a_call_is_no_code():
    config = load_config({"run": {"trackers": ["mlflow(uri='http://localhost:5000')"]}})
    assert list_code(config) == {}


def test_a_log_level_logs_to_standard_error(here):
    asked = ["train", *TINY, "--rounds", "1", "--out"]
    status, out, err = fedquilt(*asked, "a", "--log-level", "INFO")
    assert status == 0
    assert "INFO fedquilt.runs.event_log: round 1/1 · loss" in err
    assert "INFO" not in out
    assert "DEBUG" not in err
    assert fedquilt(*asked, "b")[2] == ""  # nothing is left behind


def test_a_log_level_that_is_not_known_is_refused():
    status, _, err = fedquilt("schema", "--log-level", "loud")
    assert status == 2
    assert "log level 'loud' is not known; choose one of: debug, error, info, warning" in err
