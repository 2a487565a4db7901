from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedquilt.config import example_of, model_of, population_of, resolved, source_of
from fedquilt.data.population import Population
from fedquilt.deploy.app import run_config
from fedquilt.deploy.client import client_app
from fedquilt.deploy.server import trained
from fedquilt.deploy.site import settings_of
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.state import Setup
from fedquilt.runs.configured import begun
from fedquilt.runs.loop import ignore
from fedquilt.structure.groups import Structure

from .grid import OneProcessGrid

CLIENTS = 3
SETTINGS = {
    "rounds": 3,
    "seed": 5,
    "data.clients": CLIENTS,
    "data.share": 0.15,
    "data.budgets": "[1, 0.5, 0.25]",
    "model.name": "heterofl-cnn",
    "model.width": 0.0625,
    "optimiser.epochs": 1,
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
        config = settings_of(_settings(changes))
        source = source_of(config)
        config = resolved(config, source)
        people, model, example = population_of(config, source), model_of(config), example_of(source)
        structure = Structure.trace(model, example)
        whole = Setup(model, structure, example, people.clients, config.rounds, config.seed)

        def engine(setup: Setup, people: Population, folder: Path | None):
            return make(setup.model, setup.structure, people.data, workers=0, folder=folder)

        out = self.folder / name
        return begun(config, whole, people, out, resume=False, engine=engine)(ignore)

    def grid(self, meddle: Any = None, name: str = "flower", nodes: Any = None, **changes: Any):
        config = self.config(name, **changes)
        about = nodes or {100 + i: {"partition-id": i} for i in range(CLIENTS)}
        return OneProcessGrid(client_app(), run_config(config), about, meddle)

    def flower(self, meddle: Any = None, name: str = "flower", **changes: Any):
        config = self.config(name, **changes)
        return trained(self.grid(meddle, name, **changes), config)

    def config(self, name: str, **changes: Any):
        out = {"flower.out": str(self.folder / name)}
        return settings_of(_settings({**out, **changes}))


def _settings(changes: dict[str, Any]) -> dict[str, Any]:
    changed = {**SETTINGS, **{k.replace("__", "."): v for k, v in changes.items()}}
    return {name: value for name, value in changed.items() if value is not None}


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)
