"""The examples run as they are, and the experiments are settings that can be run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt.config import checked, method_of, model_of, read
from fedquilt.data import partition
from fedquilt.federation import mix

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    command = [sys.executable, "-W", "error", path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_is_complete(path):
    config = checked(read(path))
    method_of(config)
    model_of(config)
    partition.parse(config.data.partition)
    mix.parse(config.data.budgets)
    assert f"fedquilt train experiments/{path.name}" in path.read_text()
    for setting in ("seed", "rounds", "optimiser"):
        assert setting in config.model_fields_set
    chosen = (config.optimiser.epochs, config.method.fraction, config.data.budgets)
    assert None not in chosen  # no default of a method decides what a paper has


def test_there_are_examples_and_experiments():
    assert len(EXAMPLES) >= 4
    assert len(EXPERIMENTS) >= 7
