"""The report: data, pictures and one page."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace

import pytest

from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.architectures import (
    Architecture,
    ClientNet,
    Distance,
    Distances,
    mean_costs,
)
from fedquilt.evaluation.clients import ClientScore
from fedquilt.report import figures
from fedquilt.report.page import Story, write
from fedquilt.report.records import Milestone
from fedquilt.structure.budget import Budget


def score(width: float, accuracy: float, dial: float | None = None, robust: float | None = None):
    return SizeScore(
        width, int(1000 * width), int(1e6 * width), 0.1, None, 0.5, 10, accuracy, dial, robust
    )


SCORES = [
    score(w, 0.9 * w - 0.1 * dial, dial, 0.2 * w + 0.3 * dial)
    for dial in (0.0, 1.0)
    for w in (1.0, 0.5)
]
CLIENTS = [ClientScore(i, "ab"[i % 2], 0.5, 3, 1e6 * i, 4e6 * i, 2e6, 0.1 * i) for i in range(4)]
POOR, RICH = Budget(0.25), Budget(params=2_200_000, macs=88_000_000)


def milestone(sent: int, accuracy: float, own: float | None = None, phase: str = "train"):
    shown = replace(score(1.0, accuracy), personal_accuracy=own)
    return Milestone(1, phase, sent / 1e6, sent, shown)


def architecture(client: int, budget: Budget | None, *shares: float) -> Architecture:
    groups = {f"layer{i}": share for i, share in enumerate(shares)}
    return Architecture(
        client, budget, groups, groups, {g: round(8 * s) for g, s in groups.items()}
    )


NETS = [
    ClientNet(0, POOR, 1e6, 2e6, 4e6),
    ClientNet(1, RICH, 3e6, 6e6, 12e6),
    ClientNet(2, POOR, 2e6, 4e6, 8e6),
]
ARCHITECTURES = [
    architecture(0, POOR, 0.25, 0.5),
    architecture(1, RICH, 1.0, 0.75),
    architecture(2, POOR, 0.5, 0.125),
    architecture(3, RICH, 0.875, 1.0),
]


def story(name: str) -> Story:
    return Story(
        name,
        {"seed": 3, "method": "<b>"},
        SCORES,
        [milestone(1_000_000, 0.5), milestone(2_500_000, 0.9)],
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
    assert figures.by_clock({"x": [milestone(2_000_000, 0.9)]}).curves["x"] == [(2.0, 90.0)]


def test_bars_and_boxes_are_the_clients():
    bars = figures.by_group({"x": {"a": 0.5}, "y": {"a": 1.0, "b": 0.25}})
    assert bars.places == ("a", "b")
    assert bars.series == {"x": [50.0, 0.0], "y": [100.0, 25.0]}
    boxes = figures.by_client({"x": CLIENTS})
    assert boxes.panels["parameters a round (M)"]["x"] == [0, 1, 2, 3]
    assert boxes.panels["accuracy (%)"]["x"] == pytest.approx([0, 10, 20, 30])


def test_accuracy_against_bytes_has_a_curve_for_a_run_and_one_for_own_nets():
    runs = {
        "x": [milestone(1_000_000, 0.5), milestone(30_000_000, 0.75, 0.25)],
        "y": [milestone(2_000_000, 0.9)],
    }
    (picture,) = figures.by_traffic(runs)
    assert picture.curves == {
        "x": [(1.0, 50.0), (30.0, 75.0)],
        "x, own nets": [(30.0, 25.0)],
        "y": [(2.0, 90.0)],
    }
    assert picture.x.startswith("MB ")
    (large,) = figures.by_traffic({"x": [milestone(2_500_000_000, 0.5)]})
    assert (large.x[:2], large.curves["x"]) == ("GB", [(2.5, 50.0)])
    assert figures.by_traffic({"x": []}) == []


def test_runs_are_told_by_what_it_took_to_reach_what_all_reach():
    early = [milestone(1_000_000, 0.99, phase="warm-up")]  # of a net that is trained no further
    slow = [*early, milestone(4_000_000, 0.5), milestone(8_000_000, 0.8), milestone(9_000_000, 0.7)]
    fast = [milestone(2_000_000, 0.6), milestone(3_000_000, 0.85), milestone(5_000_000, 0.95)]
    (picture,) = figures.by_traffic({"slow": slow, "fast": fast})
    assert picture.caption == "To reach 80.0%, as all do: slow 8.00 MB, fast 3.00 MB."
    assert figures.by_traffic({"slow": slow})[0].caption == ""  # nothing to compare with
    assert figures.by_traffic({"slow": slow, "silent": []})[0].caption == ""


def test_a_grid_has_clients_of_a_budget_side_by_side():
    apart = Distances(Distance(2, 1234.56, 0.256), Distance(6, 7.0, 1.5))
    (grid,) = figures.by_layer("x", ARCHITECTURES, apart)
    assert grid.rows == ("layer0", "layer1")
    assert grid.columns == ("1", "3", "0", "2")  # the rich come first
    assert grid.values == [[100.0, 87.5, 25.0, 50.0], [75.0, 100.0, 50.0, 12.5]]
    assert grid.bands == [("2.2 M params\n88 M MACs", 2), ("width 0.25", 2)]
    assert grid.caption == (
        "Mean L2 distance between two clients' architectures: 1,234.6 channels, or 0.26 in shares "
        "of layers, over pairs of the same budget (2); 7.0 channels, or 1.50 in shares of layers, "
        "over all pairs (6)."
    )


def test_a_grid_without_budgets_has_clients_in_their_order():
    unknown = [replace(net, budget=None) for net in ARCHITECTURES]
    (grid,) = figures.by_layer("x", unknown, Distances(None, Distance(6, 7.0, 1.5)))
    assert grid.columns == ("0", "1", "2", "3")
    assert "budget" not in grid.caption
    others = [replace(net, budget=Budget(0.1 + 0.2 * net.client)) for net in ARCHITECTURES]
    (grid,) = figures.by_layer("x", others, None)
    assert (grid.columns, grid.bands, grid.caption) == (("3", "2", "1", "0"), (), "")
    assert figures.by_layer("x", [], None) == []


def test_bars_of_costs_are_means_over_all_and_over_every_budget():
    uniform = [replace(net, params=1.5e6, bytes=6e6) for net in NETS[:1]]
    params, macs, upload = figures.by_cost({"x": NETS, "y": uniform, "nobody": []})
    assert params.places == macs.places == ("all clients", "2.2 M params\n88 M MACs", "width 0.25")
    assert params.series == {"x": [2.0, 3.0, 1.5], "y": [1.5, 0.0, 1.5]}
    assert macs.series == {"x": [4.0, 6.0, 3.0], "y": [2.0, 0.0, 2.0]}
    assert upload.series == {"x": [8.0, 12.0, 6.0], "y": [6.0, 0.0, 6.0]}
    assert upload.caption == "In the mean over clients: x 8.00 MB, y 6.00 MB."
    assert figures.by_cost({"x": NETS[:1]})[0].places == ("all clients",)
    assert figures.by_cost({"x": []}) == []


def size_of(path) -> tuple[int, int]:
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def test_a_grid_grows_with_what_it_shows(tmp_path):
    def drawn(clients: int, groups: int) -> tuple[int, int]:
        nets = [architecture(i, POOR, *[0.5] * groups) for i in range(clients)]
        (grid,) = figures.by_layer("x", nets, None)
        figures.draw(grid, tmp_path / "grid.png")
        return size_of(tmp_path / "grid.png")

    for count in (50, 120):  # a label every 12 pixels at least, beside those of the other axis
        width, height = drawn(clients=count, groups=count)
        assert width > 12 * count + 200
        assert height > 12 * count + 100


def test_the_page_is_whole_and_the_data_beside_it(tmp_path):
    page = write(tmp_path / "out", [story("one"), story("two")])
    text = page.read_text()
    pictures = sorted(page.parent.glob("*.png"))
    assert len(pictures) == 8
    assert all(p.read_bytes()[:4] == b"\x89PNG" and p.stat().st_size > 5000 for p in pictures)
    assert len(re.findall(r'src="data:image/png;base64,', text)) == 8
    assert not re.search("https?:", text)  # nothing from elsewhere
    assert "&lt;b&gt;" in text  # names are escaped
    data = json.loads((page.parent / "report.json").read_text())
    assert data["two"]["shares"] == {"a": 0.5, "b": 1.0}
    assert data["one"]["scores"][0]["user_accuracy"] == 0.9


def test_what_is_not_known_is_left_out(tmp_path):
    page = write(tmp_path, [Story("bare", {}, [score(1.0, 0.5), score(0.5, 0.4)])])
    assert len(list(page.parent.glob("*.png"))) == 3  # against width, parameters and MACs


def test_own_nets_are_drawn_with_their_distances_below(tmp_path):
    apart = Distances(None, Distance(6, 7.0, 1.5))
    told = replace(
        story("x < y"),
        architectures=ARCHITECTURES,
        distances=apart,
        nets=NETS,
        mean_costs=mean_costs(NETS),
    )
    page = write(tmp_path, [told, story("other")])
    names = {p.name.partition("-")[2] for p in tmp_path.glob("*.png")}
    assert {"architectures-of-x-y.png", "parameters-of-clients-nets.png"} < names
    assert len(names) == 8 + 3 + 1
    text = page.read_text()
    after = text[text.index('alt="Architectures of x &lt; y"') :]
    assert re.search(r'">\n<p>Mean L2 distance .* 7\.0 channels.*</p>', after)
    data = json.loads((tmp_path / "report.json").read_text())
    found = data["x < y"]
    assert found["architectures"][1]["groups"] == {"layer0": 1.0, "layer1": 0.75}
    assert found["architectures"][1]["channels"] == {"layer0": 8, "layer1": 6}
    assert found["distances"]["all_pairs"] == {"pairs": 6, "channels": 7.0, "ratios": 1.5}
    assert found["nets"][1]["budget"]["macs"] == 88_000_000
    assert found["mean_costs"] == {"params": 2e6, "macs": 4e6, "bytes": 8e6}
    assert [m["bytes"] for m in data["other"]["progress"]] == [1_000_000, 2_500_000]
    assert data["other"]["architectures"] == data["other"]["nets"] == []
