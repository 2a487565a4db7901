"""Metrics: the value over clients is that of all data in one place."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.learning.known_metrics import METRICS
from fedquilt.learning.metrics import make_metrics
from fedquilt.learning.task import LearningTask, make_task

CUTS = st.lists(st.integers(1, 59), max_size=9, unique=True).map(sorted)


def over(task: LearningTask, output: torch.Tensor, targets: torch.Tensor, cuts: list[int]):
    """The metrics of all rows, summed over the parts between the cuts."""
    sums: dict[str, float] = {"examples": 0, "loss": 0.0}
    for part in np.split(np.arange(len(targets)), cuts):
        for name, value in task.measure(output[part], targets[part]).items():
            sums[name] = sums.get(name, 0.0) + value
        count = task.loss.count(targets[part])
        sums["examples"] += count
        sums["loss"] += count * float(task.loss.of_output(output[part], targets[part]))
    return task.compute(sums)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(60, *shape, generator=torch.Generator().manual_seed(len(shape)))


@given(CUTS)
@settings(deadline=None, max_examples=25)
def test_counts_over_clients_are_those_of_all_data(cuts):
    logits, labels = drawn(5), drawn().mul(3).long() % 5
    own = make_task(metrics=["accuracy", torchmetrics.F1Score("multiclass", num_classes=5)])
    f1 = sklearn.metrics.f1_score(labels, logits.argmax(1), average="micro")
    values = over(own, logits, labels, cuts)
    assert values["accuracy"] == float((logits.argmax(1) == labels).float().double().mean())
    assert values["multiclass-f1-score"] == pytest.approx(f1, abs=1e-12)


@given(CUTS)
@settings(deadline=None, max_examples=25)
def test_regression_over_clients_is_that_of_all_data(cuts):
    output, targets = drawn(1), drawn()
    said, wanted = output[:, 0].double().numpy(), targets.double().numpy()
    task = make_task("mse", ["mse", "rmse", "mae", "r2", "loss"])
    values = over(task, output, targets, cuts)
    assert values["mse"] == pytest.approx(sklearn.metrics.mean_squared_error(wanted, said))
    assert values["rmse"] == pytest.approx(values["mse"] ** 0.5)
    assert values["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(wanted, said))
    assert values["r2"] == pytest.approx(sklearn.metrics.r2_score(wanted, said))
    assert values["loss"] == pytest.approx(values["mse"], rel=1e-5)
    (r2,) = over(make_task("mse", [torchmetrics.R2Score()]), output[:, 0], targets, cuts).values()
    assert r2 == pytest.approx(values["r2"])


@given(CUTS)
@settings(deadline=None, max_examples=25)
def test_masks_over_clients_are_those_of_all_data(cuts):
    logits, masks = drawn(3, 3), (drawn(3, 3) + 0.3 > 0).float()
    values = over(make_task("bce", ["f1", "iou", "binary-accuracy"]), logits, masks, cuts)
    said, wanted = (logits > 0).flatten().numpy(), masks.flatten().numpy()
    assert values["f1"] == pytest.approx(sklearn.metrics.f1_score(wanted, said))
    assert values["iou"] == pytest.approx(sklearn.metrics.jaccard_score(wanted, said))
    assert values["binary-accuracy"] == pytest.approx((said == wanted).mean())


@given(CUTS)
@settings(deadline=None, max_examples=25)
def test_a_function_of_each_example_is_averaged_over_all(cuts):
    @fq.metric(higher_is_better=False)
    def largest(output, target):
        return (output - target).abs().amax(1)

    output, targets = drawn(4), drawn(4).flip(0)
    expected = float((output - targets).abs().amax(1).double().mean())
    assert over(make_task("mse", [largest]), output, targets, cuts)["largest"] == pytest.approx(
        expected, rel=1e-12
    )


def test_a_metric_over_ten_clients_is_that_of_one_model_on_all_data():
    torch.manual_seed(0)
    x = torch.randn(100, 4)
    y = x.sum(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    tests = [(x[i::10], y[i::10]) for i in range(10)]
    clients = fq.make_clients(tests, test=tests, budgets=(1.0, 0.5))
    run = fq.train(model, x[:1], "heterofl", clients, rounds=1, workers=0, loss="mse")
    for score in run.scores:
        with torch.no_grad():
            said = run.customize(score.width)(x)[:, 0].double().numpy()
        wanted = y.double().numpy()
        assert score.metrics["mae"] == pytest.approx(np.abs(said - wanted).mean(), rel=1e-6)
        assert score.metrics["r2"] == pytest.approx(sklearn.metrics.r2_score(wanted, said))
        own = [np.abs(said[i::10] - wanted[i::10]).mean() for i in range(10)]
        assert score.user_value == pytest.approx(np.mean(own), rel=1e-6)
        assert (score.value, score.accuracy) == (None, None)


def test_directions_decide_what_is_worst_and_what_reaches_a_target():
    error, hits = METRICS["mae"].info, METRICS["accuracy"].info
    assert (error.choose_worst([1, 3]), hits.choose_worst([1, 3])) == (3, 1)
    assert (error.choose_best([1, 3]), hits.choose_best([1, 3])) == (1, 3)
    assert error.reaches(0.1, 0.2)
    assert not hits.reaches(0.1, 0.2)
    assert hits.reaches(0.2, 0.2)


@pytest.mark.parametrize(
    ("given_metrics", "words"),
    [
        ("acuracy", r"metric 'acuracy' is not known \(did you mean 'accuracy'\?\)"),
        (lambda output, target: 0.0, "whether higher is better, and the function"),
        (torchmetrics.CatMetric(), "whether higher is better|computed from sums over clients"),
        (fq.TorchMetric, "got the class"),
        (torchmetrics.SumMetric(), "whether higher is better, and SumMetric does not"),
        (torchmetrics.F1Score, "write it with|is an object, got the class"),
        (["mae", "mae"], "names of their own"),
        ([], "at least one metric"),
        (3, "got int"),
        (fq.metric(higher_is_better=True, name="width")(max), "says something else in tables"),
        (fq.metric(higher_is_better=True, name="a b")(max), "the name of a metric is a word"),
    ],
)
def test_metrics_that_cannot_be_summed_are_refused(given_metrics, words):
    with pytest.raises(ConfigError, match=words):
        make_metrics(given_metrics, make_task("mse").loss)


@pytest.mark.filterwarnings("ignore:Metric `")
def test_a_metric_that_keeps_all_predictions_is_refused():
    with pytest.raises(ConfigError, match="is no sum, so examples would have to leave clients"):
        fq.TorchMetric(torchmetrics.AUROC("binary"))
    assert fq.TorchMetric(torchmetrics.AUROC("binary", thresholds=5)).info.higher_is_better
