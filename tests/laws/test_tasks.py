"""The laws hold for every method on tasks without classes; what needs classes is refused.

``SUPPORT`` is the table of docs/tasks.md: a test compares the two.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.data.population import Population
from fedquilt.errors import FedquiltError
from fedquilt.learning.task import make_task
from fedquilt.runs.policies import Cadence

from .conftest import METHODS, Case, Replaying, population
from .test_optimizers import LAWS
from .test_running import StopNow, interrupted

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
CLASSES_ONLY = {"fedavg-at", "fedavg-oat"}  # they attack the answer that is right
NEEDS_OUTPUTS = {"apfl", "depthfl", "fjord"}  # nets, or exits, learn from each other's outputs
KINDS = ("regression", "multi-label", "pixels", "inputs", "batch loss")
CASES = {name.split()[0]: name for name in sorted(METHODS, reverse=True)}  # one of each method


def is_supported(name: str, kind: str) -> bool:
    if name in CLASSES_ONLY and kind != "pixels":
        return False  # pixels have classes, one at every position
    if name == "lg-fedavg" and kind == "pixels":
        return False  # it shares the output layer, which it looks for on the last axis
    if name == "depthfl" and kind == "pixels":
        return False  # its exits are classifiers
    return not (name in NEEDS_OUTPUTS and kind == "batch loss")


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def regression() -> Population:
    """The clients of the laws, with four numbers to predict in place of a class."""
    people = population().without_labels()

    def change(examples: Any) -> Any:
        inputs, labels = examples.inputs, examples.labels
        means = inputs.mean((1, 2, 3))
        return to_examples((inputs, torch.stack([labels * k + means for k in range(4)], 1)))

    splits = {
        name: {client: change(data) for client, data in getattr(people, name).items()}
        for name in ("train", "test", "validation")
    }
    return replace(people, **splits)


ALLOWED = sorted(name for name in CASES if name not in CLASSES_ONLY)


@pytest.fixture(scope="module", params=ALLOWED)
def regression_case(request: pytest.FixtureRequest, setup: Any) -> Case:
    method = METHODS[CASES[request.param]]
    if getattr(method, "robust", False):
        method = replace(method, robust=False)
    people = regression()
    learned = replace(setup, rounds=2, task=make_task("mse", ["rmse"]), clients=people.clients)
    return Case(method, learned, method.prepare_model(learned), people)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_laws_hold_for_regression(law, regression_case):
    case, needed = regression_case, inspect.signature(law).parameters
    law(case, **({"replaying": Replaying(case)} if "replaying" in needed else {}))


def run_in(case: Case, folder: Any, watch: Any = None, *, resume: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    with case.engine(folder=folder / "clients") as engine:
        return case.run(engine, folder, watch, Cadence(checkpoint_every=1), resume=resume)


def test_a_stopped_run_of_another_task_resumes_to_the_same_bits(regression_case, tmp_path):
    case = regression_case
    expected, scores, events = run_in(case, tmp_path / "whole")
    assert {score.metric.name for score in scores} == {"rmse"}
    assert all(score.accuracy is None and score.local_value is None for score in scores)
    with pytest.raises(StopNow):
        run_in(case.anew(), tmp_path / "cut", interrupted(len(events) * 2 // 3))
    state, found, _ = run_in(case.anew(), tmp_path / "cut", resume=True)
    assert case.bits(state.params) == case.bits(expected.params)
    assert found == scores


class Sides(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(3, 16), nn.Linear(3, 16), nn.Linear(16, 4)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.left(left) + self.right(right)))


def rows() -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(16, 4)), torch.randn(24, 6)


def make(kind: str) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    """A model, its example, data, and the loss and metrics."""
    torch.manual_seed(0)
    model, x = rows()
    if kind == "pixels":
        images = torch.rand(24, 1, 6, 6)
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1)]
        return nn.Sequential(*layers), images[:1], (images, (images[:, 0] * 3).long()), {}
    if kind == "multi-label":
        return model, x[:1], (x, (x[:, :4] > 0).float()), {"loss": "bce"}
    if kind == "inputs":
        sides = {"left": x[:, :3], "right": x[:, 3:]}
        return Sides(), {n: t[:1] for n, t in sides.items()}, (sides, x[:, :4]), {"loss": "mse"}
    loss = squared if kind == "batch loss" else "mse"
    return model, x[:1], (x, x[:, :4]), {"loss": loss, "metrics": ["mae"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_table_says_which_method_learns_which_task(name, kind):
    model, example, data, task = make(kind)
    method = METHODS[CASES[name]]
    if name == "depthfl":
        method = replace(method, exit_modules=None)
    if name == "nefl":
        method = fq.NeFL(gammas=(0.2, 1.0), tolerance=0.2, fraction=1.0)
    if getattr(method, "robust", False):
        method = replace(method, robust=False)
    clients = fq.make_clients(data, test=data, count=3, budgets=(1.0, 0.5), validation=0.2)
    if not is_supported(name, kind):
        with pytest.raises(FedquiltError):
            fq.train(model, example, method, clients, rounds=1, workers=0, **task)
        return
    run = fq.train(model, example, method, clients, rounds=1, workers=0, **task)
    assert all(score.value is not None or score.user_value is not None for score in run.scores)


def test_the_page_has_the_same_table():
    table = re.search(r"\| method \|.*?\n\n", PAGE.read_text(), re.DOTALL)
    assert table is not None
    header, _, *lines = table.group().strip().splitlines()
    kinds = [cell.strip() for cell in header.strip("|").split("|")][1:]
    assert tuple(kinds) == KINDS
    found = {}
    for line in lines:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.split(", "):
            found[name] = [cell == "yes" for cell in cells]
    assert found == {name: [is_supported(name, kind) for kind in KINDS] for name in CASES}
