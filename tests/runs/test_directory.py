"""One process at a time works in a run's directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt import files
from fedquilt.errors import CheckpointError, ConfigError, TrainingError
from fedquilt.runs.directory import RunDirectory

OTHER = """
import sys
from fedquilt.runs.directory import RunDirectory
with RunDirectory(sys.argv[1]).hold(resume=False, on_wait=lambda: None):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the directory until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(files.__file__).parents[1])},
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_another_process_keeps_this_one_out_until_it_dies(other, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_WAIT", 0.0)
    directory, waits = RunDirectory(str(tmp_path / "run")), []
    with (
        pytest.raises(CheckpointError, match=f"another process is training in {directory}"),
        directory.hold(resume=False, on_wait=lambda: waits.append(1)),
    ):
        pytest.fail("both hold it")
    assert waits == [1]
    other.kill()
    other.communicate()
    with directory.hold(resume=False, on_wait=pytest.fail):
        pass


@pytest.mark.parametrize(("problem", "is_left"), [(ConfigError, False), (TrainingError, True)])
def test_what_was_created_for_a_refused_run_is_removed(tmp_path, problem, is_left):
    directory = RunDirectory(tmp_path / "a" / "run")
    with pytest.raises(problem), directory.hold(resume=False, on_wait=pytest.fail):
        raise problem("no")
    assert (tmp_path / "a").exists() is is_left


def test_a_directory_that_was_there_stays(tmp_path):
    directory = RunDirectory(tmp_path)
    with pytest.raises(ConfigError), directory.hold(resume=False, on_wait=pytest.fail):
        raise ConfigError("no")
    assert tmp_path.exists()
