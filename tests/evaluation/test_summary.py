"""One choice of the score that tables and reports show."""

from dataclasses import replace

import pytest

from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import Summary, find_common_score, get_main_value, summarize
from fedquilt.learning.task import CLASSIFICATION

ACCURACY = CLASSIFICATION.metric
SCORE = SizeScore(1.0, 10, 20, 0.9, 0.8, 0.1, 100, user_value=0.7)
SMALL = replace(SCORE, width=0.5, value=0.5, local_value=0.3, user_value=0.6)


def without(score, *names):
    return replace(score, **dict.fromkeys(names))


def test_worst_and_mean_are_of_the_first_score_that_all_sizes_have():
    assert summarize([SCORE, SMALL]) == Summary("value", ACCURACY, 0.5, pytest.approx(0.7))
    bare = without(SMALL, "value")  # of one size: then it is no score to compare sizes by
    assert summarize([SCORE, bare]) == Summary("user_value", ACCURACY, 0.6, pytest.approx(0.65))
    local = without(SCORE, "value", "user_value")
    assert summarize([local, SMALL]) == Summary("local_value", ACCURACY, 0.3, pytest.approx(0.55))
    assert summarize([local, SMALL]).name == "local accuracy"
    nothing = without(SCORE, "value", "user_value", "local_value")
    assert summarize([nothing, SMALL]) is None
    assert summarize([]) is None


def test_a_dial_is_summed_up_at_its_first_point():
    dialled = [
        replace(s, robustness=r, value=s.value - r) for r in (0.1, 0.4) for s in (SCORE, SMALL)
    ]
    assert summarize(dialled) == Summary("value", ACCURACY, pytest.approx(0.4), pytest.approx(0.6))


def test_one_score_alone_shows_what_it_has():
    assert get_main_value(SCORE) == 0.9
    assert get_main_value(without(SCORE, "value")) == 0.7
    assert get_main_value(without(SCORE, "value", "user_value")) == 0.8
    assert get_main_value(without(SCORE, "value", "user_value", "local_value")) is None
    assert find_common_score([]) is None


def test_a_score_shows_the_fields_that_have_a_value():
    assert repr(SCORE) == (
        "SizeScore(width=1.0, params=10, macs=20, accuracy=0.9, local_accuracy=0.8, loss=0.1, "
        "num_examples=100, user_accuracy=0.7, batch_statistics=False)"
    )
