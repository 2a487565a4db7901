"""Densities: their area, their ends, and kernels by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.figures.density import estimate_density

PERCENTAGES = st.lists(st.floats(0, 100), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(PERCENTAGES)
def test_the_area_below_the_curve_is_one(values):
    x, y = estimate_density(values, points=801)
    assert [x[0], x[-1]] == [0, 100]
    steps = itertools.pairwise(zip(x, y, strict=True))
    area = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in steps)
    assert area == pytest.approx(1, abs=1e-3)


def test_one_value_is_one_kernel():
    """And so are equal values, whose bandwidth is the smallest."""
    for values in ([40.0], [40.0] * 3):
        for x, y in zip(*estimate_density(values), strict=True):
            assert y == pytest.approx(math.exp(-((x - 40) ** 2) / 2) / math.sqrt(2 * math.pi))


def test_kernels_are_reflected_at_the_ends():
    at = dict(zip(*estimate_density([0.0, 50.0], points=101), strict=True))
    width = 100 / 5  # 1.06 · 25 · 2^(-1/5) would be more
    bell = [
        math.exp(-((x / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi)) for x in range(201)
    ]
    assert at[0.0] == pytest.approx((2 * bell[0] + bell[200] + 2 * bell[50] + bell[150]) / 2)
    assert at[30.0] == pytest.approx(
        (2 * bell[30] + bell[170] + bell[20] + bell[80] + bell[120]) / 2
    )
