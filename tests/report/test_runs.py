"""Pages about runs that were made in Python."""

import importlib
import json
from types import ModuleType

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError

STEPS = fq.LocalTraining(lr=0.05, epochs=1, batch_size=8)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A net, clients, and three runs of it: kept, opened again, and in memory only."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(40, 4)
    pair = x, (x.sum(1) > 0).long()
    people = fq.make_clients(pair, test=pair, count=4, budgets=[1, 0.5])
    folder, method = tmp_path_factory.mktemp("runs") / "kept", fq.HeteroFL(STEPS, fraction=1.0)
    kept, alone = (
        fq.train(net, torch.zeros(1, 4), method, people, 2, workers=0, out=out)
        for out in (folder, None)
    )
    opened = fq.open_run(str(folder), net, method, clients=people)
    return {
        "kept": kept,
        "opened": opened,
        "alone": alone,
        "bare": fq.open_run(folder, net, method),
    }


def data_of(page):
    assert page.name == "index.html"
    return json.loads((page.parent / "report.json").read_text())


def test_a_run_reports_itself_with_its_clients(world, tmp_path):
    page = fq.write_report([world["kept"]], tmp_path / "one", workers=0)
    (name, told), *others = data_of(page).items()
    assert (name, others) == ("kept", [])
    assert [row["accuracy"] for row in told["scores"]] == [
        score.accuracy for score in world["kept"].scores
    ]
    assert len(told["clients"]) == 4
    assert told["progress"]
    assert "<h2>kept</h2>" in page.read_text()


def test_an_opened_run_reports_the_same(world, tmp_path):
    one = fq.write_report([world["kept"]], str(tmp_path / "one"), workers=0)
    other = fq.write_report([world["opened"]], str(tmp_path / "other"), workers=0)
    assert one.read_bytes() == other.read_bytes()


def test_runs_are_reported_together_whatever_is_known_of_them(world, tmp_path):
    runs = [world["kept"], world["bare"], world["alone"]]
    told = data_of(fq.write_report(runs, tmp_path / "all", targets=[0.5], workers=0))
    assert list(told) == ["kept (1)", "kept (2)", "HeteroFL"]
    first, bare, alone = told.values()
    assert first["scores"] == bare["scores"] == alone["scores"]
    assert (len(first["clients"]), len(bare["clients"]), len(alone["clients"])) == (4, 0, 4)
    assert first["progress"] == bare["progress"] != alone["progress"] == []
    assert (
        data_of(fq.write_report(runs, tmp_path / "few", clients=False))["HeteroFL"]["clients"] == []
    )


@pytest.mark.parametrize("runs", [[], None])
def test_there_must_be_runs(world, runs):
    with pytest.raises(ConfigError, match="list of one or more runs"):
        fq.write_report(world["kept"] if runs is None else runs)
    with pytest.raises(ConfigError, match="about runs, got 'runs/a'; open it"):
        fq.write_report(["runs/a"])


def test_the_function_hides_no_module():
    assert not isinstance(fq.write_report, ModuleType)
    assert importlib.import_module("fedquilt.report.page").write_page
