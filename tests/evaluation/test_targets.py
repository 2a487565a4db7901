"""Rounds to an accuracy, against a search from the front."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import ConfigError
from fedquilt.evaluation.targets import (
    TargetResult,
    compute_speed_ups,
    count_rounds_to,
    find_reached_targets,
)
from fedquilt.learning.task import CLASSIFICATION

ACCURACIES = st.none() | st.integers(0, 20).map(lambda hits: hits / 20)


@given(st.lists(ACCURACIES, max_size=8), st.integers(1, 20))
def test_a_target_is_reached_when_it_is_reached_first(accuracies, hits):
    curve = [(10 * (number + 1), accuracy) for number, accuracy in enumerate(accuracies)]
    found = count_rounds_to(hits / 20, curve, CLASSIFICATION.metric)
    for round, accuracy in curve:
        is_there = accuracy is not None and accuracy >= hits / 20
        if found is None or round < found:
            assert not is_there
        elif round == found:
            assert is_there
    assert found is None or found in dict(curve)


def test_global_and_local_rounds_are_counted_apart():
    found = find_reached_targets([0.4, 0.5], [(2, 0.45), (4, 0.5)], [(1, 0.3), (2, None), (3, 0.4)])
    assert found == [TargetResult(0.4, 2, 3), TargetResult(0.5, 4, None)]
    assert find_reached_targets([], [(1, 0.5)]) == []


def test_speed_ups_are_those_of_table_4():
    """Shakespeare: 41, 78 and 155 rounds of FedAvg; 54 of STC, 53 of ADDS, never."""
    first = [TargetResult(0.4, 41, 10), TargetResult(0.45, 78, None), TargetResult(0.5, 155)]
    other = [TargetResult(0.4, 54, 20), TargetResult(0.45, 53, 7), TargetResult(0.5, None)]
    found = compute_speed_ups(first, other)
    assert [None if r.speed_up is None else round(r.speed_up, 2) for r in found] == [
        0.76, 1.47, None,
    ]  # fmt: skip
    assert [r.local_speed_up for r in found] == [0.5, None, None]
    assert [(r.target, r.rounds, r.local_rounds) for r in found] == [
        (r.target, r.rounds, r.local_rounds) for r in other
    ]


@pytest.mark.parametrize("target", [0.0, -0.1, 1.5, 40.0, float("nan")])
def test_a_target_is_an_accuracy(target):
    with pytest.raises(ConfigError, match=r"in \(0, 1\], got .*; write 40 % as 0.4"):
        find_reached_targets([target], [])
