"""Paired tests, against scipy and against what chance does."""

import numpy as np
import pytest
from scipy import stats

from fedquilt.comparison.significance import compare_paired, correct_by_holm


def test_over_seeds_it_is_the_paired_t_test():
    draw = np.random.default_rng(0)
    for count in (2, 3, 10):
        one, two = draw.normal(0.8, 0.02, count), draw.normal(0.79, 0.02, count)
        expected = stats.ttest_rel(one, two)
        found = compare_paired(list(one - two))
        interval = expected.confidence_interval(0.95)
        assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
        assert found.difference - found.interval == pytest.approx(interval.low, rel=1e-9)
        assert found.difference + found.interval == pytest.approx(interval.high, rel=1e-9)


def test_with_one_seed_it_is_the_paired_t_test_over_examples():
    draw = np.random.default_rng(1)
    one, two = ((draw.random(200) < share).astype(float) for share in (0.8, 0.7))
    differences = one - two
    found = compare_paired([differences.mean()], differences[None])
    assert found.p_value == pytest.approx(stats.ttest_rel(one, two).pvalue, rel=1e-9)
    assert found.test == "examples"


def test_without_noise_of_examples_the_crossed_test_is_that_over_seeds():
    by_seed = [0.01, 0.03, 0.025]
    crossed = compare_paired(by_seed, np.repeat(np.array(by_seed)[:, None], 50, axis=1))
    assert crossed.p_value == pytest.approx(compare_paired(by_seed).p_value, rel=1e-6)


def draw_null(draw, seeds, examples, seed_noise, example_noise):
    """Differences of two methods that are the same in the long run."""
    return (
        draw.normal(0, seed_noise, (seeds, 1))
        + draw.normal(0, example_noise, (1, examples))
        + draw.normal(0, 0.5, (seeds, examples))
    )


@pytest.mark.parametrize(("seed_noise", "example_noise"), [(0.05, 0.0), (0.0, 0.5), (0.03, 0.3)])
def test_noise_is_seldom_taken_for_progress(seed_noise, example_noise):
    """At the level 0.05 at most one in twenty, whether seeds or examples differ."""
    draw = np.random.default_rng(2)
    differences = [draw_null(draw, 3, 100, seed_noise, example_noise) for _ in range(600)]
    found = [compare_paired(list(d.mean(axis=1)), d).p_value < 0.05 for d in differences]
    assert np.mean(found) < 0.07


def test_a_test_over_examples_alone_would_take_training_noise_for_progress():
    """Why both are in the test: the same data, seeds left out, are wrong most of the time."""
    draw = np.random.default_rng(3)
    differences = [draw_null(draw, 3, 400, 0.1, 0.1) for _ in range(200)]
    naive = [stats.ttest_1samp(d.mean(axis=0), 0).pvalue < 0.05 for d in differences]
    ours = [compare_paired(list(d.mean(axis=1)), d).p_value < 0.05 for d in differences]
    assert np.mean(naive) > 0.5
    assert np.mean(ours) < 0.08


def test_a_real_difference_is_found():
    draw = np.random.default_rng(4)
    differences = 0.1 + draw_null(draw, 5, 1000, 0.01, 0.1)
    assert compare_paired(list(differences.mean(axis=1)), differences).p_value < 0.01


def test_holm_is_between_no_correction_and_bonferroni():
    p_values = [0.001, 0.02, 0.03, 0.5]
    corrected = correct_by_holm(p_values)
    assert corrected == pytest.approx([0.004, 0.06, 0.06, 0.5])
    assert all(p <= q <= min(1, 4 * p) for p, q in zip(p_values, corrected, strict=True))
