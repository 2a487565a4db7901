"""What notebooks show of a run: tables, pictures, progress."""

import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

import fedquilt as fq
from fedquilt.evaluation.scores import Scores, SizeScore
from fedquilt.report.progress import WidgetDisplay, find_display

PNG = b"\x89PNG\r\n\x1a\n"


def train(out=None, rounds=4, **options):
    torch.manual_seed(0)
    inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    clients = fq.make_clients((inputs, labels), test=(inputs, labels), count=2, budgets=(1.0, 0.5))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    cadence = fq.Cadence(evaluate_every=2)
    return fq.train(
        *(model, inputs[:1], "heterofl", clients, rounds),
        workers=0,
        out=out,
        cadence=cadence,
        **options,
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "<kept>")


def drop_seconds(history):
    return [{n: v for n, v in row.items() if n != "train/seconds"} for row in history]


def test_the_history_on_disk_is_that_in_memory(kept):
    history = train().history
    assert drop_seconds(kept.history) == drop_seconds(history)
    assert [row["round"] for row in history] == [1, 2, 3, 4]
    assert all(row["train/seconds"] > 0 for row in (*kept.history, *history))
    again = fq.open_run(kept.folder, kept.user_setup.model, "heterofl")
    assert again.history == kept.history


def test_the_history_of_a_private_run_has_its_epsilon(tmp_path):
    pytest.importorskip("dp_accounting")
    privacy = fq.Privacy(noise_multiplier=1.0, clip=1.0, delta=1e-5)
    runs = [train(out, rounds=2, privacy=privacy) for out in (None, tmp_path / "run")]
    for run in runs:
        (_, first), (_, second) = run.history.get_curve("privacy/epsilon")
        assert 0 < first < second


def test_pandas_takes_scores_and_history(kept):
    frame = kept.scores.to_pandas()
    assert list(frame.index) == [1.0, 0.5]
    assert list(frame["params"]) == [score.params for score in kept.scores]
    assert list(frame["accuracy"]) == [score.accuracy for score in kept.scores]
    assert "robustness" not in frame  # which no score has
    rounds = kept.history.to_pandas()
    assert list(rounds.index) == [1, 2, 3, 4]
    assert rounds["train/loss"].notna().all()
    assert list(rounds["accuracy/0.5"].notna()) == [False, True, False, True]
    assert list(fq.evaluation.scores.Scores().to_pandas().index) == []


def test_a_run_shows_its_scores_as_a_table_and_escapes_names(kept):
    html = kept._repr_html_()
    assert "&lt;kept&gt;" in html
    assert "<kept>" not in html
    assert html.count("<tr>") == 3
    assert f"<td>{kept.scores[0].params:,}</td>" in html
    assert f"<td>{kept.scores[1].accuracy:.1%}</td>" in html
    assert kept.history._repr_html_().count("<tr>") == 5
    assert kept.scores[0]._repr_html_().count("<tr>") == 2


def test_evaluation_shows_the_same_table(kept):
    scores = kept.evaluate(workers=0)
    assert scores == kept.scores
    assert scores._repr_html_() == kept.scores._repr_html_()


def test_values_are_formatted_by_their_metric():
    metric = fq.MetricInfo("rmse", higher_is_better=False)
    html = Scores([SizeScore(1.0, 10, 10, 2.5, None, None, 3, metric=metric)])._repr_html_()
    assert f"<td>{metric.format(2.5)}</td>" in html


def test_a_run_is_drawn_by_round_and_by_size(kept):
    figure = kept.plot()
    loss, sizes, params = figure.axes
    assert [len(line.get_xdata()) for line in loss.lines] == [4]
    assert [list(line.get_xdata()) for line in sizes.lines] == [[2, 4], [2, 4]]
    assert sorted(params.lines[0].get_xdata()) == sorted(s.params for s in kept.scores)
    assert list(sizes.lines[0].get_ydata())[-1] == 100 * kept.scores[0].accuracy
    assert figure._repr_png_().startswith(PNG)


def test_notebooks_get_a_widget_which_follows_the_run():
    ipywidgets = pytest.importorskip("ipywidgets")
    console = Console(file=io.StringIO(), force_jupyter=True)
    assert find_display(console) is WidgetDisplay
    progress = fq.ProgressBar(console)
    states = []

    def follow(event):
        if isinstance(event, fq.RoundDone):
            display = progress._display
            assert isinstance(display._bar, ipywidgets.FloatProgress)
            states.append((display._bar.value, display._bar.max, display._lines.value))

    displays = []
    from unittest.mock import patch

    with patch("IPython.display.display", displays.append):
        train(callbacks=[progress, follow])
    assert [(value, most) for value, most, _ in states] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert "2/2 clients" in states[0][2]
    assert len(displays) == 1
    assert displays[0].children[0].children[0].bar_style == "success"


def test_without_widgets_notebooks_get_lines(monkeypatch):
    monkeypatch.setattr("fedquilt.report.progress.importlib.util.find_spec", lambda name: None)
    assert find_display(Console(file=io.StringIO(), force_jupyter=True)) is None


CELL = """
import torch, fedquilt as fq
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
data = (torch.rand(12, 4), torch.arange(12) % 3)
clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
run = fq.train(Net(), data[0][:1], "heterofl", clients, 2, workers=2,
               callbacks=[fq.ProgressBar()])
"""


@pytest.mark.slow
def test_a_notebook_trains_its_own_model_in_workers_and_shows_the_run():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(text) for text in (CELL, "run", "run.plot()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    trained, shown, drawn = notebook.cells
    assert "application/vnd.jupyter.widget-view+json" in json.dumps(trained.outputs)
    assert "<table>" in shown.outputs[0].data["text/html"]
    assert "image/png" in drawn.outputs[0].data
