"""What a page says round by round: figures as bounded data, coverage, clients, and its state."""

import json
import re
from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.evaluation.clients import ClientRecord
from fedquilt.figures.figure import Boxes, Densities, Grid, Lines
from fedquilt.report.coverage import compute_coverage
from fedquilt.report.figure_json import MAX_COLUMNS, MAX_POINTS, encode_figure
from fedquilt.report.page import MAX_LISTED, RunReport, plot_figures, render_parts, write_page
from fedquilt.report.records import read_client_summaries, read_evaluations, read_rounds
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.status import RunStatus, StatusWriter, read_status


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    pair = x, (x.sum(1) > 0).long()
    clients = fq.make_clients(pair, test=pair, count=4, budgets=[1, 0.5])
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    local = fq.LocalTraining(lr=0.05, epochs=1, batch_size=8)
    folder = tmp_path_factory.mktemp("runs") / "kept"
    cadence = fq.Cadence(evaluate_every=1)
    return fq.train(
        *(net, x[:1], fq.HeteroFL(local, fraction=1.0), clients, 3),
        **{"workers": 0, "out": folder, "cadence": cadence},
    )


def test_rounds_are_those_that_callbacks_got(kept):
    rounds = read_rounds(kept.directory)
    assert [r.round for r in rounds] == [1, 2, 3]
    assert all(r.clients == 4 and r.failures == 0 and r.seconds > 0 for r in rounds)
    evaluations = read_evaluations(kept.directory)
    assert [round for round, _ in evaluations] == [1, 2, 3]
    assert evaluations[-1][1] == kept.scores


def test_clients_are_summed_up_over_rounds_and_bounded(kept):
    clients = read_client_summaries(kept.directory, 20)
    assert [c.client for c in clients] == [0, 1, 2, 3]
    assert all(c.rounds == 3 and c.failures == 0 for c in clients)
    sent = sum(r.bytes_up for r in read_rounds(kept.directory))
    assert sum(c.bytes for c in clients) == sent
    assert len(read_client_summaries(kept.directory, 2)) == 2


def test_coverage_counts_who_trained_what(kept):
    """Four clients at widths 1, 1, ½, ½: the first half is trained by all, the rest by two."""
    coverage = compute_coverage(kept.setup.structure, kept.read_clients())
    assert coverage.rounds == 3
    by_part = {part.trained: part for part in coverage.parts}
    assert set(by_part) == {4, 2}
    assert by_part[4].times == 12
    half, full = (4 * 4 + 4) + (2 * 4 + 2), (4 * 8 + 8) + (2 * 8 + 2)
    assert by_part[4].share == pytest.approx(half / full)
    assert sum(part.share for part in coverage.parts) == pytest.approx(1)


def test_coverage_of_ever_new_subnets_is_that_of_the_last_rounds(kept, monkeypatch):
    structure = kept.setup.structure
    drawn = [structure.subnet(width) for width in (1.0, 0.75, 0.5)]
    rounds = [[ClientRecord(0, (s,), (s,), 1, {})] for s in drawn]
    assert compute_coverage(structure, rounds).rounds == 3
    monkeypatch.setattr("fedquilt.report.coverage.MAX_HOLDINGS", 2)
    last = compute_coverage(structure, rounds)
    assert last.rounds == 2
    assert sum(part.share for part in last.parts if not part.times) > 0  # of the first round only
    assert compute_coverage(structure, []) is None


def test_figures_are_bounded_however_many_clients_there_are():
    many = [(float(i), float(i)) for i in range(50_000)]
    line = encode_figure(Lines("a", "x", "y", {"run": many}))["curves"]["run"]
    assert len(line) <= MAX_POINTS + 1
    assert (line[0], line[-1]) == ([0, 0], [49_999, 49_999])
    values = [float(i) for i in range(100_001)]
    box = encode_figure(Boxes("a", {"p": {"run": values, "none": []}}))["panels"]["p"]
    assert box["run"] == {
        "count": 100_001, "low": 0, "lower": 25_000, "median": 50_000, "upper": 75_000,
        "high": 100_000,
    }  # fmt: skip
    assert box["none"] is None
    columns = tuple(map(str, range(5000)))
    grid = encode_figure(Grid("a", "client", "%", ("r",), columns, [list(range(5000))]))
    assert len(grid["columns"]) == len(grid["values"][0]) <= MAX_COLUMNS
    assert int(grid["columns"][7]) == grid["values"][0][7]
    density = encode_figure(Densities("a", "x", {"run": [50.0] * 9000}))["curves"]["run"]
    assert len(density) == 201


def test_the_files_of_a_report_do_not_grow_with_clients(tmp_path):
    def size(count):
        report = RunReport("x", {}, (), local={i: 0.5 + i / (4 * count) for i in range(count)})
        page = write_page(tmp_path / str(count), [report])
        return page.stat().st_size, (page.parent / "report.json").stat().st_size

    few, many = size(MAX_LISTED), size(20 * MAX_LISTED)
    assert many[0] < 1.2 * few[0]
    assert many[1] < 1.5 * few[1]
    data = json.loads((tmp_path / str(20 * MAX_LISTED) / "report.json").read_text())["x"]
    assert data["num_local"] == 20 * MAX_LISTED


def test_a_report_without_test_data_has_a_page(tmp_path):
    x = torch.randn(12, 4)
    clients = fq.make_clients((x, torch.arange(12) % 3), count=2)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    run = fq.train(net, x[:1], "fedavg", clients, 1, workers=0, out=tmp_path / "run")
    page = fq.write_report([run], tmp_path / "report", workers=0)
    assert "<h2>run</h2>" in page.read_text()
    assert "Training loss by round" in page.read_text()


def test_epsilon_is_drawn_where_it_was_recorded(kept):
    rounds = read_rounds(kept.directory)
    plain = plot_figures([RunReport("a", {}, (), rounds=rounds)])
    assert not any("Privacy" in figure.title for figure in plain)
    private = [replace(r, epsilon=0.5 * r.round) for r in rounds]
    (figure,) = (
        f for f in plot_figures([RunReport("a", {}, (), rounds=private)]) if "Privacy" in f.title
    )
    assert figure.curves == {"a": [(1, 0.5), (2, 1.0), (3, 1.5)]}


# what a run is doing now


def test_a_finished_run_says_so(kept):
    status = read_status(kept.directory)
    assert (status.state, status.round, status.total) == ("finished", 3, 3)
    assert not status.is_alive


def test_the_status_follows_events_and_ends_with_how_the_run_ended(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    monkeypatch.setattr("fedquilt.runs.status.MIN_SECONDS", 0.0)
    notify = StatusWriter(directory)
    notify(fq.RoundStarted(2, "train", 3, 9))
    notify(fq.ClientDone(0))
    notify(fq.ClientDone(1, "ran out of memory"))
    status = read_status(directory)
    assert (status.round, status.total, status.num_done) == (2, 9, 2)
    assert status.failed == {1: "ran out of memory"}
    assert status.is_alive
    notify(fq.RunEnded("stopped"))
    assert read_status(directory).state == "stopped"


def test_a_process_that_is_gone_is_not_running(tmp_path):
    writer = StatusWriter(RunDirectory(tmp_path))
    writer(fq.RoundStarted(1, "train", 1, 1))
    status = read_status(RunDirectory(tmp_path))
    assert status.is_alive
    assert not replace(status, process=2**22 + 1).is_alive


def test_the_status_is_bounded(tmp_path):
    writer = StatusWriter(RunDirectory(tmp_path))
    for client in range(1000):
        writer(fq.ClientDone(client, "x" * 1000))
    writer(fq.RoundStarted(1, "train", 1, 1))
    writer(fq.RunEnded("stopped"))
    assert (tmp_path / "status.json").stat().st_size < 20_000


def test_a_status_that_is_damaged_is_no_status(tmp_path):
    assert read_status(RunDirectory(tmp_path)) is None
    (tmp_path / "status.json").write_text('{"working": 3}')
    assert read_status(RunDirectory(tmp_path)) is None


def test_the_page_tells_who_works_who_is_slow_and_who_failed():
    status = RunStatus(
        state="stopped",
        round=4,
        total=9,
        working={1: 0.9, 2: 0.8, 3: 0.1},
        failed={5: "out of <memory>"},
    )
    text = render_parts([RunReport("a", {}, (), status=status)])["runs"]
    assert re.search(r'class="slow">client 3: 10%, slow', text)
    assert "<li>client 1: 90%</li>" in text
    assert "client 5: out of &lt;memory&gt;" in text
    assert "stopped" in text
