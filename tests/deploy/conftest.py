from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedquilt.data.population import Population
from fedquilt.deploy.app_folder import make_run_config
from fedquilt.deploy.client_app import make_client_app
from fedquilt.deploy.node_context import parse_run_config
from fedquilt.deploy.server_app import train_over_grid
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.state import Setup
from fedquilt.runs.from_config import plan_run_over
from fedquilt.runs.plan import start_run
from fedquilt.settings.resolve import (
    build_model,
    build_population,
    load_source,
    make_example,
    resolve_config,
)
from fedquilt.structure.create import trace_structure

from .grid import OneProcessGrid

collect_ignore = [] if hasattr(torch, "sim") else ["device_checks.py"]  # see tests/devices
CLIENTS = 3
SETTINGS = {
    "rounds": 3,
    "seed": 5,
    "data.clients": CLIENTS,
    "data.fraction": 0.15,
    "data.budgets": "[1, 0.5, 0.25]",
    "model.name": "heterofl-cnn",
    "model.width": 0.0625,
    "local_training.epochs": 1,
    "run.evaluate_every": 0,
    "run.workers": 0,
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDQUILT_STATE", str(tmp_path / "state"))


class Place:
    """Runs of the same settings, here and on a grid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def local(self, name: str = "local", make: Any = LocalEngine, **changes: Any):
        config = parse_run_config(_settings(changes))
        source = load_source(config)
        config = resolve_config(config, source)
        people, model, example = (
            build_population(config, source),
            build_model(config),
            make_example(source),
        )
        structure = trace_structure(model, example)
        whole = Setup(model, structure, example, people.clients, config.rounds, config.seed)

        def engine(setup: Setup, people: Population, folder: Path | None):
            return make(setup.model, setup.structure, people.data, workers=0, folder=folder)

        out = self.folder / name
        return start_run(plan_run_over(config, whole, people, out, engine=engine)).train()

    def grid(self, meddle: Any = None, name: str = "flower", nodes: Any = None, **changes: Any):
        config = self.config(name, **changes)
        about = nodes or {100 + i: {"partition-id": i} for i in range(CLIENTS)}
        return OneProcessGrid(make_client_app(), make_run_config(config), about, meddle)

    def flower(self, meddle: Any = None, name: str = "flower", **changes: Any):
        config = self.config(name, **changes)
        return train_over_grid(self.grid(meddle, name, **changes), config)

    def config(self, name: str, **changes: Any):
        out = {"flower.out": str(self.folder / name)}
        return parse_run_config(_settings({**out, **changes}))


def _settings(changes: dict[str, Any]) -> dict[str, Any]:
    changed = {**SETTINGS, **{k.replace("__", "."): v for k, v in changes.items()}}
    return {name: value for name, value in changed.items() if value is not None}


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)
