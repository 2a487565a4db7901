"""``fedquilt audit``, with shadow runs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fedquilt.cli import app
from fedquilt.errors import ConfigError
from fedquilt.runs.audit import audit_with_shadows
from fedquilt.runs.from_config import open_configured_run

SMALL = (
    "--set", "data.fraction=0.1", "--set", "data.clients=4", "--set", "model.name=mlp",
    "--set", "model.hidden=[16]", "--method", "fedavg", "--rounds", "3", "--workers", "0",
    "--set", "local_training.lr=0.2", "--set", "local_training.epochs=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit") / "run"
    result = CliRunner().invoke(app, ["train", *SMALL, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def test_the_command_prints_one_document_with_intervals(run_folder):
    arguments = ["audit", str(run_folder), "--shadows", "2", "--workers", "0", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [attack["attack"] for attack in document["attacks"]] == ["loss", "lira"]
    for attack in document["attacks"]:
        low, high = attack["auc_interval"]
        assert 0 <= low <= attack["auc"] <= high <= 1
        assert attack["num_members"] == 144
    assert document["privacy"] is None


def test_the_command_prints_a_table(run_folder):
    result = CliRunner().invoke(app, ["audit", str(run_folder), "--by", "client"])
    assert result.exit_code == 0, result.output
    assert "TPR at 1% FPR" in result.stdout
    assert "4 members" in result.stdout
    assert "shown a client and another, it picks the client in" in " ".join(result.stdout.split())


def test_lira_needs_two_shadow_runs(run_folder):
    with pytest.raises(ConfigError, match="two shadow runs at least"):
        audit_with_shadows(open_configured_run(run_folder), 1)
