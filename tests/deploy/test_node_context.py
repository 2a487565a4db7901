"""What a node has, what it says, and what it affords."""

from __future__ import annotations

import importlib
import json
import stat
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fedquilt.deploy import device_profile
from fedquilt.deploy.app_folder import make_run_config, write_app
from fedquilt.deploy.client_app import make_client_app
from fedquilt.deploy.deadline import DeadlineExceeded, run_with_deadline
from fedquilt.deploy.node_context import (
    assign_budget,
    get_state_folder,
    make_full_setup,
    make_node_context,
    parse_run_config,
)
from fedquilt.deploy.node_info import NodeInfo
from fedquilt.deploy.server_app import train_over_grid
from fedquilt.engines.flower.codec import SETTINGS
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.structure.budget import Budget
from fedquilt.training.settings import LocalTraining

from .conftest import SETTINGS as SMALL
from .grid import OneProcessGrid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def test_settings_survive_flowers_run_config():
    changes = {"data.budgets": '["x"]', "method.widths": "[1, 0.5]", "model.name": "mlp"}
    config = parse_run_config({**SMALL, **changes, "data.budgets": "[{params = 100}, 0.5]"})
    again = parse_run_config(make_run_config(config))
    assert again == config
    assert again.data.budgets == ({"params": 100.0}, 0.5)


def test_own_data_of_a_node_go_through_the_transforms_of_the_run():
    config = parse_run_config({**SMALL, "data.transforms": '["Resize(5)", "ToRGB"]'})
    data = torch.rand(6, 1, 8, 8), torch.arange(6)
    for loaded in (data, (data, data)):
        node = make_node_context(config, {"partition-id": 0}, lambda _, loaded=loaded: loaded)
        assert node.example.shape == (1, 3, 5, 5)
        for split in node.data.values():
            for examples in split.values():
                assert examples.batch(torch.arange(2))[0].shape == (2, 3, 5, 5)


def test_an_app_folder_holds_the_settings(tmp_path):
    config = parse_run_config(SMALL)
    folder = write_app(tmp_path / "app", config)
    read = tomllib.loads((folder / "pyproject.toml").read_text())
    assert parse_run_config(read["tool"]["flwr"]["app"]["config"]) == config


def test_nodes_part_the_set_as_clients_on_one_machine_do():
    config = parse_run_config(SMALL)
    sites = [make_node_context(config, {"partition-id": i}) for i in range(3)]
    whole = sum(len(site.data["train"][i]) for i, site in enumerate(sites))
    assert whole == sum(site.client.num_examples for site in sites) == int(1442 * 0.15)
    assert [site.client.budget.width for site in sites] == [1, 0.5, 0.25]
    for i, site in enumerate(sites):
        assert {c for by in site.data.values() for c in by} <= {i, -1}


@pytest.mark.parametrize("node", [{}, {"partition-id": -1}, {"partition-id": "one"}])
def test_a_node_that_does_not_know_who_it_is_is_told_how(node):
    with pytest.raises(ConfigError, match="--node-config 'partition-id=0'"):
        make_node_context(parse_run_config(SMALL), node)


def test_a_node_beyond_the_clients_is_refused():
    with pytest.raises(ConfigError, match="3 clients"):
        make_node_context(parse_run_config(SMALL), {"partition-id": 3})


def test_a_node_may_have_data_of_its_own(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (20, 8, 8), dtype=np.uint8)
    labels = np.arange(20) % 4
    np.savez(
        tmp_path / "mine.npz", x_train=images, y_train=labels, x_test=images[:5], y_test=labels[:5]
    )
    site = make_node_context(
        parse_run_config(SMALL), {"partition-id": 7, "data": str(tmp_path / "mine.npz")}
    )
    assert (site.client.id, site.client.num_examples, site.client.labels) == (7, 20, (0, 1, 2, 3))
    assert site.num_tests == 5
    assert site.has_own_data
    assert NodeInfo.from_message(NodeInfo.from_context(site).to_message()).has_own_data
    assert site.example.shape == (1, 1, 8, 8)


def test_what_a_node_says_is_what_the_server_hears():
    site = make_node_context(parse_run_config(SMALL), {"partition-id": 1})
    site = assign_budget(site, "params=1000 macs=50000", parse_run_config(SMALL))
    said = NodeInfo.from_context(site)
    assert NodeInfo.from_message(said.to_message()) == said
    assert said.client.budget == Budget(params=1000, macs=50000)
    assert said.example.shape == site.example.shape


@pytest.mark.parametrize(
    "words", [{}, {"client": 1}, {"error": "the disk is full"}, {"shape": "[1e9]"}]
)
def test_what_makes_no_sense_is_refused(words):
    with pytest.raises(TrainingError, match=r"disk is full|a node sends client, examples"):
        NodeInfo.from_message(RecordDict({SETTINGS: ConfigRecord(words)}))


@pytest.mark.parametrize("word", ["large", "params=many", "width", True])
def test_a_budget_that_is_none_is_refused(word):
    site = make_node_context(parse_run_config(SMALL), {"partition-id": 0})
    with pytest.raises(ConfigError, match="a node's budget is"):
        assign_budget(site, word, parse_run_config(SMALL))


@pytest.fixture
def steps(monkeypatch):
    """A device on which a step takes as many seconds as the model has width."""
    timed = []

    def seconds(setup, module, data, local_training):
        width = module.features[0].weight.shape[0] / 4
        timed.append(width)
        return width

    monkeypatch.setattr(device_profile, "_time_step", seconds)
    return timed


@pytest.mark.parametrize(
    ("deadline", "width"), [(None, 1.0), (10**6, 1.0), (9.0, 0.5), (4.0, 0.25), (0.01, 0.25)]
)
def test_the_largest_width_that_meets_the_deadline_is_what_a_device_affords(steps, deadline, width):
    """8 batches an epoch, half as much again to be on the safe side."""
    site = make_node_context(parse_run_config(SMALL), {"partition-id": 0})
    setup = make_full_setup(parse_run_config(SMALL), site)
    data = site.data["train"][0].select(torch.arange(72))
    found, tried = device_profile.find_affordable_width(
        setup, data, LocalTraining(epochs=1, batch_size=9), deadline, (0.25, 1.0, 0.5)
    )
    assert found.width == width
    assert [candidate.width for candidate in tried] == [w for w in (1.0, 0.5, 0.25) if w >= width]


def test_what_does_not_fit_into_memory_is_not_tried(steps, monkeypatch):
    site = make_node_context(parse_run_config(SMALL), {"partition-id": 0})
    setup = make_full_setup(parse_run_config(SMALL), site)
    data = site.data["train"][0]
    sizes = [
        device_profile.measure_width(setup, data, LocalTraining(), w, float("inf")).memory
        for w in (1, 0.5)
    ]
    steps.clear()
    monkeypatch.setattr(device_profile, "get_free_memory", lambda device: sizes[1])
    found, _ = device_profile.find_affordable_width(setup, data, LocalTraining(), None, (1.0, 0.5))
    assert found.width == 0.5
    assert steps == [0.5]


def test_a_device_is_measured_once_a_run(tmp_path):
    config = parse_run_config({**SMALL, "flower.deadline": 1000.0})
    site = make_node_context(config, {"partition-id": 0})
    first = assign_budget(site, "auto", config, folder=tmp_path)
    found = json.loads((tmp_path / "device_profile.json").read_text())
    assert found["width"] == first.client.budget.width == 1.0
    assert found["measurements"][0]["seconds"] > 0
    (tmp_path / "device_profile.json").write_text('{"width": 0.25}')
    assert assign_budget(site, "auto", config, folder=tmp_path).client.budget.width == 0.25


def test_what_clients_keep_is_for_their_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDQUILT_STATE", str(tmp_path))
    folder = get_state_folder({"partition-id": 4}, "abc123")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder != get_state_folder({"partition-id": 5}, "abc123")
    assert folder != get_state_folder({"partition-id": 4}, "abc124")
    for name in ("../up", "a/b", "", "."):
        with pytest.raises(ConfigError, match="letters and digits"):
            get_state_folder({"partition-id": 4}, name)


def test_work_that_takes_too_long_is_stopped():
    def endless() -> None:
        while True:
            time.sleep(0.01)

    others = set(threading.enumerate())
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.1 seconds"):
        run_with_deadline(0.1, endless)
    for thread in set(threading.enumerate()) - others:
        thread.join(10)
        assert not thread.is_alive()


def test_problems_of_the_work_are_its_own():
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_with_deadline(10, fail)
    with pytest.raises(ValueError, match="no"):
        run_with_deadline(0, fail)


def test_the_example_app_trains_its_own_model_on_its_own_data(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "flower_app"))
    app = importlib.import_module("quilt.app")
    project = tomllib.loads((ROOT / "examples" / "flower_app" / "pyproject.toml").read_text())
    settings = project["tool"]["flwr"]["app"]["config"] | {"flower.out": str(tmp_path / "run")}
    budgets = (1.0, 0.5, "auto")
    nodes = {i: {"partition-id": i, "budget": budget} for i, budget in enumerate(budgets)}
    grid = OneProcessGrid(app.client, settings, nodes)
    run = train_over_grid(
        grid, parse_run_config(settings), model=app.Net, test=app.digits(slice(1500, None))
    )
    assert run.scores[0].accuracy > 0.5
    assert run.scores[0].user_accuracy is not None


def test_a_server_has_nothing_to_test_on_where_clients_have_data_of_their_own(tmp_path):
    """The set that the settings name, if only by default, is not theirs."""
    rng = np.random.default_rng(0)
    labels = np.arange(20) % 10
    images = rng.integers(0, 255, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    settings = {
        **{name: value for name, value in SMALL.items() if name != "model.width"},
        "rounds": 1,
        "model.name": "mlp",
        "model.hidden": "[8]",
        "method.name": "fedavg",
        "flower.out": str(tmp_path / "run"),
    }
    nodes = {i: {"partition-id": i, "data": str(tmp_path / "own.npz")} for i in range(3)}
    run = train_over_grid(
        OneProcessGrid(make_client_app(), settings, nodes), parse_run_config(settings)
    )
    assert run.scores[0].accuracy is None
    assert run.scores[0].user_accuracy is not None
