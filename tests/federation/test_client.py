"""Seeds, and who takes part in a round."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.federation.client import Client, derive_seed
from fedquilt.federation.state import Phase, sample_cohort

PARTS = st.lists(st.integers(-2, 2**40), min_size=1, max_size=4)


@given(PARTS, PARTS)
def test_different_parts_give_different_seeds(one, other):
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


def test_missing_parts_are_not_the_same_as_zeros():
    found = {derive_seed(*(0,) * count) for count in range(1, 6)}
    assert len(found) == 5
    assert derive_seed(0, 3) != derive_seed(0, 3, 0)  # the cohort's draw is not client 0's


def test_seeds_of_rounds_and_clients_never_meet_and_suit_every_generator():
    seeds = [derive_seed(0, r, c) for r, c in itertools.product(range(50), range(-1, 100))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


CLIENTS = tuple(Client(i, 1) for i in range(20))


@given(st.floats(0, 1), st.integers(0, 2**63 - 1), st.integers(1, 20))
def test_a_sample_is_a_set_of_the_right_size_in_order(fraction, seed, count):
    chosen = [c.id for c in sample_cohort(CLIENTS[:count], Phase("train", 1, fraction), seed)]
    assert len(chosen) == max(1, round(fraction * count))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(count))
    assert [
        c.id for c in sample_cohort(CLIENTS[:count], Phase("train", 1, fraction), seed)
    ] == chosen


def test_everyone_is_sampled_equally_often():
    hits = Counter(
        c.id for seed in range(2000) for c in sample_cohort(CLIENTS, Phase("train", 1, 0.25), seed)
    )
    # 5 of 20: mean 500, standard deviation 19.4; six of them, for twenty clients
    assert all(abs(hits[c.id] - 500) < 6 * 19.4 for c in CLIENTS)


@pytest.mark.parametrize(
    ("count", "fraction", "expected"), [(100, 0.1, 10), (7, 0.1, 1), (3, 1, 3)]
)
def test_the_cohort_is_the_papers(count, fraction, expected):
    """HeteroFL, Algorithm 1: M_t = max(C · M, 1)."""
    clients = tuple(Client(i, 1) for i in range(count))
    assert len(sample_cohort(clients, Phase("train", 1, fraction), 0)) == expected


@given(st.floats(0, 1), st.integers(1, 200))
def test_a_phase_knows_its_cohort_before_it_is_drawn(fraction, count):
    phase = Phase("train", 1, fraction)
    clients = tuple(Client(i, 1) for i in range(count))
    assert phase.cohort_size(count) == len(sample_cohort(clients, phase, 0))
    assert 1 <= phase.cohort_size(count) <= count
