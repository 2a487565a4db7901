"""The rates at which channels are kept, and the gradient of their share (ADDS, Eqs. 12-18)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.training.sampling import compute_rates, label_divergence, sample_gates

numbers = st.one_of(
    st.floats(0, 10),
    st.sampled_from([0.0, 1.0, 1e-12, 1e6]),  # ties, zeros and very different scales
)
importances = st.lists(numbers, min_size=1, max_size=40)
shares = st.floats(0.001, 1.0)
softnesses = st.sampled_from([10.0, 1.0, 0.98**50, 0.98**200, 1e-4])


@settings(max_examples=200, deadline=None)
@given(importances, shares, softnesses)
def test_the_mean_rate_is_the_share_whatever_the_importances(importance, share, softness):
    found = compute_rates(torch.tensor(importance, dtype=torch.float64), share, softness)
    assert found.mean() == pytest.approx(share, abs=1e-6)
    assert ((found >= 0) & (found <= 1)).all()
    order = np.argsort(importance, kind="stable")
    assert (np.diff(found.numpy()[order]) >= -1e-12).all()  # more important, more likely


def test_rates_are_the_logistic_function_of_importance():
    """Eq. 13: the log-odds of two channels differ by the difference of importance over ε."""
    importance = torch.tensor([0.2, 0.9, 1.7], dtype=torch.float64)
    found = compute_rates(importance, 0.4, 0.5)
    odds = torch.log(found / (1 - found))
    torch.testing.assert_close(odds.diff(), importance.diff() / 0.5)


def test_with_no_softness_left_the_most_important_are_kept():
    importance = torch.tensor([3.0, 1.0, 2.0, 0.5])
    torch.testing.assert_close(
        compute_rates(importance, 0.5, 1e-6), torch.tensor([1.0, 0, 1, 0], dtype=torch.float64)
    )
    assert (compute_rates(importance, 1.0, 1.0) == 1).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 3), min_size=2, max_size=12),
    st.floats(0.1, 0.9),
    st.sampled_from([1.0, 0.5, 0.2]),
    st.integers(0, 5),
)
def test_the_gradient_is_that_of_the_relaxed_problem(importance, share, softness, seed):
    """Eq. 18 against differences of L(p(α)), for a loss that is not linear in p."""
    generator = torch.Generator().manual_seed(seed)
    slope = torch.randn(len(importance), generator=generator, dtype=torch.float64)
    curve = torch.randn(len(importance), generator=generator, dtype=torch.float64)
    values = torch.tensor(importance, dtype=torch.float64)

    def loss(p):
        return (slope * p + curve * p**2).sum()

    p = compute_rates(values, share, softness).requires_grad_()
    (by_rates,) = torch.autograd.grad(loss(p), p)
    alpha = torch.tensor(share, dtype=torch.float64, requires_grad=True)
    drawn = sample_gates(alpha, values, softness, torch.rand(len(importance), dtype=torch.float64))
    (found,) = torch.autograd.grad(drawn, alpha, by_rates)  # as if they were p: straight through
    step = 1e-4
    above, below = (loss(compute_rates(values, share + s, softness)) for s in (step, -step))
    assert float(found) == pytest.approx(float(above - below) / (2 * step), rel=1e-3, abs=1e-4)


def test_the_gradient_stays_a_number_when_every_channel_is_decided():
    alpha = torch.tensor(0.5, requires_grad=True)
    importance = torch.tensor([5.0, 4.0, 1.0, 0.0])
    drawn = sample_gates(alpha, importance, 1e-8, torch.rand(4, dtype=torch.float64))
    (found,) = torch.autograd.grad(drawn, alpha, torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert float(found) == pytest.approx(4 * (2.0 + 4.0) / 2)  # the two at the border
    whole = torch.tensor(1.0, requires_grad=True)
    drawn = sample_gates(whole, importance, 1.0, torch.rand(4, dtype=torch.float64))
    (found,) = torch.autograd.grad(drawn, whole, torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert float(found) == pytest.approx(15.0)


def test_gates_are_open_as_often_as_their_rates_say():
    importance = torch.tensor([0.1, 0.8, 1.5, 3.0])
    noise = torch.rand(20000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = torch.tensor(0.6)
    drawn = torch.stack([sample_gates(share, importance, 0.7, some) for some in noise[:4000]])
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    expected = compute_rates(importance, 0.6, 0.7)
    torch.testing.assert_close(drawn.double().mean(0), expected, atol=0.03, rtol=0)


def test_divergence_of_labels_is_jensen_and_shannons():
    for counts in ([10, 0, 0], [3, 4, 5], [1, 1, 1, 1], [7, 0, 1, 0, 0]):
        own = np.array(counts) / sum(counts)
        uniform = np.full(len(own), 1 / len(own))

        def entropy(p):
            return -sum(x * math.log2(x) for x in p if x > 0)

        expected = entropy((own + uniform) / 2) - (entropy(own) + entropy(uniform)) / 2
        assert label_divergence(np.array(counts)) == pytest.approx(expected, abs=1e-12)
    assert 0 <= label_divergence(np.array([100] + [0] * 61)) <= 1
