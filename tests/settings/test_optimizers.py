"""Optimizers and schedules in files of settings: resolved, written, read again, and trusted."""

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.methods import METHODS
from fedquilt.runs.from_config import require_trust
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import (
    build_method,
    list_code,
    load_source,
    resolve_config,
)
from fedquilt.settings.toml import dump_toml, parse_dump

GIVEN = [
    {"optimizer": "AdamW", "schedule": ["warmup:2", "cosine:0.1"], "precision": "bf16"},
    {"optimizer": {"name": "adam", "betas": [0.8, 0.9], "amsgrad": True}, "accumulate": 3},
    {"optimizer": "mine.py:make", "lr": 0.5, "step_schedule": "mine.py:factor"},
    {"optimizer": {"name": "sgd", "nesterov": True}, "keep_optimizer": True},
    {},
]


def local_training(given, method="heterofl"):
    config = load_config({"method": {"name": method}, "local_training": given})
    return build_method(config).local_training


@pytest.mark.parametrize("given", GIVEN)
def test_resolved_settings_mean_the_same_when_they_are_read_again(given):
    config = load_config({"local_training": given})
    full = resolve_config(config, load_source(config))
    again = load_config(parse_dump(dump_toml(full)))
    assert again == full
    assert build_method(again) == build_method(config)
    assert resolve_config(again, load_source(again)) == full


@pytest.mark.parametrize("method", METHODS)
def test_another_optimizer_has_its_own_defaults_and_the_rest_stays_the_methods(method):
    own = METHODS[method]().local_training
    adam = local_training({"optimizer": "adam"}, method)
    assert (adam.lr, adam.momentum, adam.weight_decay) == (0.001, None, None)
    assert (adam.epochs, adam.max_grad_norm) == (own.epochs, own.max_grad_norm)
    assert local_training({"optimizer": "SGD"}, method) == own
    assert local_training({"schedule": "cosine"}, method).round_decay == 1.0


def test_the_code_of_a_run_is_known_by_the_settings_that_name_it():
    named = {"model": {"name": "net.py:make"}, "local_training": GIVEN[2]}
    code = list_code(load_config(named))
    assert code == {
        "model.name": "net.py:make",
        "local_training.optimizer": "mine.py:make",
        "local_training.step_schedule": "mine.py:factor",
    }
    assert list_code(load_config({"local_training": GIVEN[0]})) == {}
    require_trust({}, "runs/a")
    with pytest.raises(ConfigError, match=r"names code as its step schedule, 'a.py:f'.*trust=True"):
        require_trust({"local_training.step_schedule": "a.py:f"}, "runs/a")


FAILING = {
    "def make(weights):\n    return 1 / 0\n": "raised ZeroDivisionError",
    "def make():\n    pass\n": "raised TypeError",
    "def make(weights):\n    return None\n": "returns a torch.optim.Optimizer .*got NoneType",
    "def other():\n    pass\n": "has no function 'make'",
}


@pytest.mark.parametrize("text", FAILING)
def test_a_function_that_makes_no_optimizer_is_refused_at_the_door(text, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    settings = fq.LocalTraining(optimizer=f"{tmp_path}/mine.py:make")
    data = torch.rand(12, 4), torch.arange(12) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    clients = fq.make_clients(data, count=2)
    with pytest.raises(ConfigError, match=FAILING[text]):
        fq.train(model, data[0][:1], fq.FedAvg(settings), clients, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_schedule_without_a_factor_for_a_round_is_refused_at_the_door(tmp_path):
    (tmp_path / "mine.py").write_text("def factor(i, n):\n    return [1.0, 0.5][i]\n")
    settings = fq.LocalTraining(schedule=f"{tmp_path}/mine.py:factor")
    data = torch.rand(12, 4), torch.arange(12) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    clients = fq.make_clients(data, count=2)
    with pytest.raises(ConfigError, match="function of the schedule raised IndexError"):
        fq.train(model, data[0][:1], fq.FedAvg(settings), clients, rounds=3, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
