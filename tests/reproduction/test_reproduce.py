"""Experiments are settings that can be run, and a table holds what their runs scored."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedquilt.cli import app, main
from fedquilt.comparison.scoring import Scoring
from fedquilt.comparison.sources import LoadedSources
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.trial import compute_address
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.reproduction.contrasts import list_contrasts
from fedquilt.reproduction.experiment import (
    FILE,
    Column,
    Contrast,
    Experiment,
    ExperimentRow,
    choose_rows,
    find_experiments,
    load_experiment,
)
from fedquilt.reproduction.reading import read_column, read_columns
from fedquilt.reproduction.reproduce import make_trial, reproduce
from fedquilt.reproduction.store import load, store
from fedquilt.reproduction.table import (
    Reproduction,
    RowResult,
    RunValues,
    describe,
    list_departures,
    make_figures,
    make_section,
)
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import build_method, build_model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import write_results  # noqa: E402

KNOWN = find_experiments(ROOT / "experiments")

TOML = """
title = "A paper, Table 1"
hours = 0.1
seeds = [0, 1]
differences = ["Smaller."]

[settings]
rounds = 2
data = { source = "digits", fraction = 0.2, clients = 4, budgets = [1.0, 0.5] }
model = { name = "mlp", hidden = [8] }
method = { name = "heterofl", fraction = 1.0 }
local_training = { epochs = 1, batch_size = 20, lr = 0.1 }
run = { evaluate_every = 1 }

[quick]
rounds = 1

[[columns]]
name = "half"
size = 0.5

[[columns]]
name = "worst"
over = "worst"

[[columns]]
name = "mean"
over = "mean"

[[columns]]
name = "first round"
round = 1

[[columns]]
name = "sent"
score = "bytes_up"
unit = "B"

[[curves]]
name = "half of the channels"
size = 0.5

[[rows]]
name = "scaled"
paper = { half = 99.0 }

[[rows]]
name = "plain"
settings = { method.scaler = false }
note = "the net is tiny"
paper = { half = 98.0, worst = 97.0 }
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """An experiment, its folder, the folder of its runs, and what came of it."""
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "paper/table-1").mkdir(parents=True)
    (folder / "paper/table-1/experiment.toml").write_text(TOML)
    experiment = load_experiment(folder / "paper/table-1")
    out = folder / "out"
    return experiment, folder, out, reproduce("paper/table-1", experiment, out, workers=0)


def test_every_value_is_the_score_of_the_run_itself(done):
    experiment, _, out, result = done
    for row, own in zip(experiment.rows, result.rows, strict=True):
        for position, run in enumerate(own.runs):
            trial = make_trial(experiment, row, run.seed, LoadedSources(), quick=False)
            folder = out / "runs" / str(compute_address(trial))
            evaluated = CliRunner().invoke(app, ["evaluate", str(folder), "--json"])
            scores = json.loads(evaluated.stdout)["sizes"]
            accuracies = {score["width"]: score["accuracy"] for score in scores}
            values = own.runs[position].values
            assert values["half"] == accuracies[0.5]
            assert values["worst"] == min(accuracies.values())
            assert values["mean"] == pytest.approx(fmean(accuracies.values()))
            assert values["first round"] != accuracies[1.0]


def test_rows_differ_by_their_settings_alone_and_seeds_by_the_seed(done):
    experiment, _, _, result = done
    settings = [experiment.list_settings(row, 1, quick=False) for row in experiment.rows]
    assert {k for k in settings[1] if settings[1][k] != settings[0].get(k)} == {"method.scaler"}
    scaled, plain = result.rows
    assert scaled.get_values("half") != plain.get_values("half")
    assert len(set(scaled.get_values("half"))) == 2


def test_clients_train_in_one_pass_if_the_settings_say_so(done, tmp_path):
    experiment, _, out, _ = done
    row = experiment.rows[1]
    stacked = row.model_copy(update={"settings": {**row.settings, "run.clients_per_pass": 2}})
    together = experiment.model_copy(update={"rows": (stacked,)})
    reproduce("paper/table-1", together, tmp_path, seeds=(0,), workers=0)
    (run,) = (tmp_path / "runs").iterdir()
    sizes = json.loads((run / "passes.json").read_text())["sizes"].values()
    assert [size["clients"] for size in sizes] == [2, 2]  # each of two subnets has two clients
    alone = make_trial(experiment, row, 0, LoadedSources(), quick=False)
    before = load_file(out / "runs" / str(compute_address(alone)) / "model/params.safetensors")
    after = load_file(run / "model/params.safetensors")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-3, atol=1e-4)


def test_nothing_is_done_twice_and_a_quick_version_is_apart(done):
    experiment, _, out, result = done
    events = []
    again = reproduce("paper/table-1", experiment, out, workers=0, on_event=events.append)
    assert [type(event).__name__ for event in events] == ["TrialsQueued"]
    assert again.rows == result.rows
    quick = experiment.list_settings(experiment.rows[1], 0, quick=True)
    assert quick["rounds"] == 1
    assert quick["method.scaler"] is False


def test_runs_are_scored_as_the_experiment_says(done, tmp_path):
    experiment = done[0]
    row = ExperimentRow(name="attacked", scoring=Scoring(attack=True, epsilon=0.1, steps=2))
    columns = (
        Column(name="robust", score="robust_accuracy"),
        Column(name="clean", score="user_accuracy"),
    )
    attacked = experiment.model_copy(update={"rows": (row,), "columns": columns, "curves": ()})
    own = reproduce("p/t", attacked, tmp_path, seeds=(0,), workers=0).rows[0].runs[0].values
    (run,) = (tmp_path / "runs").iterdir()
    words = ["evaluate", str(run), "--attack", "--epsilon", "0.1", "--steps", "2", "--json"]
    largest = json.loads(CliRunner().invoke(app, words).stdout)["sizes"][0]
    assert own["robust"] == largest["robust_accuracy"]
    assert own["clean"] == largest["user_accuracy"]
    assert own["robust"] < own["clean"]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_differ_in_their_scoring_alone_are_one_run(done, tmp_path, workers):
    experiment = done[0]
    attacked = Scoring(attack=True, epsilon=0.1, steps=2)
    rows = (
        ExperimentRow(name="as it was scored"),
        ExperimentRow(name="attacked", scoring=attacked),
        ExperimentRow(name="attacked more", scoring=Scoring(attack=True, epsilon=0.2, steps=2)),
    )
    columns = (
        Column(name="clean", score="user_accuracy"),
        Column(name="robust", score="robust_accuracy", is_optional=True),
    )
    scored = experiment.model_copy(update={"rows": rows, "columns": columns, "curves": ()})
    result = reproduce("p/t", scored, tmp_path, seeds=(0,), workers=workers)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    runs = [row.runs[0] for row in result.rows]
    assert len({run.content for run in runs}) == 3
    assert result.runs == {runs[0].training: runs[-1]}  # core-hours count once
    assert len({run.values["clean"] for run in runs}) == 1
    assert "robust" not in runs[0].values
    alone = scored.model_copy(update={"rows": rows[1:2]})
    (again,) = reproduce("p/t", alone, tmp_path / "alone", seeds=(0,), workers=0).rows
    assert again.runs[0].values == runs[1].values
    assert runs[2].values["robust"] < runs[1].values["robust"] < runs[1].values["clean"]


def test_a_column_that_some_runs_lack_has_a_dash(done):
    experiment, _, out, _ = done
    trial = make_trial(experiment, experiment.rows[0], 0, LoadedSources(), quick=False)
    result = TrialStore(out).find_result(compute_address(trial))
    own = Column(name="own nets", score="personal_accuracy")
    with pytest.raises(ConfigError, match="personal_accuracy"):
        read_columns([own], result)
    sent = Column(name="sent", score="bytes_up", unit="MB")
    columns = (own.model_copy(update={"is_optional": True}), sent)
    values = read_columns(columns, result)
    assert values == {"sent": result.spent.bytes_up}
    table = experiment.model_copy(update={"columns": columns, "curves": ()})
    cells = make_section(table, make_result(table, {"sent": (2.5e6, 2.5e6)})).cells
    assert cells[0] == ("scaled", "-", "2.5 ± 0")


def test_a_column_reads_one_point_of_the_dial(done):
    experiment, _, out, _ = done
    trial = make_trial(experiment, experiment.rows[0], 0, LoadedSources(), quick=False)
    result = TrialStore(out).find_result(compute_address(trial))
    size = result.sizes[0]
    dials = tuple(
        replace(size, robustness=value, scores={"accuracy": 0.9 - 0.1 * value}) for value in (0, 1)
    )
    result = replace(result, sizes=dials)
    column = Column(name="largest")
    assert read_column(column, result) == 0.9
    assert read_column(column.model_copy(update={"robustness": 1.0}), result) == 0.8
    with pytest.raises(ConfigError, match=r"scoring\.robustness"):
        read_column(column.model_copy(update={"robustness": 0.5}), result)


def test_rows_and_seeds_are_done_one_by_one_and_the_table_has_all_that_are_done(done, tmp_path):
    experiment = done[0]

    def run(**which):
        events = []
        result = reproduce("p/t", experiment, tmp_path, workers=0, on_event=events.append, **which)
        count = sum(type(event).__name__ == "TrialDone" for event in events)
        seeds = {row.name: tuple(run.seed for run in row.runs) for row in result.rows}
        return count, seeds, result

    assert run(rows=["plain"], seeds=(1,))[:2] == (1, {"plain": (1,)})
    count, seeds, result = run(rows=["scaled"])
    assert (count, seeds) == (2, {"scaled": (0, 1), "plain": (1,)})
    assert [cells[0] for cells in make_section(experiment, result).cells][2] == "plain (1 seed)"
    count, seeds, result = run(rows=[])
    assert (count, seeds) == (0, {"scaled": (0, 1), "plain": (1,)})
    some = experiment.model_copy(update={"rows": (*experiment.rows, ExperimentRow(name="third"))})
    assert "Not run yet: third." in describe(some, result)
    assert choose_rows(some, ["*a*n", "third"]) == ["plain", "third"]
    with pytest.raises(ConfigError, match="did you mean 'third'"):
        choose_rows(some, ["thrd"])


def test_curves_have_the_evaluations_of_each_round_and_are_drawn(done, tmp_path):
    experiment, _, out, result = done
    trial = make_trial(experiment, experiment.rows[0], 1, LoadedSources(), quick=False)
    records = (out / "runs" / str(compute_address(trial)) / "metrics.jsonl").read_text()
    scored = [r for r in map(json.loads, records.splitlines()) if r.get("scores")]
    halves = {r["round"]: next(s for s in r["scores"] if s["width"] == 0.5) for r in scored}
    curve = result.rows[0].runs[1].curves["half of the channels"]
    assert curve == {round: score["accuracy"] for round, score in halves.items()}
    store(experiment, result, tmp_path)
    assert load(tmp_path, "paper/table-1") == result
    assert load(tmp_path, "paper/table-2") is None
    assert "<svg" in (tmp_path / "paper-table-1-1.svg").read_text()
    lines = make_figures(experiment, result)[0].curves["plain"]
    runs = [run.curves["half of the channels"] for run in result.rows[1].runs]
    assert lines == [(r, pytest.approx(50 * (runs[0][r] + runs[1][r]))) for r in (1, 2)]


def test_a_document_holds_all_of_it(done):
    result = done[3]
    assert Reproduction.from_document(json.loads(json.dumps(result.to_document()))) == result


def make_result(experiment, values):
    """A result in which every row has these values by column, one for each seed."""
    runs = tuple(
        RunValues(
            seed, f"{seed}", f"{seed}", "abc", 2, 1.0, {n: own[seed] for n, own in values.items()}
        )
        for seed in (0, 1)
    )
    return Reproduction("p/t", tuple(RowResult(row.name, runs) for row in experiment.rows))


def test_stored_values_stand_for_runs_that_are_gone(done, tmp_path):
    experiment, _, _, result = done

    def run(folder, stored, **which):
        events = []
        new = reproduce(
            "p/t",
            experiment,
            tmp_path / folder,
            workers=0,
            on_event=events.append,
            stored=stored,
            **which,
        )
        return sum(type(event).__name__ == "TrialDone" for event in events), new

    assert run("a", result, any_code=True) == (0, replace(result, name="p/t"))
    count, new = run("b", result, rows=["plain"], seeds=(1,))  # this code's own run replaces it
    assert count == 1
    assert new.rows[0] == result.rows[0]
    again, before = new.rows[1].runs[1], result.rows[1].runs[1]
    assert again == replace(before, seconds=again.seconds)
    other = replace(result.rows[0].runs[0], content="of other settings")
    changed = replace(result, rows=(replace(result.rows[0], runs=(other,)),))
    assert run("c", changed, rows=[], any_code=True)[1].rows == ()


def test_the_table_has_the_paper_under_each_row_and_names_what_departs(done):
    experiment = done[0]
    values = {column.name: (0.9, 0.92) for column in experiment.columns}
    result = make_result(experiment, values)
    section = make_section(experiment, result)
    assert [cells[0] for cells in section.cells] == [
        *("scaled", "in the paper", "plain", "in the paper")
    ]
    assert section.cells[0][1] == "91.0 ± 1.4"
    assert section.cells[3][1:3] == ("98.0", "97.0")
    columns = tuple(Column(name=f"{i}") for i in range(9))
    many = experiment.model_copy(update={"columns": columns, "curves": ()})
    wide = make_section(many, make_result(many, {c.name: (0.9, 0.92) for c in columns}))
    assert wide.header == ("", "scaled", "in the paper", "plain", "in the paper")
    assert wide.cells[8] == ("8", "91.0 ± 1.4", "-", "91.0 ± 1.4", "-")
    scaled, plain = list_departures(experiment, result)
    assert "half -8.0" in scaled
    assert "not known" in scaled
    known = experiment.model_copy(update={"note": "fewer rounds"})
    assert "fewer rounds" in list_departures(known, result)[0]
    assert "worst -6.0" in plain
    assert "the net is tiny" in plain
    near = {**values, "half": (0.97, 0.995), "worst": (0.96, 0.985)}
    assert list_departures(experiment, make_result(experiment, near)) == []


def test_a_contrast_is_paired_by_seed_and_says_what_is_noise(done, tmp_path):
    pair = Contrast(row="scaled", than="plain")
    rows = tuple(
        row.model_copy(update={"paper": {"half": paper}})
        for row, paper in zip(done[0].rows, (99.0, 97.5), strict=True)
    )
    experiment = done[0].model_copy(update={"rows": rows, "contrasts": (pair,)})

    def contrast(scaled, plain, seeds=(0, 1)):
        results = [make_result(experiment, {"half": own}).rows[0] for own in (scaled, plain)]
        results = [
            RowResult(row.name, tuple(run for run in own.runs if run.seed in kept))
            for row, own, kept in zip(experiment.rows, results, ((0, 1), seeds), strict=True)
        ]
        return list_contrasts(experiment, Reproduction("p/t", tuple(results)))

    paper = "in the paper +1.5"
    clear = contrast((0.5, 0.9), (0.4, 0.7999))  # levels differ by seed, differences do not
    assert clear == [f"scaled − plain (2 seeds): half +10.0 ± 0.0 ({paper})."]
    unclear = contrast((0.5, 0.9), (0.4, 0.7))  # 3 standard errors, one degree of freedom
    assert unclear == [f"scaled − plain (2 seeds): half +15.0 ± 7.1 (noise; {paper})."]
    alone = contrast((0.5, 0.9), (0.6, 0.7), seeds=(1,))
    assert alone == [f"scaled − plain (1 seed): half +20.0 ({paper})."]
    assert contrast((0.5, 0.9), (0.6, 0.7), seeds=()) == []

    text = (ROOT / "experiments/nefl/baselines" / FILE).read_text()
    (tmp_path / FILE).write_text(f'{text}\n[[contrasts]]\nrow = "NeFL-W"\nthan = "FjORT"\n')
    with pytest.raises(ConfigError, match="row 'FjORT' is not known"):
        load_experiment(tmp_path)


def test_a_row_that_fails_is_named_and_the_others_are_kept(done, tmp_path):
    experiment = done[0]
    broken = experiment.rows[1].model_copy(update={"settings": {"local_training.lr": 1e30}})
    some = experiment.model_copy(update={"rows": (experiment.rows[0], broken), "seeds": (0,)})
    result = reproduce("x/y", some, tmp_path, workers=0)
    assert list(result.failed) == ["plain"]
    assert [row.name for row in result.rows] == ["scaled"]
    trial = make_trial(experiment, broken, 1, LoadedSources(), quick=False)
    run = replace(done[3].rows[1].runs[1], content=compute_address(trial).content)
    before = Reproduction("x/y", (RowResult("plain", (run,)),))
    again = reproduce("x/y", some, tmp_path, workers=0, stored=before)
    assert again.find("plain", run.content) == run  # a failure takes no other seed's values
    alone = experiment.model_copy(update={"rows": (broken,), "seeds": (0,)})
    with pytest.raises(TrainingError, match="every row failed"):
        reproduce("x/y", alone, tmp_path, workers=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("hours = 0.1", "hours = 0"), "hours"),
        (('name = "half"', 'nam = "half"'), "nam"),
        (("half = 99.0", "hlf = 99.0"), "did you mean 'half'"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(change, words, tmp_path):
    (tmp_path / "experiment.toml").write_text(TOML.replace(*change))
    with pytest.raises(ConfigError, match=words) as problem:
        load_experiment(tmp_path)
    assert "experiment.toml" in str(problem.value)


def test_a_column_that_a_run_does_not_have_says_what_it_has(done):
    experiment, _, out, _ = done
    trial = make_trial(experiment, experiment.rows[0], 0, LoadedSources(), quick=False)
    result = TrialStore(out).find_result(compute_address(trial))
    column = experiment.columns[0]
    for change, words in [
        ({"size": 0.3}, "the run has 1, 0.5"),
        ({"round": 9}, "evaluations were after rounds 1, 2"),
        ({"score": "acuracy"}, "did you mean 'accuracy'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read_column(column.model_copy(update=change), result)


@pytest.mark.filterwarnings("ignore:rescale_layer")  # the table shows that it collapses
@pytest.mark.parametrize("name", KNOWN)
def test_an_experiment_can_be_run(name):
    experiment = load_experiment(KNOWN[name])
    for quick in (False, True):
        for row in experiment.rows:
            flat = experiment.list_settings(row, 0, quick=quick)
            config = load_config(override_settings({}, flat))
            build_method(config)
    build_model(config)
    assert len({row.name for row in experiment.rows}) == len(experiment.rows)
    assert experiment.list_settings(row, 0, quick=True)["rounds"] <= 5


def test_pages_of_results_are_written_from_stored_values():
    for page, text in write_results.write_pages().items():
        assert page.read_text() == text, "run python tools/write_results.py"


def test_the_command_lists_runs_and_stores(done, tmp_path, capsys):
    _, folder, out, result = done
    run = CliRunner().invoke(app, ["reproduce", "--list", "--experiments", str(folder)])
    assert "paper/table-1: 0.1 core-hours" in run.output
    (tmp_path / "full").mkdir()
    (tmp_path / "full/paper").mkdir()
    (tmp_path / "full/paper/table-1").symlink_to(out)
    arguments = ["reproduce", "paper", "--experiments", str(folder), "--out", str(tmp_path)]
    run = CliRunner().invoke(app, [*arguments, "--workers", "0", "--save", str(tmp_path / "v")])
    assert "98.0" in run.output
    stored = json.loads((tmp_path / "v/paper-table-1.json").read_text())
    assert Reproduction.from_document(stored).rows == result.rows
    (tmp_path / "nothing").mkdir()
    where = ["--experiments", str(folder), "--out", str(tmp_path / "nothing"), "--workers", "0"]
    run = CliRunner().invoke(app, ["reproduce", "paper", *where, "--done"])
    assert "Not run yet: scaled; plain." in run.output
    with pytest.raises(SystemExit):
        main(["reproduce", "papr", "--experiments", str(folder)])
    assert "did you mean 'paper" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["reproduce", "paper", "--experiments", str(folder), "--seeds", "0"])
    assert "--seeds 0 is no run at all" in capsys.readouterr().err
    for more, words in [
        (["--quick", "--save", str(tmp_path / "v")], "leave out one of them"),
        (["--done", "--rows", "scald"], "did you mean 'scaled'"),
    ]:
        with pytest.raises(SystemExit):
            main(["reproduce", "paper", "--experiments", str(folder), *more])
        assert words in capsys.readouterr().err


def test_a_row_that_one_of_the_experiments_lacks_is_refused_before_any_run(tmp_path, capsys):
    for table, row in [("table-1", "plain"), ("table-2", "simple")]:
        (tmp_path / "paper" / table).mkdir(parents=True)
        text = TOML.replace('name = "plain"', f'name = "{row}"')
        (tmp_path / "paper" / table / "experiment.toml").write_text(text)
    where = ["--experiments", str(tmp_path), "--out", str(tmp_path / "runs")]
    with pytest.raises(SystemExit):
        main(["reproduce", "paper", *where, "--rows", "plain"])
    assert "row 'plain' is not known" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_experiment_is_documented_by_its_schema():
    assert all(field.description for field in Experiment.model_fields.values())
