"""The report: data, pictures and one page."""

from __future__ import annotations

import json
import re

import pytest

from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.clients import ClientScore
from fedquilt.report import figures
from fedquilt.report.page import Story, write


def score(width: float, accuracy: float, dial: float | None = None, robust: float | None = None):
    return SizeScore(
        width, int(1000 * width), int(1e6 * width), 0.1, None, 0.5, 10, accuracy, dial, robust
    )


SCORES = [
    score(w, 0.9 * w - 0.1 * dial, dial, 0.2 * w + 0.3 * dial)
    for dial in (0.0, 1.0)
    for w in (1.0, 0.5)
]
CLIENTS = [ClientScore(i, "ab"[i % 2], 0.5, 3, 1e6 * i, 2e6, 0.1 * i) for i in range(4)]


def story(name: str) -> Story:
    return Story(
        name,
        {"seed": 3, "method": "<b>"},
        SCORES,
        [(1.0, SCORES[0]), (2.5, SCORES[0])],
        CLIENTS,
        {"a": 0.5, "b": 1.0},
    )


def test_curves_are_the_scores():
    by_width, by_params, _ = figures.by_width({"x": SCORES})
    assert by_width.curves["x"] == [(0.5, 45.0), (1.0, 90.0)]  # clean points, narrow first
    assert [x for x, _ in by_params.curves["x"]] == [500, 1000]
    (trade_off,) = figures.trade_off({"x": SCORES})
    assert trade_off.curves["x x1"] == [pytest.approx((90, 20)), pytest.approx((80, 50))]
    assert set(trade_off.curves) == {"x x1", "x x0.5"}
    assert figures.trade_off({"x": [score(1.0, 0.5)]}) == []
    assert figures.by_clock({"x": [(2.0, SCORES[0])]}).curves["x"] == [(2.0, 90.0)]


def test_bars_and_boxes_are_the_clients():
    bars = figures.by_group({"x": {"a": 0.5}, "y": {"a": 1.0, "b": 0.25}})
    assert bars.places == ("a", "b")
    assert bars.series == {"x": [50.0, 0.0], "y": [100.0, 25.0]}
    boxes = figures.by_client({"x": CLIENTS})
    assert boxes.panels["parameters a round (M)"]["x"] == [0, 1, 2, 3]
    assert boxes.panels["accuracy (%)"]["x"] == pytest.approx([0, 10, 20, 30])


def test_accuracy_is_that_of_users_where_it_is_known():
    assert figures.accuracy_of(score(1.0, 0.7)) == 0.7
    assert figures.accuracy_of(SizeScore(1, 1, 1, 0.4, None, None, 3)) == 0.4


def test_the_page_is_whole_and_the_data_beside_it(tmp_path):
    page = write(tmp_path / "out", [story("one"), story("two")])
    text = page.read_text()
    pictures = sorted(page.parent.glob("*.png"))
    assert len(pictures) == 7
    assert all(p.read_bytes()[:4] == b"\x89PNG" and p.stat().st_size > 5000 for p in pictures)
    assert len(re.findall(r'src="data:image/png;base64,', text)) == 7
    assert not re.search("https?:", text)  # nothing from elsewhere
    assert "&lt;b&gt;" in text  # names are escaped
    data = json.loads((page.parent / "report.json").read_text())
    assert data["two"]["shares"] == {"a": 0.5, "b": 1.0}
    assert data["one"]["scores"][0]["user_accuracy"] == 0.9


def test_what_is_not_known_is_left_out(tmp_path):
    page = write(tmp_path, [Story("bare", {}, [score(1.0, 0.5), score(0.5, 0.4)])])
    assert len(list(page.parent.glob("*.png"))) == 3  # against width, parameters and MACs
