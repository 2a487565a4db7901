"""Tables for people."""

import io

import pytest
from rich.console import Console

from fedquilt.report import tables

ROW = {"width": 0.5, "params": 391370, "macs": 10_107_904, "accuracy": 0.5, "num_examples": 10}


def shown(rows):
    console = Console(file=io.StringIO(), width=100)
    console.print(tables.make_size_table(rows))
    return console.file.getvalue()


def test_a_table_has_the_columns_that_rows_have():
    text = shown([ROW])
    assert "391,370" in text
    assert "10.11 M" in text
    assert "memory" not in text


LARGE = {
    "width": 0.0625,
    "robustness": 0.25,
    "share": 0.0039,
    "params": 123_456_789,
    "macs": 39_974_912_000,
    "bytes": 493_827_156,
    "memory": 12_345_678_901,
    "perplexity": 12_345.6,
    "accuracy": 1.0,
    "local_accuracy": 0.9838,
    "user_accuracy": 0.9739,
    "personal_accuracy": 0.91,
    "robust_accuracy": 0.5,
}


@pytest.mark.parametrize("left_out", [(), ("robustness", "robust_accuracy"), ("memory", "share")])
def test_a_wide_table_is_two_that_fit_eighty_columns(left_out):
    row = {name: value for name, value in LARGE.items() if name not in left_out}
    text = shown([row, row])
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("0.0625") == 4
    for name in tables.select_columns([row]):
        assert tables.list_columns([row])[name].format(row[name]) in text


def test_a_narrow_table_stays_one():
    names = ("width", "params", "macs", "bytes", "accuracy", "local_accuracy", "user_accuracy")
    text = shown([{name: LARGE[name] for name in names}])
    assert text.count("0.0625") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_local_accuracy_is_shown_only_where_it_says_something_else():
    assert "local" not in shown([{**ROW, "local_accuracy": 0.5}])
    assert "local" not in shown([{**ROW, "local_accuracy": None}])
    assert "75.0%" in shown([{**ROW, "local_accuracy": 0.75}])
    assert "local" in shown([{**ROW, "accuracy": None, "local_accuracy": 0.75}])


def test_robustness_is_shown_where_there_is_a_dial_or_an_attack():
    scores = {"robustness": None, "user_accuracy": None, "robust_accuracy": None, "bytes": 7}
    text = shown([{**ROW, **scores}])
    assert "robust" not in text
    assert "user" not in text
    assert "upload" in text
    dials = [{**ROW, **scores, "robustness": r, "user_accuracy": 0.4} for r in (0, 0.25)]
    text = shown(dials)
    assert "robustness" in text
    assert "0.25" in text
    assert "40.0%" in text
    attacked = shown([{**row, "robust_accuracy": 0.125} for row in dials])
    assert "12.5%" in attacked
    assert max(map(len, attacked.splitlines())) <= 80


def test_user_accuracy_is_shown_only_where_it_says_something_else():
    assert "user" not in shown([{**ROW, "user_accuracy": 0.5}])
    assert "user" in shown([{**ROW, "user_accuracy": 0.75}])


def test_domains_have_a_line_each_and_sizes_a_column():
    rows = [
        {**ROW, "width": w, "robustness": r, "group_accuracy": {"sea": w, "land": 0.9 - r}}
        for r in (0.0, 1.0)
        for w in (1.0, 0.25)
    ]
    head, lines = tables.make_domain_rows(rows)
    assert head == ["width", "1", "0.25"]
    assert lines == [["sea", "100.0%", "25.0%"], ["land", "90.0%", "90.0%"]]
    assert tables.make_domain_rows([{**ROW, "group_accuracy": None}, ROW])[1] == []


def test_perplexity_is_shown_where_there_is_one():
    assert "perplexity" not in shown([{**ROW, "perplexity": None}])
    text = shown([{**ROW, "perplexity": 1234.56}, {**ROW, "perplexity": None}])
    assert "1,234.6" in text
