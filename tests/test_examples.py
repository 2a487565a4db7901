"""The examples run as they are, and the experiments are settings that can be run."""

from pathlib import Path

import pytest

from fedquilt.data import partition
from fedquilt.federation import budgets
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import build_method, build_model
from fedquilt.settings.toml import read_toml

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EXPERIMENTS = sorted(
    path
    for path in (ROOT / "experiments").glob("*.toml")
    if not path.name.startswith("compare-")  # lists of settings, tried by tests/comparison
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path, forking_python):
    done = forking_python.run_program(path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_is_complete(path):
    config = load_config(read_toml(path))
    build_method(config)
    build_model(config)
    partition.parse_partition(config.data.partition)
    budgets.parse_budgets(config.data.budgets)
    assert f"fedquilt train experiments/{path.name}" in path.read_text()
    for setting in ("seed", "rounds", "local_training"):
        assert setting in config.model_fields_set
    chosen = (config.local_training.epochs, config.method.fraction, config.data.budgets)
    assert None not in chosen  # no default of a method decides what a paper has


def test_there_are_examples_and_experiments():
    assert len(EXAMPLES) >= 4
    assert len(EXPERIMENTS) >= 7
