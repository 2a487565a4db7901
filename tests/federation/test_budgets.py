"""Budgets dealt to clients."""

from __future__ import annotations

import math
from collections import Counter
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import BudgetError
from fedquilt.federation.budgets import LEVELS, assign_budgets, parse_budgets
from fedquilt.settings.load import load_config
from fedquilt.settings.toml import dump_toml, read_toml
from fedquilt.structure.budget import Budget


def widths(mix, count):
    return [budget.width for budget in assign_budgets(mix, count)]


def test_levels_are_dealt_by_proportion_in_blocks():
    assert widths("a1-e9", 10) == [1.0] + [0.0625] * 9
    assert widths("a1-e9", 100) == [1.0] * 10 + [0.0625] * 90
    assert widths("a-b-c-d-e", 10) == [w for w in (1, 0.5, 0.25, 0.125, 0.0625) for _ in range(2)]


def test_numbers_that_do_not_divide_go_to_the_largest_remainders():
    assert widths("a-b-e", 8) == [1.0] * 3 + [0.5] * 3 + [0.0625] * 2  # all are 8/3
    assert widths("a1-e9", 12) == [1.0] + [0.0625] * 11  # 1.2 and 10.8
    assert widths("a3-e4", 5) == [1.0] * 2 + [0.0625] * 3  # 2.14 and 2.86
    assert widths("e4-a3", 5) == [0.0625] * 3 + [1.0] * 2


def test_with_fewer_clients_than_sizes_the_largest_are_there():
    five = (1.0, 0.5, 0.25, 0.125, 0.0625)
    assert [widths(five, n) for n in range(1, 5)] == [list(five[:n]) for n in range(1, 5)]
    assert widths(five[::-1], 3) == [0.25, 0.5, 1.0]
    assert widths(five, 7) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125, 0.0625]
    assert widths("a1-e9", 3) == [1.0, 0.0625, 0.0625]  # 0.3 and 2.7
    assert widths("8-4-2-1", 3) == [1 / 4, 1 / 2, 1.0]


def test_of_physical_limits_the_larger_is_the_larger_budget():
    tiers = [{"params": 2}, {"params": 9}, {"width": 0.5}]
    assert assign_budgets(tiers, 1) == [Budget(params=9)]
    assert assign_budgets(tiers, 2) == [Budget(params=2), Budget(params=9)]


def test_a_level_with_part_zero_gets_nobody():
    assert widths("a0-b1", 4) == [0.5] * 4


def test_text_lists_budgets_and_limits_name_the_same_mixes():
    assert (
        assign_budgets("1,0.5", 4)
        == assign_budgets([1, 0.5], 4)
        == assign_budgets([Budget(1.0), Budget(0.5)], 4)
    )
    assert assign_budgets([{"params": 1000}, {"width": 0.5, "macs": 7}], 2) == [
        Budget(params=1000),
        Budget(0.5, macs=7),
    ]


# limits with parts


def test_limits_are_dealt_by_their_parts_in_their_order():
    mix = [{"params": 9, "part": 1}, {"params": 5, "part": 3}, {"params": 2, "part": 6}]
    assert [b.params for b in assign_budgets(mix, 10)] == [9] + [5] * 3 + [2] * 6
    assert [b.params for b in assign_budgets(mix, 20)] == [9] * 2 + [5] * 6 + [2] * 12
    assert [b.params for b in assign_budgets(mix[::-1], 10)] == [2] * 6 + [5] * 3 + [9]


def test_whatever_names_no_part_has_one():
    mix = [0.5, Budget(0.25), {"width": 0.125}, {"width": 1, "part": 2}]
    assert widths(mix, 10) == [0.5] * 2 + [0.25] * 2 + [0.125] * 2 + [1] * 4


def test_a_part_of_zero_gets_nobody_and_a_part_alone_limits_nothing():
    assert assign_budgets([{"params": 9, "part": 0}, {"part": 3}], 4) == [Budget()] * 4


@given(st.lists(st.tuples(st.sampled_from(sorted(LEVELS)), st.integers(1, 9)), min_size=1))
def test_parts_of_limits_and_of_levels_mean_the_same(shares):
    text = "-".join(f"{level}{part}" for level, part in shares)
    assert parse_budgets(
        [{"width": LEVELS[level], "part": part} for level, part in shares]
    ) == parse_budgets(text)


def test_limits_are_counts_also_where_they_are_given_as_floats():
    given = {"width": 0.5, "params": 2.2e6, "macs": 88e6, "memory": 1e9, "upload": 7.9}
    (budget,) = assign_budgets([given], 1)
    assert budget == Budget(0.5, 2_200_000, 88_000_000, 1_000_000_000, 7)
    counts = (budget.params, budget.macs, budget.memory, budget.upload)
    assert {type(count) for count in counts} == {int}
    assert {type(part) for _, part in parse_budgets([{"part": 5.0}]).fractions} == {int}


def test_parts_survive_a_config_file(tmp_path):
    tiers = [{"macs": 88e6, "params": 2.2e6, "part": 3}, {"width": 0.5}]
    config = load_config({"data": {"budgets": tiers}})
    (tmp_path / "config.toml").write_text(dump_toml(config))
    again = load_config(read_toml(tmp_path / "config.toml"))
    assert again == config
    whole = Budget(params=2_200_000, macs=88_000_000)
    assert assign_budgets(again.data.budgets, 4) == [whole] * 3 + [Budget(0.5)]


@pytest.mark.parametrize(
    ("name", "counts"), [("high-capacity", (5, 3, 2)), ("low-capacity", (2, 3, 5))]
)
def test_apfls_capacities_are_those_of_its_table(name, counts):
    limits = [(88_000_000, 2_200_000), (59_000_000, 1_300_000), (28_000_000, 700_000)]
    tiers = [Budget(macs=macs, params=params) for macs, params in limits]
    for times in (1, 2, 10):
        blocks = zip(tiers, counts, strict=True)
        expected = [tier for tier, count in blocks for _ in range(times * count)]
        assert assign_budgets(name, 10 * times) == expected


SHARES = st.lists(
    st.tuples(st.sampled_from(sorted(LEVELS)), st.integers(0, 9)), min_size=1, max_size=6
).filter(lambda shares: any(part for _, part in shares))


@given(SHARES, st.integers(1, 300))
def test_every_size_gets_its_proportion_and_the_largest_somebody(shares, count):
    # a width that is a little narrower in every share, to tell their blocks apart
    marked = [(LEVELS[level] * (1 - i / 1000), part) for i, (level, part) in enumerate(shares)]
    dealt = widths([{"width": width, "part": part} for width, part in marked], count)
    assert len(dealt) == count
    total = sum(part for _, part in marked)
    blocks = [dealt.count(width) for width, _ in marked]
    for block, (_, part) in zip(blocks, marked, strict=True):
        assert abs(block - count * part / total) < 1
        assert block == 0 or part > 0
        assert block * total == count * part or count * part % total  # exact where they divide
    assert dealt == [w for (w, _), n in zip(marked, blocks, strict=True) for _ in range(n)]
    assert max(width for width, part in marked if part) in dealt


@given(SHARES, st.integers(1, 300), st.randoms())
def test_the_order_of_shares_is_that_of_their_blocks_and_nothing_else(shares, count, random):
    levels = {level: part for level, part in shares if part}
    mix = [{"width": LEVELS[level], "part": part} for level, part in levels.items()]
    other = random.sample(mix, len(mix))
    assert Counter(widths(mix, count)) == Counter(widths(other, count))


@given(SHARES, st.integers(1, 300))
def test_no_larger_remainder_goes_without(shares, count):
    levels = {level: part for level, part in shares if part}
    dealt = Counter(widths([{"width": LEVELS[w], "part": p} for w, p in levels.items()], count))
    total, largest = sum(levels.values()), min(levels)  # a is the largest
    rest = {level: count * part % total for level, part in levels.items()}
    got = {level for level, part in levels.items() if dealt[LEVELS[level]] > count * part // total}
    for level in got - {largest}:
        for other in levels.keys() - got:
            assert (rest[level], LEVELS[level]) > (rest[other], LEVELS[other])


# Split-Mix


def test_divisors_are_widths_in_ascending_blocks():
    assert widths("8-4-2-1", 50) == [1 / 8] * 13 + [1 / 4] * 12 + [1 / 2] * 13 + [1.0] * 12
    assert widths("8-4-2-1", 30) == [1 / 8] * 8 + [1 / 4] * 7 + [1 / 2] * 8 + [1.0] * 7
    assert widths("1-2-4-8", 50) == widths("8-4-2-1", 50)


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ("8-1-1-1", [1 / 8, 1, 1, 1]),
        ("8-2-1-1", [1 / 8, 1 / 2, 1, 1]),
        ("8-2-2-1", [1 / 8, 1 / 2, 1 / 2, 1]),
        ("8-4-4-1", [1 / 8, 1 / 4, 1 / 4, 1]),
        ("8-4-8d3-2", [1 / 8, 1 / 4, 3 / 8, 1 / 2]),
        ("4-2-4d3-1", [1 / 4, 1 / 2, 3 / 4, 1]),
        ("16-1", [1 / 16, 1]),
    ],
)
def test_the_published_mixes_of_divisors(mix, expected):
    assert widths(mix, len(expected)) == expected
    assert widths(mix, 3 * len(expected)) == [w for w in expected for _ in range(3)]


@given(st.lists(st.integers(1, 16), min_size=2, max_size=6), st.integers(6, 120))
def test_a_client_gets_the_step_that_its_number_reaches(divisors, count):
    steps = sorted(1 / divisor for divisor in divisors)
    expected = [steps[math.floor(len(steps) * i / count)] for i in range(count)]
    assert widths("-".join(map(str, divisors)), count) == expected


def test_a_number_alone_and_an_exponent_are_widths():
    assert widths("1", 2) == [1, 1]
    assert widths("1e-3", 2) == [1e-3, 1e-3]
    with pytest.raises(BudgetError, match="got 8"):
        parse_budgets("8")


def test_log_normal_widths_of_fifty_clients():
    dealt = widths("ln0.5_0.4", 50)
    assert dealt == sorted(dealt)
    assert [Counter(dealt)[k / 8] for k in range(1, 9)] == [9, 13, 12, 7, 4, 2, 1, 2]
    # before they are cut down to the grid, they concentrate around 0.45
    drawn = [0.4 * math.exp(0.5 * NormalDist().inv_cdf((i + 0.5) / 50)) for i in range(50)]
    assert sum(drawn) / 50 == pytest.approx(0.45, abs=0.01)
    assert dealt == [min(max(math.floor(8 * w), 1), 8) / 8 for w in drawn]


@given(st.floats(0.01, 50), st.floats(0.01, 20), st.integers(1, 200))
def test_log_normal_widths_are_the_quantiles_cut_down_to_the_grid(spread, median, count):
    dealt = widths(f"ln{spread:.4f}_{median:.4f}", count)
    spread, median = round(spread, 4), round(median, 4)
    for i, width in enumerate(dealt):
        log = math.log(median) + spread * NormalDist().inv_cdf((i + 0.5) / count)
        assert width in [k / 8 for k in range(1, 9)]
        assert width == 1 / 8 or math.log(width) <= log + 1e-6
        assert width == 1 or log - 1e-6 <= math.log(width + 1 / 8)


def test_the_median_client_gets_the_median_where_it_is_on_the_grid():
    for eighths in range(1, 9):
        assert widths(f"ln0.7_{eighths / 8}", 21)[10] == eighths / 8


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
        ("8-0", "got '0'; write 8 for 1/8"),
        ("8-8d0", "got '8d0'"),
        ("8-8d9", r"in \(0, 1\], got '8d9'"),
        ("8d3", "divisors like 8-4-2-1, got '8d3'"),
        ("8-4-x", "got '8-4-x'"),
        ("8-", "got '8-'"),
        ("0.5-0.25", "got '0.5-0.25'"),
        ("ln", "write for example ln0.5_0.4"),
        ("ln0.5", "got 'ln0.5'"),
        ("ln0_0.4", "both above 0, got 'ln0_0.4'"),
        ("ln0.5_0", "both above 0"),
        ("lninf_1", "got 'lninf_1'"),
        ([], "empty"),
        ([-1], "got -1"),
        ([{"colour": 3}], "colour"),
        ([{"params": 0}], "params"),
        ([{"params": 0.5}], "params is a number from 1 on, got 0.5; leave it out"),
        ([{"macs": -3.0}], "macs is .* got -3.0"),
        ([{"memory": float("inf")}], "memory is .* got inf"),
        ([{"upload": float("nan")}], "upload is .* got nan"),
        ([{"macs": "many"}], "by a number, .* got .*'many'"),
        ([{"parts": 3}], "may have a part, got .*'parts'.*; write for example"),
        ([{"part": 0.5}], "whole number, got 0.5; write 5, 3 and 2"),
        ([{"part": -1}], "whole number, got -1"),
        ([{"part": float("nan")}], "whole number, got nan"),
        ([{"part": float("inf")}], "whole number, got inf"),
        ([{"part": 0}, {"part": 0.0}], "all 0; give at least one"),
        ([{"width": 2.0, "part": 2}], "got 2.0"),
        ("high", "'high' .* high-capacity or low-capacity"),
        ("low-capacity-1", "'low' .* high-capacity or low-capacity"),
        ("1,high", "high-capacity, low-capacity or divisors .* got '1,high'"),
        ([float("nan")], "nan"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(mix, said):
    with pytest.raises(BudgetError, match=said):
        parse_budgets(mix)
