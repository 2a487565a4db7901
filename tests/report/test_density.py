"""Densities: their area, their ends, and bells by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.report.density import counted, smoothed

PERCENTAGES = st.lists(st.floats(0, 100), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(PERCENTAGES)
def test_the_area_below_the_curve_is_one(values):
    curve = smoothed(values, points=801)
    assert [curve[0][0], curve[-1][0]] == [0, 100]
    steps = itertools.pairwise(curve)
    area = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in steps)
    assert area == pytest.approx(1, abs=1e-3)


def test_one_value_is_one_bell():
    """And values that do not differ are spread by one, as no spread cannot be drawn."""
    for values in ([40.0], [40.0] * 3):
        for x, y in smoothed(values):
            assert y == pytest.approx(math.exp(-((x - 40) ** 2) / 2) / math.sqrt(2 * math.pi))


def test_what_is_beyond_an_end_is_folded_back():
    at = dict(smoothed([0.0, 50.0], points=101))
    width = 100 / 5  # 1.06 · 25 · 2^(-1/5) would be more
    bell = [
        math.exp(-((x / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi)) for x in range(201)
    ]
    assert at[0.0] == pytest.approx((2 * bell[0] + bell[200] + 2 * bell[50] + bell[150]) / 2)
    assert at[30.0] == pytest.approx(
        (2 * bell[30] + bell[170] + bell[20] + bell[80] + bell[120]) / 2
    )


@given(PERCENTAGES, st.integers(1, 30))
def test_every_value_is_counted_once_and_where_it_belongs(values, bins):
    found = counted(values, bins=bins)
    assert (len(found), sum(found)) == (bins, len(values))
    for value in values:
        assert any(
            count and place * 100 / bins - 1e-9 <= value <= (place + 1) * 100 / bins + 1e-9
            for place, count in enumerate(found)
        )
