"""The table: what it says of runs, and how it is passed on."""

import csv
import io
import json

import numpy as np
import pytest
import torch
from tests.comparison.conftest import run

import fedquilt as fq
from fedquilt.comparison.advice import write_advice
from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.table import Estimate, Row, choose_best
from fedquilt.errors import ConfigError
from fedquilt.files import read_document
from fedquilt.learning.metric import MetricInfo
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.records import read_records

ACCURACY = MetricInfo(is_fraction=True)


@pytest.fixture(scope="module")
def results(small):
    paths = sorted((small[2] / "results").glob("heterofl-*.json"))
    return [
        TrialResult.from_document(read_document(path))
        for path in paths
        if "-0-" in path.name or "-1-" in path.name
    ][:2]


def test_means_and_deviations_are_those_of_the_runs(small, results):
    row = next(row for row in small[0].rows if row.variant == "heterofl")
    values = {
        label: [
            r.get_size(t).scores["accuracy"] for r in results for t in r.tiers if t.label == label
        ]
        for label in ("1", "0.5")
    }
    for label, found in values.items():
        assert row.tiers[label].mean == pytest.approx(np.mean(found))
        assert row.tiers[label].deviation == pytest.approx(np.std(found, ddof=1))
    by_seed = np.mean([values["1"], values["0.5"]], axis=0)
    assert row.mean.mean == pytest.approx(by_seed.mean())
    assert row.mean.deviation == pytest.approx(by_seed.std(ddof=1))
    assert row.worst.mean == pytest.approx(np.min([values["1"], values["0.5"]], axis=0).mean())


def test_bytes_are_those_of_the_records(small, results):
    result = results[0]
    records = read_records(RunDirectory(small[2] / "runs" / result.key))
    rounds = [record for record in records if "scores" not in record]
    last = next(record for record in records if record.get("is_final"))
    assert result.spent.bytes_up == sum(r["bytes_up"] for r in rounds) + last["bytes_up"]
    assert result.spent.bytes_down == sum(r["bytes_down"] for r in rounds) + last["bytes_down"]


def test_macs_are_three_passes_over_all_examples_less_the_gradient_of_the_input(small, results):
    """A perceptron 64 - h - 10 of width 1 or 1/2, one epoch, on about 288 examples."""
    result = results[0]
    run = RunDirectory(small[2] / "runs" / result.key)
    by_kind = json.loads((run.path / "macs.json").read_text())["train"]
    for hidden in (8, 4):
        params = 64 * hidden + hidden + hidden * 10 + 10
        first, second = 64 * hidden, hidden * 10
        assert by_kind[str(params)] == 3 * (first + second) - first


def test_counting_changes_no_bit_of_a_run(small, results, tmp_path):
    digits = fq.load_dataset("digits").take_first(0.2)
    clients = fq.make_clients(digits.train, test=digits.test, count=4, budgets=(1.0, 0.5))
    model = fq.make_model("mlp", {"image_size": 8, "hidden": [8]})
    method = fq.HeteroFL(fq.LocalTraining(epochs=1, batch_size=20, lr=0.1), fraction=1.0)
    common = (model, digits.example)
    table = fq.compare(*common, {"m": method}, clients, 2, seeds=1, out=tmp_path / "c", workers=0)
    plain = fq.train(*common, method, clients, 2, workers=0, out=tmp_path / "p")
    (counted,) = (tmp_path / "c" / "runs").iterdir()
    names = ["model/model.safetensors", "model/tensors.safetensors"]
    found = [n for n in names if (counted / n).exists()] or [
        p.relative_to(counted) for p in (counted / "model").rglob("*.safetensors")
    ]
    assert found
    for name in found:
        assert (counted / name).read_bytes() == (tmp_path / "p" / name).read_bytes()
    assert [s.accuracy for s in plain.scores] == [e.mean for e in table.rows[0].tiers.values()]


def test_a_table_passes_through_json_csv_and_pandas(small, tmp_path):
    table, folder = small[0], tmp_path
    table.save(folder)
    document = json.loads((folder / "comparison.json").read_text())
    again = fq.Comparison.from_document(document)
    assert again.to_dicts() == table.to_dicts()
    assert again.advice == table.advice == document["advice"]
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [row["variant"] for row in rows] == [row.variant for row in table.rows]
    frame = table.to_pandas()
    assert frame.loc["heterofl", "mean_accuracy"] == pytest.approx(
        next(row.mean.mean for row in table.rows if row.variant == "heterofl")
    )
    assert (folder / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "pareto.svg").read_bytes()


def make_row(name, mean, *, p_value=None, byte=100.0, tiers=None, exceeds=None):
    return Row(
        name,
        seeds=(0, 1, 2),
        tiers={"1": Estimate(mean)} if tiers is None else tiers,
        mean=Estimate(mean, 0.01),
        bytes_down=byte / 2,
        bytes_up=byte / 2,
        p_value=p_value,
        exceeds_budgets=exceeds,
    )


def test_advice_is_not_for_what_exceeds_budgets_or_leaves_devices_without_a_model():
    rows = [
        make_row("greedy", 0.9, exceeds="ignores budgets"),
        make_row("partial", 0.9, tiers={"1": Estimate(0.9), "0.5": None}),
        make_row("fair", 0.8),
    ]
    assert choose_best(rows, ACCURACY).variant == "fair"
    assert write_advice(rows, ACCURACY).startswith("Take fair")


def test_advice_says_what_cannot_be_told_from_the_best_and_what_is_cheaper():
    rows = [
        make_row("a", 0.9),
        make_row("b", 0.89, p_value=0.4, byte=20.0),
        make_row("c", 0.5, p_value=0.001),
    ]
    advice = write_advice(rows, ACCURACY)
    assert "these runs cannot tell it from b (p = 0.4)" in advice
    assert "b sends 20% of its bytes" in advice
    assert "c" not in advice.replace("accuracy", "").split()


def test_of_a_loss_the_smallest_is_the_best():
    rows = [make_row("high", 0.9), make_row("low", 0.2)]
    assert choose_best(rows, MetricInfo("loss", higher_is_better=False)).variant == "low"


def test_methods_that_do_not_fit_are_left_out_with_their_own_reason(tmp_path):
    table, _ = run(tmp_path, rounds=1, compare={"methods": ["all", "fedavg"], "seeds": 1})
    assert "ignores budgets" in table.left_out["pfedme"]
    assert {"heterofl", "splitmix", "fedavg"} <= {row.variant for row in table.rows}
    named = next(row for row in table.rows if row.variant == "fedavg")
    assert "ignores budgets" in named.exceeds_budgets
    assert not named.is_best
    assert any("fedavg ignores budgets" in note for note in table.notes)


def test_physical_budgets_are_the_same_for_all_methods(tmp_path):
    table, _ = run(
        tmp_path, compare={"methods": ["heterofl", "splitmix"], "seeds": 1, "budgets_as": "params"}
    )
    one, two = table.rows
    assert list(one.tiers) == list(two.tiers)
    for label in one.tiers:
        limit = int(label.removeprefix("params "))
        assert all(row.sizes[label]["params"] <= limit for row in table.rows if label in row.sizes)


def test_what_makes_no_sense_is_one_sentence(tmp_path):
    for changes, sentence in (
        ({"compare": {"methods": ["heterofll"]}}, "method 'heterofll' is not known"),
        ({"compare": {"seeds": 0}}, "needs seeds from 0 on"),
        ({"compare": {"metods": ["all"]}}, "did you mean 'compare.methods'"),
        ({"compare": {"methods": ["heterofl"], "seeds": 1, "metric": "f2"}}, "metric 'f2'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            run(tmp_path, **changes)


def test_a_metric_that_no_run_has_is_refused_before_any_is_done(tmp_path):
    with pytest.raises(
        ConfigError, match=r"metric 'acuracy' is not known \(did you mean 'accuracy'"
    ):
        run(tmp_path, compare={"methods": ["heterofl"], "seeds": 1, "metric": "acuracy"})
    assert not list(tmp_path.glob("runs/*"))
    with pytest.raises(ConfigError, match=r"accuracy in \(0, 1\], got 40; write 40 % as 0.4"):
        run(tmp_path, compare={"methods": ["heterofl"], "seeds": 1, "target": 40})
    with pytest.raises(ConfigError, match="workers is at least 0, got -1"):
        run(tmp_path, workers=-1)


def test_a_regression_is_compared_by_its_own_metric(tmp_path):
    inputs = torch.rand(60, 4)
    data = (inputs, inputs.sum(1, keepdim=True))
    clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    rates = {"learns": 0.05, "does not": 1e-9}
    methods = {n: fq.FjORD(fq.LocalTraining(lr=lr, epochs=1)) for n, lr in rates.items()}
    table = fq.compare(
        model, inputs[:1], methods, clients, 2, loss="mse", metrics="mae", seeds=2, workers=0
    )
    assert (table.metric.name, table.metric.higher_is_better) == ("mae", False)
    assert [row.variant for row in table.rows] == ["learns", "does not"]
    assert table.rows[1].difference > 0
    assert table.rows[1].test == "seeds"  # there are no right and wrong answers
