"""Nodes with an accelerator; tests/devices runs this file where one is."""

from __future__ import annotations

import pytest
import torch

from fedquilt.deploy.node_config import find_node_device, make_node_configs
from fedquilt.deploy.node_context import assign_budget, make_node_context, parse_run_config
from fedquilt.deploy.server_app import train_over_grid
from fedquilt.errors import ConfigError, TrainingError

NET = {"model__name": "mlp", "model__hidden": "[16]", "model__width": None, "data__fraction": 0.05}


def nodes(*devices: str):
    return {
        100 + number: {"partition-id": number, "device": device}
        for number, device in enumerate(devices)
    }


def test_nodes_train_on_the_device_that_they_were_started_with(place):
    changes = {**NET, "rounds": 2}
    on_cpu = train_over_grid(place.grid(name="a", **changes), place.config("a", **changes))
    kernels = torch.ops.sim.kernels()
    grid = place.grid(name="b", nodes=nodes("sim:1", "cpu", "sim"), **changes)
    mixed = train_over_grid(grid, place.config("b", **changes))
    assert torch.ops.sim.kernels() > kernels + 100
    for name, tensor in on_cpu.state.params.items():
        torch.testing.assert_close(mixed.state.params[name], tensor, rtol=1e-5, atol=1e-6)
        assert mixed.state.params[name].device.type == "cpu"


def test_a_node_without_a_device_of_its_own_uses_that_of_the_settings():
    assert find_node_device({}, "sim:1") == torch.device("sim:1")
    assert find_node_device({"device": "cpu"}, "sim:1") == torch.device("cpu")
    configs = make_node_configs(3, devices="sim")
    assert [config["device"] for config in configs] == ["sim:0", "sim:1", "sim:0"]


def test_a_node_whose_device_is_not_there_says_so_before_a_round(place):
    grid = place.grid(nodes=nodes("sim:7", "sim:7", "sim:7"), **NET)
    config = place.config("flower", **NET, flower__wait=1)
    with pytest.raises((ConfigError, TrainingError), match="'sim:7' is not there"):
        train_over_grid(grid, config)


def test_a_budget_is_measured_on_the_device_of_the_node():
    config = parse_run_config({"model.name": "mlp", "model.hidden": "[16]", "data.clients": 3})
    node = make_node_context(config, {"partition-id": 0})
    kernels = torch.ops.sim.kernels()
    measured = assign_budget(node, "auto", config, device=torch.device("sim:1"))
    assert measured.client.budget.width == 1.0  # which fits, and nothing is due
    assert torch.ops.sim.kernels() > kernels
