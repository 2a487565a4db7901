"""The report: data, pictures and one page."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from matplotlib import cbook

from fedquilt.evaluation.architectures import (
    Architecture,
    ClientNet,
    Compression,
    Distance,
    Distances,
    KeepRate,
    LayerCost,
    compute_mean_costs,
)
from fedquilt.evaluation.clients import ClientScore
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.targets import TargetResult
from fedquilt.figures import drawing
from fedquilt.figures import figure as figures
from fedquilt.report import score_plots, subnet_plots
from fedquilt.report.page import RunReport, write_page
from fedquilt.report.records import LocalTest, Milestone
from fedquilt.structure.budget import Budget


def score(width: float, accuracy: float, dial: float | None = None, robust: float | None = None):
    return SizeScore(
        width, int(1000 * width), int(1e6 * width), None, None, 0.5, 10, accuracy, dial, robust
    )


SCORES = [
    score(w, 0.9 * w - 0.1 * dial, dial, 0.2 * w + 0.3 * dial)
    for dial in (0.0, 1.0)
    for w in (1.0, 0.5)
]
CLIENTS = [
    ClientScore(i, "ab"[i % 2], 0.5, 3, 1e6 * i, 4e6 * i, 3e6, 2e6, 0.1 * i) for i in range(4)
]
POOR, RICH = Budget(0.25), Budget(params=2_200_000, macs=88_000_000)


def milestone(sent: int, accuracy: float, own: float | None = None, phase: str = "train"):
    shown = replace(score(1.0, accuracy), personal_value=own)
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


def story(name: str) -> RunReport:
    return RunReport(
        name,
        {"seed": 3, "method": "<b>"},
        SCORES,
        [milestone(1_000_000, 0.5), milestone(2_500_000, 0.9)],
        CLIENTS,
        {"a": 0.5, "b": 1.0},
    )


def test_curves_are_the_scores():
    by_params, _, by_width = score_plots.plot_by_size({"x": SCORES})
    assert by_width.curves["x"] == [(0.5, 45.0), (1.0, 90.0)]  # clean points, narrow first
    assert (by_width.x, by_width.y) == ("width", "user accuracy (%)")
    assert [x for x, _ in by_params.curves["x"]] == [500, 1000]
    (trade_off,) = score_plots.plot_trade_off({"x": SCORES})
    assert trade_off.curves["x x1"] == [pytest.approx((90, 20)), pytest.approx((80, 50))]
    assert set(trade_off.curves) == {"x x1", "x x0.5"}
    assert score_plots.plot_trade_off({"x": [score(1.0, 0.5)]}) == []
    assert score_plots.plot_by_time({"x": [milestone(2_000_000, 0.9)]}).curves["x"] == [(2.0, 90.0)]


def test_curves_of_a_picture_are_of_one_score_and_the_axis_says_which():
    held_out = [replace(s, value=0.2) for s in SCORES]
    curves = {"x": SCORES, "y": held_out}
    assert {picture.y for picture in score_plots.plot_by_size(curves)} == {"user accuracy (%)"}
    assert {picture.y for picture in score_plots.plot_by_size({"y": held_out})} == {"accuracy (%)"}
    (first, *_) = score_plots.plot_by_size({"y": held_out})
    assert {y for _, y in first.curves["y"]} == {20.0}


def test_sizes_that_mean_different_things_are_compared_by_parameters_alone():
    assert [p.x for p in score_plots.plot_by_size({"x": SCORES}, {"γ"})][-1] == "γ"
    several = score_plots.plot_by_size({"x": SCORES, "y": SCORES}, {"width", "γ"})
    assert [p.x for p in several] == ["parameters", "MACs, one example"]


def test_a_page_says_what_sizes_are_what_is_summed_up_and_who_went_beyond_its_budget(tmp_path):
    held_out = [score(1.0, 0.5), score(0.5, 0.25)]
    told = RunReport("deep", {}, [replace(s, value=0.75) for s in held_out], size_kind="parameters")
    told = replace(told, exceeds_budgets="ignores budgets: <all>")
    page = write_page(tmp_path, [told]).read_text()
    for words in (
        '<th scope="col">γ</th>',
        "γ: the fraction of the full model&#39;s parameters",
        "user accuracy: on each client&#39;s own test data, mean over clients",
        "worst 75.0%, mean 75.0%: accuracy over sizes",
        "ignores budgets: &lt;all&gt;",
    ):
        assert words in page


def test_bars_and_boxes_are_the_clients():
    bars = score_plots.plot_by_group({"x": {"a": 0.5}, "y": {"a": 1.0, "b": 0.25}})
    assert bars.labels == ("a", "b")
    assert bars.series == {"x": [50.0, 0.0], "y": [100.0, 25.0]}
    boxes = score_plots.plot_by_client({"x": CLIENTS})
    assert boxes.panels["parameters a round (M)"]["x"] == [0, 1, 2, 3]
    assert boxes.panels["accuracy (%)"]["x"] == pytest.approx([0, 10, 20, 30])


def test_accuracy_against_bytes_has_a_curve_for_a_run_and_one_for_own_nets():
    runs = {
        "x": [milestone(1_000_000, 0.5), milestone(30_000_000, 0.75, 0.25)],
        "y": [milestone(2_000_000, 0.9)],
    }
    (picture,) = score_plots.plot_by_traffic(runs)
    assert picture.curves == {
        "x": [(1.0, 50.0), (30.0, 75.0)],
        "x, personal": [(30.0, 25.0)],
        "y": [(2.0, 90.0)],
    }
    assert picture.x.startswith("MB ")
    (large,) = score_plots.plot_by_traffic({"x": [milestone(2_500_000_000, 0.5)]})
    assert (large.x[:2], large.curves["x"]) == ("GB", [(2.5, 50.0)])
    assert score_plots.plot_by_traffic({"x": []}) == []


def test_runs_are_told_by_what_it_took_to_reach_what_all_reach():
    early = [milestone(1_000_000, 0.99, phase="warm-up")]  # of a net that is trained no further
    slow = [*early, milestone(4_000_000, 0.5), milestone(8_000_000, 0.8), milestone(9_000_000, 0.7)]
    fast = [milestone(2_000_000, 0.6), milestone(3_000_000, 0.85), milestone(5_000_000, 0.95)]
    (picture,) = score_plots.plot_by_traffic({"slow": slow, "fast": fast})
    assert picture.caption == "To reach 80.0%, as all do: slow 8.00 MB, fast 3.00 MB."
    assert score_plots.plot_by_traffic({"slow": slow})[0].caption == ""  # nothing to compare with
    assert score_plots.plot_by_traffic({"slow": slow, "silent": []})[0].caption == ""


def test_a_grid_has_clients_of_a_budget_side_by_side():
    apart = Distances(Distance(2, 1234.56, 0.256), Distance(6, 7.0, 1.5))
    (grid,) = subnet_plots.plot_by_layer("x", ARCHITECTURES, apart)
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
    (grid,) = subnet_plots.plot_by_layer("x", unknown, Distances(None, Distance(6, 7.0, 1.5)))
    assert grid.columns == ("0", "1", "2", "3")
    assert "budget" not in grid.caption
    others = [replace(net, budget=Budget(0.1 + 0.2 * net.client)) for net in ARCHITECTURES]
    (grid,) = subnet_plots.plot_by_layer("x", others, None)
    assert (grid.columns, grid.bands, grid.caption) == (("3", "2", "1", "0"), (), "")
    assert subnet_plots.plot_by_layer("x", [], None) == []
    whole = [architecture(i, POOR, 1.0, 1.0) for i in range(3)]  # nothing to be seen
    assert subnet_plots.plot_by_layer("x", whole, None) == []


def test_bars_of_costs_are_means_over_all_and_over_every_budget():
    uniform = [replace(net, params=1.5e6, bytes=6e6) for net in NETS[:1]]
    params, macs, upload = subnet_plots.plot_by_cost({"x": NETS, "y": uniform, "nobody": []})
    assert params.labels == macs.labels == ("all clients", "2.2 M params\n88 M MACs", "width 0.25")
    assert params.series == {"x": [2.0, 3.0, 1.5], "y": [1.5, 0.0, 1.5]}
    assert macs.series == {"x": [4.0, 6.0, 3.0], "y": [2.0, 0.0, 2.0]}
    assert upload.series == {"x": [8.0, 12.0, 6.0], "y": [6.0, 0.0, 6.0]}
    assert upload.caption == "In the mean over clients: x 8.00 MB, y 6.00 MB."
    assert subnet_plots.plot_by_cost({"x": NETS[:1]})[0].labels == ("all clients",)
    assert subnet_plots.plot_by_cost({"x": []}) == []


def test_accuracy_against_rounds_has_a_picture_of_own_models_where_they_were_tested():
    def at(round: int, accuracy: float | None, user: float | None = None) -> Milestone:
        shown = replace(score(1.0, 0.9), value=accuracy, user_value=user)
        return Milestone(round, "train", 0.0, 0, shown)

    runs = {"x": [at(2, 0.25, 0.75), at(4, 0.5)], "y": [at(3, None, 0.125), at(4, None)]}
    local = {"x": [LocalTest(1, "train", 0.75, 3), LocalTest(2, "train", 0.875, 3)], "y": []}
    shared, own = score_plots.plot_by_round(runs, local)
    assert shared.curves == {"x": [(2, 25.0), (4, 50.0)], "y": [(3, 12.5)]}  # of held-out data
    assert own.curves == {"x": [(1, 75.0), (2, 87.5)], "y": []}
    assert score_plots.plot_by_round(runs, {"x": [], "y": []}) == [shared]
    assert score_plots.plot_by_round({"x": []}, {}) == []


def test_accuracies_of_own_models_are_told_one_by_one_and_in_the_mean():
    (picture,) = score_plots.plot_density({"x": {0: 0.25, 7: 0.75, 3: 0.5}, "y": {1: 1.0}, "z": {}})
    assert picture.values == {"x": [25.0, 75.0, 50.0], "y": [100.0]}
    assert picture.caption.endswith(": x 50.0% ± 20.4%, y 100.0% ± 0.0%.")
    assert score_plots.plot_density({"x": {}}) == []


RATES = [KeepRate("conv", 8, 0.75, 0.125), KeepRate("hidden", 100, 0.5, 0.0)]
LAYERS = [LayerCost("conv", 100, 50.0, 4000, 1000.0), LayerCost("out", 900, 90.0, 2000, 500.0)]


def test_rates_have_bars_with_their_spread():
    (bars,) = subnet_plots.plot_keep_rates("x", RATES)
    assert bars.labels == ("conv", "hidden")
    assert list(bars.series.values()) == [[75.0, 50.0]]
    assert bars.series.keys() == bars.spread.keys()
    assert list(bars.spread.values()) == [[12.5, 0.0]]
    assert (
        subnet_plots.plot_keep_rates("x", [])
        == subnet_plots.plot_keep_rates("x", [KeepRate("conv", 8, 1.0, 0.0)])
        == []
    )


def test_layers_have_bars_of_the_supernet_and_of_clients_nets():
    params, macs = subnet_plots.plot_layer_costs("x", LAYERS)
    assert params.labels == macs.labels == ("conv", "out")
    assert [*params.series.values()] == [[1e-4, 9e-4], [5e-5, 9e-5]]
    assert [*macs.series.values()] == [[4e-3, 2e-3], [1e-3, 5e-4]]
    assert params.caption == "All together: 140 of 1.00 k."
    assert macs.caption == "All together: 1.50 k of 6.00 k."
    whole = [LayerCost("conv", 100, 100.0, 4000, 4000.0)]
    assert subnet_plots.plot_layer_costs("x", []) == subnet_plots.plot_layer_costs("x", whole) == []


SMALL = [Compression(0, 0.5, 0.25), Compression(1, 0.25, 0.5), Compression(2, 0.125, 0.75)]


def test_compression_against_divergence_has_a_point_for_a_client_and_its_correlation():
    uniform = [Compression(0, 1.0, 0.25), Compression(1, 1.0, 0.5)]
    (points,) = subnet_plots.plot_by_divergence({"x": SMALL, "whole": uniform, "nobody": []})
    assert points.curves == {"x": [(0.25, 50.0), (0.5, 25.0), (0.75, 12.5)]}
    assert not points.is_joined
    assert points.caption == "Correlation: x -0.98 over 3 clients."
    assert subnet_plots.plot_by_divergence({"whole": uniform, "nobody": []}) == []


def test_bars_of_many_places_grow(tmp_path):
    def drawn(count: int) -> int:
        rates = [KeepRate(f"group {i}", 8, 0.5, 0.1) for i in range(count)]
        (bars,) = subnet_plots.plot_keep_rates("x", rates)
        drawing.draw_figure(bars, tmp_path / "bars.png")
        return size_of(tmp_path / "bars.png")[0]

    few, many = drawn(8), drawn(60)
    assert few < 60 * 20 < many  # pixels for a name that stands upright


def size_of(path) -> tuple[int, int]:
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def test_a_grid_grows_with_what_it_shows(tmp_path):
    def drawn(clients: int, groups: int) -> tuple[int, int]:
        nets = [architecture(i, POOR, *[0.5] * groups) for i in range(clients)]
        (grid,) = subnet_plots.plot_by_layer("x", nets, None)
        drawing.draw_figure(grid, tmp_path / "grid.png")
        return size_of(tmp_path / "grid.png")

    for count in (50, 120):  # a label every 12 pixels at least, beside those of the other axis
        width, height = drawn(clients=count, groups=count)
        assert width > 12 * count + 200
        assert height > 12 * count + 100


def figures_of(text: str) -> list[dict]:
    """The figures that the page draws, as data."""
    data = text.partition('id="figure-data">')[2].partition("</script>")[0]
    return json.loads(data)


def page_slug(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def test_the_page_is_whole_and_the_data_beside_it(tmp_path):
    page = write_page(tmp_path / "out", [story("one"), story("two")])
    text = page.read_text()
    pictures = sorted(page.parent.glob("*.png"))
    assert len(pictures) == 9
    assert all(p.read_bytes()[:4] == b"\x89PNG" and p.stat().st_size > 5000 for p in pictures)
    drawn = figures_of(text)
    assert len(drawn) == 9
    assert [p.name[3:-4] for p in pictures] == [page_slug(f["title"]) for f in drawn]
    assert not re.search("https?:", text)  # nothing from elsewhere
    assert "&lt;b&gt;" in text  # names are escaped
    data = json.loads((page.parent / "report.json").read_text())
    assert data["two"]["shares"] == {"a": 0.5, "b": 1.0}
    assert data["one"]["scores"][0]["user_accuracy"] == 0.9


def test_what_is_not_known_is_left_out(tmp_path):
    page = write_page(tmp_path, [RunReport("bare", {}, [score(1.0, 0.5), score(0.5, 0.4)])])
    assert len(list(page.parent.glob("*.png"))) == 3  # against width, parameters and MACs


def test_own_nets_are_drawn_with_their_distances_below(tmp_path):
    apart = Distances(None, Distance(6, 7.0, 1.5))
    told = replace(
        story("x < y"),
        architectures=ARCHITECTURES,
        distances=apart,
        nets=NETS,
        mean_costs=compute_mean_costs(NETS),
    )
    page = write_page(tmp_path, [told, story("other")])
    names = {p.name.partition("-")[2] for p in tmp_path.glob("*.png")}
    assert {"architectures-of-x-y.png", "parameters-of-clients-nets.png"} < names
    assert len(names) == 9 + 3 + 1
    text = page.read_text()
    (grid,) = (f for f in figures_of(text) if f["title"] == "Architectures of x < y")
    assert re.match(r"Mean L2 distance .* 7\.0 channels", grid["caption"])
    data = json.loads((tmp_path / "report.json").read_text())
    found = data["x < y"]
    assert found["architectures"][1]["groups"] == {"layer0": 1.0, "layer1": 0.75}
    assert found["architectures"][1]["channels"] == {"layer0": 8, "layer1": 6}
    assert found["distances"]["all_pairs"] == {"pairs": 6, "channels": 7.0, "ratios": 1.5}
    assert found["nets"][1]["budget"]["macs"] == 88_000_000
    assert found["mean_costs"] == {"params": 2e6, "macs": 4e6, "bytes": 8e6}
    assert [m["bytes"] for m in data["other"]["progress"]] == [1_000_000, 2_500_000]
    assert data["other"]["architectures"] == data["other"]["nets"] == []


def cells(text: str, title: str) -> list[list[str]]:
    """The table below a heading, row by row."""
    table = text[text.index(f"<h3>{title}") :].partition("</table>")[0]
    rows = table.partition("<table>")[2].split("</tr>")[:-1]
    return [re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", row) for row in rows]


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take long, and tables are not in them."""
    monkeypatch.setattr(drawing, "draw_figure", lambda figure, path: path.touch())


def test_rounds_to_targets_are_a_table_with_speed_ups(tmp_path, undrawn):
    tests = [LocalTest(1, "train", 0.5, 2)]
    first = replace(
        story("fedavg"),
        local_tests=tests,
        targets=[TargetResult(0.4, 41, 30), TargetResult(0.45, 78, None)],
    )
    second = replace(
        story("a & b"),
        local_tests=tests,
        targets=[TargetResult(0.4, 34, 15, 41 / 34, 2.0), TargetResult(0.45, None, 9)],
    )
    third = replace(
        story("untested"), targets=[TargetResult(0.4, 54, None, 41 / 54), TargetResult(0.45, 1)]
    )
    page = write_page(tmp_path, [first, second, third])
    assert cells(page.read_text(), "Rounds to a target") == [
        ["", "40.0%", "45.0%", "local models 40.0%", "local models 45.0%"],
        ["fedavg", "41", "78", "30", "—"],
        ["a &amp; b", "34 (1.21 ×)", "—", "15 (2.00 ×)", "9"],
        ["untested", "54 (0.76 ×)", "1", "", ""],
    ]
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["a & b"]["targets"][0] == {
        "target": 0.4,
        "rounds": 34,
        "local_rounds": 15,
        "speed_up": 41 / 34,
        "local_speed_up": 2.0,
    }
    alone = write_page(tmp_path, [replace(third, targets=third.targets[:1])]).read_text()
    assert cells(alone, "Rounds to a target")[0] == ["", "40.0%"]
    assert "Rounds to a target" not in write_page(tmp_path, [story("x")]).read_text()


def test_means_over_clients_are_a_table_of_runs(tmp_path, undrawn):
    told = replace(
        story("x"),
        local={3: 0.5, 4: 0.75},
        mean_costs={"params": 2_500_000.0, "macs": 980.25, "bytes": 1e7},
        mean_shares={"params": 0.125, "macs": 1.0, "bytes": 0.125},
        traffic={"up": 9_000_000.0, "down": 500.0},
    )
    bare = replace(told, name="y", local={}, traffic={}, scores=[replace(SCORES[0], value=None)])
    rows = cells(
        write_page(tmp_path, [told, story("z"), bare]).read_text(), "In the mean over clients"
    )
    assert [row[0] for row in rows] == ["", "x", "y"]
    assert rows[1][1:] == ["90.0%", "62.5%", "2.50 M (12.5%)", "980.2 (100.0%)", "9.00 MB", "500 B"]
    assert rows[2][1:3] == ["90.0%", "-"]
    assert rows[2][-2:] == ["-", "-"]


def test_own_models_and_sampled_nets_are_drawn_and_their_data_beside(tmp_path):
    told = RunReport(
        "x",
        {},
        [score(1.0, 0.5)],
        rates=RATES,
        layers=LAYERS,
        compressions=SMALL,
        correlation=-0.98,
        local_tests=[LocalTest(1, "train", 0.5, 2), LocalTest(2, "train", 0.75, 2)],
        local={0: 0.5, 1: 1.0, 2: 0.75},
    )
    write_page(tmp_path, [told])
    names = {p.name.partition("-")[2] for p in tmp_path.glob("*.png")}
    assert {
        "accuracy-of-clients-own-models-against-rounds.png",
        "clients-own-models-each-on-its-own-test-data.png",
        "compression-against-the-divergence-of-labels.png",
        "sampling-rates-of-x.png",
        "parameters-by-layer-of-x.png",
        "macs-by-layer-of-x.png",
    } < names
    assert len(names) == 3 + 6
    found = json.loads((tmp_path / "report.json").read_text())["x"]
    assert found["rates"][0] == {"group": "conv", "size": 8, "mean": 0.75, "spread": 0.125}
    assert found["layers"][1]["whole_params"] == 900
    assert found["compressions"][2] == {"client": 2, "share": 0.125, "divergence": 0.75}
    assert found["correlation"] == -0.98
    assert found["local"] == {"0": 0.5, "1": 1.0, "2": 0.75}
    assert [test["accuracy"] for test in found["local_tests"]] == [0.5, 0.75]


def test_a_page_tells_accuracy_in_each_domain(tmp_path):
    told = [replace(s, group_values={"sea <1>": s.width, "land": 0.125}) for s in SCORES]
    page = write_page(tmp_path / "with", [replace(story("x"), scores=told)]).read_text()
    assert "<td>sea &lt;1&gt;</td><td>100.0%</td><td>50.0%</td>" in page
    assert "<td>land</td><td>12.5%</td><td>12.5%</td>" in page
    assert "each domain" not in write_page(tmp_path / "without", [story("x")]).read_text()


# names with markup

NASTY = '<script>alert("x")</script> & $\\frac{1}{$ _\'"'


class Elements(HTMLParser):
    """The elements of a page, and their texts."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.texts, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_data(self, data):
        self.texts.append(data)


def test_names_with_markup_are_texts_on_the_page_and_in_pictures(tmp_path):
    """Of runs, groups, domains, methods, layers and blocks."""
    nasty = replace(
        story(NASTY),
        about={NASTY: NASTY},
        scores=[replace(s, group_values={NASTY: 0.5, "b": 0.5}) for s in SCORES],
        shares={NASTY: 0.5, "b": 1.0},
        steps={NASTY: {NASTY: 1.0}},
        weights={NASTY: {NASTY: 1.0}},
        architectures=[Architecture(0, None, {NASTY: 0.5}, {NASTY: 0.5}, {NASTY: 4})],
        rates=[KeepRate(NASTY, 8, 0.5, 0.1)],
        layers=[LayerCost(NASTY, 10, 5.0, 20, 10.0)],
        local={0: 0.5, 1: 0.75},
        mean_costs={"params": 1.0, "macs": 1.0},
    )
    page = write_page(tmp_path / "report", [nasty, story("_plain")])
    found = Elements()
    found.feed(page.read_text(encoding="utf-8"))
    plain = Elements()
    plain.feed(write_page(tmp_path / "plain", [story("plain"), story("b")]).read_text())
    assert set(found.names) <= {*plain.names, "h3"}  # no name has made an element
    assert found.names.count("script") == plain.names.count("script")
    assert {name for _, name, _ in found.attributes} == {n for _, n, _ in plain.attributes}
    assert NASTY in found.texts
    titles = [figure["title"] for figure in figures_of(page.read_text(encoding="utf-8"))]
    assert any(NASTY in title for title in titles)
    assert json.loads((tmp_path / "report" / "report.json").read_text())[NASTY]


def test_names_are_drawn_as_they_are(tmp_path):
    picture = figures.Lines(NASTY, NASTY, NASTY, {NASTY: [(1, 1)], "_hidden": [(2, 2)]})
    written = drawing.escape_math(picture.curves)
    assert not any(cbook.is_math_text(name) for name in written)
    assert not any(name.startswith("_") for name in written)
    drawing.draw_figure(picture, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


def test_a_long_name_is_no_problem_for_files(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "draw_figure", lambda figure, path: path.write_bytes(b""))
    assert write_page(tmp_path, [replace(story("n" * 250), steps={"1": {"a": 1.0}})]).exists()
