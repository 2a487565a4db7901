"""Runs with robust rules: settings, records, refusals."""

from __future__ import annotations

import json

import pytest
import torch

import fedquilt as fq
from fedquilt.cli.setting_options import TRAIN_OPTIONS
from fedquilt.errors import ConfigError
from fedquilt.runs.events import RoundDone
from fedquilt.runs.from_config import open_configured_run
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import build_method


def make_federation(count=6, budgets=(1.0, 0.5)):
    data = (torch.rand(12 * count, 4), torch.arange(12 * count) % 3)
    return data, fq.make_clients(data, test=data, count=count, budgets=budgets)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))


def test_settings_name_a_rule_and_what_comes_before():
    config = load_config({
        "method": {"name": "fedavg"},
        "aggregation": {
            "name": "Geometric-Median", "hostile": 2, "mixing": "nnm", "iterations": 7,
            "clip_quantile": 0.5, "clip_per_ring": True, "max_weight": 10.0, "equal_weights": True,
        },
    })  # fmt: skip
    method = build_method(config)
    assert method.aggregator == fq.GeometricMedian(hostile=2, mixing="nnm", iterations=7)
    assert method.transforms == (
        fq.ClipQuantile(0.5, per_ring=True), fq.CapWeight(10.0), fq.EqualWeights(),
    )  # fmt: skip
    clipped = build_method(load_config({"aggregation": {"clip_norm": 2.0}}))
    assert (clipped.aggregator, clipped.transforms) == (None, (fq.ClipNorm(2.0),))
    assert build_method(load_config({})).transforms == ()
    assert TRAIN_OPTIONS["aggregation"] == "aggregation.name"


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"name": "medain"}, "did you mean 'median'"),
        ({"name": "median", "radius": 1.0}, "'aggregation.radius' is not known"),
        ({"name": "median", "hostile": 1.5}, "a fraction below 1"),
        ({"name": "krum", "scope": "both"}, "aggregation.scope"),
    ],
)
def test_settings_that_no_rule_has_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        build_method(load_config({"aggregation": settings}))


def test_records_and_events_say_which_cells_were_kept(tmp_path):
    data, clients = make_federation()
    events = []
    method = fq.HeteroFL(fq.LocalTraining(epochs=1), aggregator=fq.TrimmedMean(hostile=2))
    run = fq.train(
        make_model(), data[0][:1], method, clients, 6, workers=0, out=tmp_path / "run",
        callbacks=[events.append],
    )  # fmt: skip
    done = [event for event in events if isinstance(event, RoundDone)]
    assert [event.merging for event in done] == [{"cells_held": 67, "cells_kept": 32}] * 6
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["merging"]["cells_kept"] for r in records if "loss" in r] == [32] * 6
    (finding,) = [finding for finding in run.findings if finding.kind == "kept"]
    assert "47.8% of the cells" in finding.sentence


def test_too_few_clients_are_refused_before_anything_is_written(tmp_path):
    data, clients = make_federation()
    method = fq.FedAvg(fraction=0.5, aggregator=fq.Median(hostile=2))
    with pytest.raises(
        ConfigError, match="than the 3 of a round; lower hostile, or ask at least 5"
    ):
        fq.train(make_model(), data[0][:1], method, clients, 1, workers=0, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_codes_of_changes_are_not_clipped_but_merged_robustly():
    data, clients = make_federation()
    method = fq.STC(fq.LocalTraining(epochs=1), fraction=1.0, transforms=(fq.ClipNorm(1.0),))
    with pytest.raises(ConfigError, match="gives changes; leave it out"):
        fq.train(make_model(), data[0][:1], method, clients, 1, workers=0)
    method = fq.STC(fq.LocalTraining(epochs=1), fraction=1.0, aggregator=fq.Median(hostile=1))
    fq.train(make_model(), data[0][:1], method, clients, 1, workers=0)


def test_a_run_from_python_opens_again_with_its_rule(tmp_path):
    data, clients = make_federation()
    method = fq.FedAvg(
        fq.LocalTraining(epochs=1), aggregator=fq.Krum(hostile=1), transforms=(fq.EqualWeights(),)
    )
    model = fq.make_model(
        "mlp", {"image_size": 2, "in_channels": 1, "hidden": [4], "num_classes": 3}
    )
    example = data[0].view(-1, 1, 2, 2)
    clients = fq.make_clients((example, data[1]), count=6)
    fq.train(model, example[:1], method, clients, 1, workers=0, out=tmp_path / "run")
    assert open_configured_run(tmp_path / "run").method == method
