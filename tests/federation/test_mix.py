"""Budgets dealt to clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import BudgetError
from fedquilt.federation.mix import LEVELS, deal, parse
from fedquilt.structure.budget import Budget


def widths(mix, count):
    return [budget.width for budget in deal(mix, count)]


def test_levels_are_dealt_by_proportion_in_blocks():
    assert widths("a1-e9", 10) == [1.0] + [0.0625] * 9
    assert widths("a1-e9", 100) == [1.0] * 10 + [0.0625] * 90
    assert widths("a-b-c-d-e", 10) == [w for w in (1, 0.5, 0.25, 0.125, 0.0625) for _ in range(2)]


def test_the_remainder_gets_the_last_level():
    assert widths("a-b-e", 8) == [1.0] * 2 + [0.5] * 2 + [0.0625] * 4
    assert widths("a-e", 1) == [0.0625]
    assert widths([1, 0.5, 0.25], 2) == [0.25, 0.25]


def test_a_level_with_part_zero_gets_nobody():
    assert widths("a0-b1", 4) == [0.5] * 4


def test_text_lists_budgets_and_limits_name_the_same_mixes():
    assert deal("1,0.5", 4) == deal([1, 0.5], 4) == deal([Budget(1.0), Budget(0.5)], 4)
    assert deal([{"params": 1000}, {"width": 0.5, "macs": 7}], 2) == [
        Budget(params=1000),
        Budget(0.5, macs=7),
    ]


@given(
    st.lists(st.tuples(st.sampled_from(sorted(LEVELS)), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 300),
)
def test_every_client_gets_a_budget_and_no_level_more_than_its_share_but_the_last(shares, count):
    text = "-".join(f"{level}{part}" for level, part in shares)
    dealt = widths(text, count)
    assert len(dealt) == count
    total, start = sum(part for _, part in shares), 0
    for level, part in shares[:-1]:
        block = count * part // total
        assert dealt[start : start + block] == [LEVELS[level]] * block
        start += block
    assert dealt[start:] == [LEVELS[shares[-1][0]]] * (count - start)


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ("a1-f9", "'f9'"),
        ("a-", "''"),
        ("A1", "'A1'"),
        ("a1.5-b2", "'a1.5'"),
        ("a0", "all 0"),
        ("a0-e0", "all 0"),
        ("", "got ''"),
        ("1,,2", "1,,2"),
        ("1;0.5", "1;0.5"),
        ("1,2", "got 2"),
        ("0", "got 0"),
        ("nan-1", "'nan'"),
        ([], "empty"),
        ([-1], "got -1"),
        ([{"colour": 3}], "colour"),
        ([{"params": 0}], "params"),
        ([float("nan")], "nan"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(mix, said):
    with pytest.raises(BudgetError, match=said):
        parse(mix)
