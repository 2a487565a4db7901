"""Attacks on membership, against independent measures and models whose members are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve
from torch import nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.errors import ConfigError
from fedquilt.evaluation.membership import (
    bound_true_positives,
    compute_confidences,
    compute_likelihood_ratios,
    compute_losses,
    describe_membership,
    measure_membership,
)
from fedquilt.runs.audit import audit_run


@pytest.mark.parametrize("shift", [0.0, 0.5, 3.0])
def test_rates_are_those_of_the_roc_curve(shift):
    draw = np.random.default_rng(0)
    members, others = draw.normal(shift, 1, 700).round(2), draw.normal(0, 1, 900).round(2)  # ties
    score = measure_membership(members, others)
    labels, values = np.r_[np.ones(700), np.zeros(900)], np.r_[members, others]
    false, true, _ = roc_curve(labels, values, drop_intermediate=False)
    assert score.auc == pytest.approx(roc_auc_score(labels, values))
    assert score.tpr == pytest.approx(true[false <= 0.01].max())
    assert score.advantage == pytest.approx((true - false).max())
    for value, (low, high) in (
        (score.auc, score.auc_interval),
        (score.tpr, score.tpr_interval),
    ):
        assert low <= value <= high


def test_an_interval_holds_the_true_value_about_as_often_as_it_says():
    draw, held = np.random.default_rng(1), 0
    for _ in range(12):
        score = measure_membership(draw.normal(0, 1, 60), draw.normal(0, 1, 60))
        held += score.auc_interval[0] <= 0.5 <= score.auc_interval[1]
    assert held >= 9


def test_sentences_say_whether_an_attack_works_and_what_can_be_said():
    draw = np.random.default_rng(0)
    others = draw.normal(0, 1, 400)
    said = {
        shift: " ".join(describe_membership(measure_membership(others[:200] + shift, others[200:])))
        for shift in (2.0, 0.0, -2.0)
    }
    assert "The attack works" in said[2.0]
    assert "cannot be told from guessing" in said[0.0]
    assert "worse than guessing" in said[-2.0]
    few = measure_membership(others[:200], others[:20], unit="client")
    assert "too few others (20) to say" in describe_membership(few)[1]


@given(st.floats(0.01, 12), st.floats(0, 0.1), st.floats(0, 0.5), st.sampled_from([0.0, 0.3, 1.0]))
def test_no_randomized_response_exceeds_what_is_promised(epsilon, delta, rate, mixing):
    """The mechanism that tells the truth with e^ε / (1 + e^ε), and with δ all, meets the bound."""
    truth = (1 - delta) * np.exp(epsilon) / (1 + np.exp(epsilon))
    lie = (1 - delta) / (1 + np.exp(epsilon))
    # an attack accuses who was given away, a part of those that answer 1, and a part of the rest
    false = mixing * lie
    true = delta + mixing * truth
    assert true <= bound_true_positives(epsilon, delta, false) + 1e-12
    if mixing == 1.0:
        assert true == pytest.approx(bound_true_positives(epsilon, delta, false))
    assert rate <= bound_true_positives(epsilon, delta, rate) <= 1


def test_losses_are_cross_entropies():
    torch.manual_seed(0)
    inputs, labels = torch.randn(30, 4), torch.arange(30) % 3
    module, rows = nn.Linear(4, 3), torch.arange(0, 30, 2)
    confidences = compute_confidences(module, to_examples((inputs, labels)), rows)
    expected = nn.functional.cross_entropy(module(inputs), labels, reduction="none")[rows]
    np.testing.assert_allclose(compute_losses(confidences), expected.detach().numpy(), rtol=1e-5)


def test_lira_finds_members_that_hard_examples_hide_from_the_loss():
    draw = np.random.default_rng(2)
    hardness = draw.normal(0, 5, 600)  # differs far more than membership matters
    inside = np.arange(600) < 300
    shadows_inside = draw.random((4, 600)) < 0.5
    target = hardness + 1.0 * inside + draw.normal(0, 0.5, 600)
    shadows = hardness + 1.0 * shadows_inside + draw.normal(0, 0.5, (4, 600))
    ratios = compute_likelihood_ratios(target, shadows, shadows_inside)
    by_loss = measure_membership(target[inside], target[~inside])
    by_ratio = measure_membership(ratios[inside], ratios[~inside], attack="lira")
    assert by_ratio.auc > 0.75 > by_loss.auc
    assert by_ratio.auc_interval[0] > by_loss.auc_interval[1]


@pytest.fixture(scope="module")
def hard_data():
    """Labels that say nothing about inputs, so whatever is learned is learned by heart."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(160, 12, generator=draw)
    labels = torch.randint(0, 4, (160,), generator=draw)
    data, test = (inputs[:80], labels[:80]), (inputs[80:], labels[80:])
    return fq.make_clients(data, test=test, count=8)


def train(clients, privacy=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
    method = fq.FedAvg(fq.LocalTraining(lr=0.3, momentum=0.0, epochs=10), fraction=1.0)
    example = torch.zeros(1, 12)
    return fq.train(model, example, method, clients, 12, workers=0, privacy=privacy)


def test_a_model_that_learned_by_heart_is_found_out_and_a_private_one_is_not(hard_data):
    run = train(hard_data)
    leaky, by_client = audit_run(run), audit_run(run, unit="client")
    assert leaky.auc_interval[0] > 0.7
    assert by_client.num_members == by_client.num_others == 8
    assert by_client.auc > leaky.auc
    private = audit_run(train(hard_data, fq.Privacy(noise_multiplier=3.0, accountant="rdp")))
    assert private.auc_interval[0] < 0.65  # its noise is secret: 0.46, with a deviation of 0.03


def test_an_audit_without_held_out_data_says_what_it_needs(hard_data):
    run = train(fq.make_clients((torch.randn(8, 12), torch.arange(8) % 4), count=2))
    with pytest.raises(ConfigError, match="held-out data of the server"):
        audit_run(run)
