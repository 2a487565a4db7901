"""A finished run is scored as an experiment says."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import fedquilt as fq
from fedquilt.comparison.scoring import Scoring


def test_a_run_is_scored_at_the_sizes_and_with_the_statistics_that_are_asked_for():
    generator, labels = torch.Generator().manual_seed(0), torch.arange(48) % 3
    inputs = torch.randn(48, 1, 4, 4, generator=generator) + labels.view(-1, 1, 1, 1)
    clients = fq.make_clients((inputs, labels), test=(inputs, labels), count=3)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 3))
    method = fq.SplitMix(fq.LocalTraining(epochs=1, batch_size=6), base=0.25, statistics="post")
    run = fq.train(net, inputs[:1], method, clients, rounds=1, workers=0)
    scores = Scoring(widths=(1.0, 0.25), personal_statistics=True).evaluate(run)
    expected = run.evaluate(widths=(1.0, 0.25), personal_statistics=True, workers=0)
    assert scores == tuple(expected)
    assert [score.width for score in scores] == [1.0, 0.25]
    assert all(score.personal_accuracy is not None for score in scores)
    (plain,) = Scoring(widths=(1.0,)).evaluate(run)
    assert plain.personal_accuracy is None
    assert plain.user_accuracy == scores[0].user_accuracy


@pytest.mark.parametrize("choice", ["post", "yes", 2, ["batch"]])
def test_statistics_that_there_are_not_are_refused_where_they_are_named(choice):
    with pytest.raises(ValidationError, match="true, false, 'batch' or 'refreshed', got") as caught:
        Scoring(personal_statistics=choice)
    assert [error["loc"] for error in caught.value.errors()] == [("personal_statistics",)]
