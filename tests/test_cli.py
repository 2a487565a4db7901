"""The command line, as people and programs use it."""

import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.data import load_dataset
from fedquilt.files import read_document, write_document
from fedquilt.methods import METHODS
from fedquilt.models import make_model
from fedquilt.report.progress import ProgressBar
from fedquilt.runs.events import RoundStarted
from fedquilt.runs.from_config import open_configured_run

NET = """
from torch import nn

def net(in_channels, num_classes):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )
"""  # 186 parameters, 54 at a quarter of the width
TINY = ["--model", "mlp", "--set", "model.hidden=[8]", "--clients", "4", "--budgets", "1,0.25"]
COMMANDS = ("train", "evaluate", "cost", "customize", "report", "up")


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def fedquilt(*arguments, trust=True):
    """What a command prints and returns, in this process; runs here are ours."""
    out, err = io.StringIO(), io.StringIO()
    is_about_a_run = arguments and arguments[0] in ("customize", "evaluate", "report")
    if trust and (is_about_a_run or "--resume" in arguments) and "--help" not in arguments:
        arguments = (*arguments, "--trust")
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ending:
        main([str(a) for a in arguments])
    return Result(ending.value.code or 0, out.getvalue(), err.getvalue())


def started(*arguments, **options):
    """The same as a process of its own."""
    source = str(Path(__file__).parent.parent / "src")
    return subprocess.Popen(
        [sys.executable, "-m", "fedquilt", *map(str, arguments)],
        text=True,
        env={**os.environ, "PYTHONPATH": source, "TERM": "xterm", "COLUMNS": "100"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def assert_refused(result, *words):
    """Exit code 2, one sentence on stderr with these words, and nothing else."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert result.err.startswith("fedquilt: ")
    for word in words:
        assert word in result.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of a model with normalisation, its directory not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    file = tmp_path_factory.mktemp("models") / "mine.py"
    file.write_text(NET)
    asked = ["--rounds", "2", "--seed", "7", "--evaluate-every", "1", "--workers", "0"]
    sizes = ["--model", f"{file}:net", "--budgets", "1,0.25", "--set", "local_training.epochs=1"]
    result = fedquilt("train", *asked, *sizes, "--out", folder)
    assert result.code == 0, result.err
    return folder, result


@pytest.fixture(scope="module")
def dialled(tmp_path_factory):
    """A finished run of two bases with a robustness dial."""
    folder = tmp_path_factory.mktemp("runs") / "b"
    file = tmp_path_factory.mktemp("models") / "mine.py"
    file.write_text(NET)
    model = ["--model", f"{file}:net", "--clients", "3", "--budgets", "1,0.5"]
    method = ["base=0.5", "robust=true", "steps=1"]
    chosen = [word for text in method for word in ("--set", f"method.{text}")]
    asked = ["--method", "splitmix", "--rounds", "1", "--workers", "0", "--out", folder]
    result = fedquilt("train", *model, *chosen, *asked)
    assert result.code == 0, result.err
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = fedquilt(command, "--help")
    assert result.code == 0
    assert f"Example: fedquilt {command}" in result.out


def test_no_command_shows_the_commands():
    result = fedquilt()
    assert result.code == 0
    assert all(command in result.out for command in COMMANDS)


# train


@pytest.mark.parametrize("method", ["heterofl", "splitmix", "standalone", "apfl"])
def test_what_to_type_next_can_be_typed(method, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    tiny = ["--model", "mine.py:net", "--clients", "3", "--budgets", "1,0.25", "--rounds", "1"]
    trained = fedquilt("train", "--method", method, *tiny, "--workers", "0", "--out", "a run")
    assert trained.code == 0, trained.err
    commands = [shlex.split(line) for line in trained.out.partition("Next:\n")[2].splitlines()]
    names = [words[1] for words in commands]
    assert names == ["evaluate", *["customize"] * (method != "standalone"), "report"]
    for name, *words in (words[1:] for words in commands):
        workers = [] if name == "customize" else ["--workers", "0"]
        result = fedquilt(name, *words, *workers)
        assert result.code == 0, result.err


def test_train_shows_a_table_its_seed_and_what_to_type_next(finished):
    folder, result = finished
    assert "seed 7" in result.out
    assert re.search(r"width +parameters +MACs +upload +accuracy", result.out)
    assert re.search(r"1 +186 +4\.69 k +\d+ B +\d+\.\d%", result.out)
    assert f"fedquilt evaluate {folder}" in result.out
    assert f"fedquilt customize {folder} --width 0.25" in result.out


def test_train_without_a_terminal_prints_plain_lines(finished):
    _, result = finished
    assert "\x1b" not in result.out
    lines = result.out.splitlines()
    for number in (1, 2):
        assert any(re.match(rf"round {number}/2 · loss \d", line) for line in lines)
        assert any(re.match(rf"round {number}/2 · accuracy \d", line) for line in lines)


def test_train_stores_all_settings(finished):
    text = (finished[0] / "config.toml").read_text()
    assert "seed = 7" in text
    assert "momentum = 0.9" in text  # the method's default
    assert "num_classes = 10" in text  # the data's


def test_train_numbers_its_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits-fedavg-1").mkdir(parents=True)
    result = fedquilt("train", *TINY, "--method", "fedavg", "--rounds", "1", "--workers", "0")
    assert result.code == 0, result.err
    assert (tmp_path / "runs" / "digits-fedavg-2" / "model" / "bundle.json").exists()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_starts_at_all_defaults(name, tmp_path, monkeypatch):
    """One epoch on a few digits; the model, budgets and method are what they are."""
    monkeypatch.chdir(tmp_path)
    few = ["--rounds", "1", "--clients", "5", "--workers", "0"]
    few += ["--set", "data.fraction=0.05", "--set", "local_training.epochs=1"]
    result = fedquilt("train", "--method", name, *few)
    assert result.code == 0, result.err
    assert "1 round of " in result.out
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [f"digits-{name}-1"]


def test_options_go_over_the_config_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('seed = 3\nrounds = 9\n[method]\nname = "heterofl"\n')
    asked = [*TINY, "--rounds", "1", "--method", "standalone", "--workers", "0", "--json"]
    result = fedquilt("train", file, *asked, "--out", tmp_path / "a")
    assert result.code == 0, result.err
    assert (result.json["seed"], result.json["rounds"]) == (3, 1)
    assert result.json["sizes"][0]["bytes"] == 0  # standalone: nothing is sent
    assert "round 1/1 · loss" in result.err


def test_a_terminal_has_a_live_display_and_json_has_standard_output_to_itself(tmp_path):
    """In a process of its own, with workers, so that nothing can hide."""
    ours, theirs = pty.openpty()
    asked = [*TINY, "--rounds", "2", "--workers", "2", "--evaluate-every", "1", "--json"]
    process = started(
        "train", *asked, "--out", tmp_path / "a", stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    shown = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    out, _ = process.communicate()
    assert process.returncode == 0, shown
    assert [size["width"] for size in json.loads(out)["sizes"]] == [1.0, 0.25]
    assert "\x1b[2K" in shown  # lines are drawn again
    for words in ("round 2/2", "4/4 clients", "train", "left", "loss", "% at 0.25"):
        assert words in shown
    assert "round 1/2 · loss" not in shown


def _read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


# stop and resume


def assert_says_how_to_go_on(code, err):
    """Exit code 130, the round and the command, and that the command works."""
    assert code == 130, err
    *_, last = err.splitlines()
    told = re.fullmatch(r"fedquilt: stopped after round (\d+) of 10000; go on with: (.*)", last)
    assert told, err
    done, words = int(told[1]), shlex.split(told[2])
    program = 3 if words[1:3] == ["-m", "fedquilt"] else 1  # words, as it was called
    assert program == 3 or words[0] == "fedquilt"
    command = words[program:]
    result = fedquilt(*command, "--rounds", done + 1, "--workers", "0", "--json")
    assert result.code == 0, result.err
    assert f"round {done + 1}/{done + 1}" in result.err
    assert f"round {done}/{done + 1}" not in result.err
    return done


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    asked = [*TINY, "--rounds", "10000", "--checkpoint-every", "0", "--workers", "1"]
    folder = tmp_path / "my run"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = started("train", *asked, "--out", folder, **pipes)
    assert any(line.startswith("round 3/") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err.count("\n") == 1
    assert assert_says_how_to_go_on(process.returncode, err) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_save_and_say_how_to_resume(tmp_path, monkeypatch, number):
    class Stop(ProgressBar):
        def __call__(self, event):
            if isinstance(event, RoundStarted) and event.round == 3:
                os.kill(os.getpid(), number)

    asked = [*TINY, "--rounds", "10000", "--checkpoint-every", "0", "--workers", "0"]
    before = signal.signal(number, signal.SIG_DFL)  # also where tests run behind nohup
    try:
        with monkeypatch.context() as patched:
            patched.setattr("fedquilt.cli.train.ProgressBar", Stop)
            result = fedquilt("train", *asked, "--out", tmp_path / "a")
    finally:
        signal.signal(number, before)
    assert assert_says_how_to_go_on(result.code, result.err) == 2


def test_a_hangup_that_is_ignored_stops_nothing(tmp_path, monkeypatch):
    """As behind nohup."""

    class Hangup(ProgressBar):
        def __call__(self, event):
            os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr("fedquilt.cli.train.ProgressBar", Hangup)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = fedquilt(
            "train", *TINY, "--rounds", "1", "--workers", "1", "--out", tmp_path / "a"
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.code == 0, result.err


def test_training_goes_on_when_nobody_reads_what_it_says(tmp_path):
    """As behind ``| head -1``."""
    asked = [*TINY, "--rounds", "4", "--checkpoint-every", "0", "--workers", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = started("train", *asked, "--out", tmp_path / "a", **pipes)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "a" / "model" / "bundle.json").exists()


def test_resuming_a_finished_run_says_so_and_changes_nothing(finished):
    folder, trained = finished
    before = contents(folder)
    result = fedquilt("train", "--resume", folder)
    assert result.code == 0, result.err
    assert "finished" in result.out
    assert trained.out.endswith(result.out.split(" rounds\n", 1)[1])  # the same table
    assert contents(folder) == before


def test_a_finished_run_can_be_given_more_rounds(copied):
    result = fedquilt("train", "--resume", copied, "--rounds", "3", "--json")
    assert result.code == 0, result.err
    assert result.json["rounds"] == 3
    assert "rounds = 3" in (copied / "config.toml").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--seed", "8"], ["seed = 7", "got 8"]),
        (["--lr", "0.5"], ["local_training.lr = 0.01"]),
        (["--rounds", "1"], ["has done 2"]),
        (["--out", "elsewhere"], ["--out elsewhere"]),
        (["--method", "fedavg"], ["was trained with heterofl", "keeps its method, got fedavg"]),
    ],
)
def test_a_resumed_run_keeps_its_settings(finished, change, words):
    before = contents(finished[0])
    assert_refused(fedquilt("train", "--resume", finished[0], *change), *words)
    assert contents(finished[0]) == before


def test_a_corrupt_checkpoint_is_refused_and_nothing_is_written(copied):
    tensors = copied / "checkpoints" / "round-000002" / "params.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    before = contents(copied)
    assert_refused(fedquilt("train", "--resume", copied, "--rounds", "3"), "is damaged")
    assert contents(copied) == before


def test_a_foreign_checkpoint_is_refused_and_nothing_is_written(copied):
    path = copied / "checkpoints" / "round-000002" / "state.json"
    about = json.loads(path.read_text())
    del about["digest"]
    write_document(path, {**about, "fingerprint": "f"})
    before = contents(copied)
    assert_refused(fedquilt("train", "--resume", copied, "--rounds", "3"), "another run")
    assert contents(copied) == before


def test_a_directory_without_a_run_cannot_be_resumed_nor_evaluated(tmp_path):
    assert_refused(fedquilt("train", "--resume", tmp_path), "holds no run to resume")
    assert_refused(fedquilt("evaluate", tmp_path), "is not a run's directory")
    refused = fedquilt("customize", tmp_path, "--out", "a.onnx")
    assert_refused(refused, "is not a run's directory")
    file = tmp_path / "file"
    file.touch()
    assert_refused(fedquilt("evaluate", file), "is not a run's directory")


# evaluate


def test_evaluate_gives_the_scores_of_the_end_of_training(finished):
    folder, trained = finished
    result = fedquilt("evaluate", folder, "--workers", "0", "--json")
    assert result.code == 0, result.err
    scores = result.json
    assert scores["seed"] == 7
    assert [size["width"] for size in scores["sizes"]] == [1.0, 0.25]
    assert [size["params"] for size in scores["sizes"]] == [186, 54]
    named = {"width", "params", "macs", "accuracy", "local_accuracy", "loss", "num_examples"}
    assert named <= scores["sizes"][0].keys()
    found = [size["accuracy"] for size in scores["sizes"]]
    assert scores["worst"] == min(found)
    assert scores["mean"] == pytest.approx(sum(found) / 2)
    assert (scores["score"], scores["exceeds_budgets"]) == ("accuracy", None)
    assert {size["kind"] for size in scores["sizes"]} == {"width"}
    assert "accuracy: on the server's held-out data" in trained.out
    assert "accuracy over sizes; seed 7" in trained.out
    for accuracy in found:
        assert f"{100 * accuracy:.1f}%" in trained.out


def test_what_a_client_sends_is_what_was_sent(tmp_path):
    """Codes of STC are a hundredth of its net."""
    small = ["--model", "mlp", "--set", "model.hidden=[64]", "--clients", "2", "--workers", "0"]
    for command in (
        ["train", "--method", "stc", *small, "--rounds", "2", "--out", tmp_path / "a"],
        ["evaluate", tmp_path / "a", "--workers", "0"],
    ):
        result = fedquilt(*command, "--json")
        assert result.code == 0, result.err
        lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
        rounds = [json.loads(line).get("clients", {}) for line in lines]
        sent = [size for clients in rounds for size in clients.get("bytes", [])]
        (size,) = result.json["sizes"]
        assert size["bytes"] == round(sum(sent) / len(sent)) < 4 * size["params"] / 50
        assert result.json["exceeds_budgets"].startswith(
            "ignores budgets: the whole net is trained"
        )


def test_sizes_are_named_as_what_they_are(tmp_path):
    """γ of NeFL is a share of parameters; its tiers reach beyond budgets."""
    asked = ["--model", "mlp", "--set", "model.hidden=[32]", "--clients", "5", "--workers", "0"]
    asked += ["--set", "method.tolerance=0.2", "--rounds", "1", "--out", tmp_path / "a"]
    result = fedquilt("train", "--method", "nefl", *asked)
    assert result.code == 0, result.err
    assert re.search(r"γ +parameters +MACs +upload +accuracy", result.out)
    assert "γ: the fraction of the full model's parameters" in result.out
    assert "exceeds budgets: 4 of 5 clients also train submodels above their own tier" in result.out
    again = fedquilt("evaluate", tmp_path / "a", "--workers", "0", "--json").json
    assert [(s["width"], s["kind"]) for s in again["sizes"]] == [
        (width, "parameters") for width in (1.0, 0.8, 0.6, 0.4, 0.2)
    ]
    assert again["exceeds_budgets"].startswith("exceeds budgets: 4 of 5")
    taken = fedquilt("customize", tmp_path / "a", "--width", "0.2", "--out", tmp_path / "a.pt2")
    assert "a.pt2: γ 0.2, " in taken.out


def test_a_model_that_cannot_be_trained_is_refused_and_leaves_no_folder(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(NET + "\ndef small(in_channels):\n    return net(in_channels, 3)\n")
    out = tmp_path / "run"
    result = fedquilt("train", "--model", f"{path}:small", "--out", out)
    assert_refused(result, "labels go up to 9", "the model has 3 outputs")
    assert not out.exists()


@pytest.fixture(scope="module")
def from_python(tmp_path_factory):
    """Runs that were trained from Python: of a net by name, and of one that only Python knows."""
    digits = load_dataset("digits")
    people = fq.make_clients(digits.train, test=digits.test, count=3, budgets=[1, 0.5])
    method = fq.HeteroFL(fq.LocalTraining(epochs=1, lr=0.05), fraction=1.0)
    named = make_model("mlp", {"hidden": [8], "image_size": 8})
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Linear(8, 10))
    folder = tmp_path_factory.mktemp("python")
    return {
        name: fq.train(net, digits.example, method, people, 1, out=folder / name, workers=0)
        for name, net in (("named", named), ("own", own))
    }


def test_a_run_from_python_is_opened_if_its_model_can_be_made(from_python, tmp_path):
    run = from_python["named"]
    again = open_configured_run(run.folder)
    assert (again.method, again.scores) == (run.method, run.scores)
    measured = fedquilt("evaluate", run.folder, "--data", "digits", "--workers", "0", "--json")
    assert measured.code == 0, measured.err
    found = [(size["width"], size["accuracy"]) for size in measured.json["sizes"]]
    assert found == [(score.width, score.accuracy) for score in run.scores]
    file = tmp_path / "small.safetensors"
    assert fedquilt("customize", run.folder, "--width", "0.5", "--out", file).code == 0
    small = run.customize(width=0.5).state_dict()
    assert all(small[name].equal(tensor) for name, tensor in load_file(file).items())
    told = fedquilt("report", run.folder, "--out", tmp_path / "page", "--json")
    assert told.code == 0, told.err
    scores = json.loads((tmp_path / "page" / "report.json").read_text())["named"]["scores"]
    assert [score["accuracy"] for score in scores] == [accuracy for _, accuracy in found]


def test_what_only_python_has_is_said(from_python, tmp_path):
    assert_refused(
        fedquilt("evaluate", from_python["named"].folder), "trained from Python", "--data"
    )
    resumed = fedquilt("train", "--resume", from_python["named"].folder)
    assert_refused(
        resumed, "trained from Python, with data that only Python has", "resume it there"
    )
    own = from_python["own"].folder
    assert_refused(
        fedquilt("evaluate", own), "a model that only Python knows", "open_run", "--model"
    )
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch.nn import *\n\ndef net():\n"
        "    return Sequential(Flatten(), Linear(64, 8), Linear(8, 10))\n"
    )
    asked = ["--model", f"{file}:net", "--data", "digits", "--workers", "0", "--json"]
    result = fedquilt("evaluate", own, *asked)
    assert result.code == 0, result.err
    assert [size["accuracy"] for size in result.json["sizes"]] == [
        score.accuracy for score in from_python["own"].scores
    ]


def test_a_run_from_python_that_names_code_is_refused(from_python, tmp_path):
    copy = Path(shutil.copytree(from_python["named"].folder, tmp_path / "copy"))
    path = copy / "model" / "bundle.json"
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    code = {"name": f"{tmp_path / 'mine.py'}:net", "options": {}}
    write_document(path, {**read_document(path), "model_call": code})
    assert_refused(fedquilt("evaluate", copy, "--data", "digits", "--trust"), "names code")


def test_evaluate_takes_other_widths_and_other_data(finished, tmp_path):
    path = tmp_path / "mine.npz"
    images = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8)
    labels = np.arange(40) % 10
    np.savez(path, x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    wanted = ["--widths", "0.5", "--data", path, "--workers", "0", "--json"]
    result = fedquilt("evaluate", finished[0], *wanted)
    assert result.code == 0, result.err
    (size,) = result.json["sizes"]
    assert (size["width"], size["num_examples"]) == (0.5, 20)


def test_evaluate_gives_every_point_and_what_an_attack_leaves(dialled):
    asked = ["--robustness", "0,.5,1", "--widths", "1,0.5", "--workers", "0"]
    attack = ["--attack", "--epsilon", "8/255", "--steps", "2"]
    result = fedquilt("evaluate", dialled, *asked, *attack, "--json")
    assert result.code == 0, result.err
    sizes = result.json["sizes"]
    assert [(size["robustness"], size["width"]) for size in sizes] == [
        (0, 1),
        (0, 0.5),
        (0.5, 1),
        (0.5, 0.5),
        (1, 1),
        (1, 0.5),
    ]
    named = {"width", "robustness", "params", "macs", "accuracy", "user_accuracy"}
    assert named | {"robust_accuracy"} <= sizes[0].keys()
    attacked, plain = (sum(s[f"{kind}_accuracy"] for s in sizes) for kind in ("robust", "user"))
    assert 0 < attacked <= plain
    table = fedquilt("evaluate", dialled, *asked, *attack).out
    assert re.search(r"width +robustness +parameters +MACs", table)
    assert "user" in table
    assert "robust\n" in table.replace(" ", "")
    for size in sizes:
        shown = f"{100 * size['robust_accuracy']:.1f}%"
        assert re.search(rf"\b{size['width']:g} +{size['robustness']:g} .*{shown}", table)
    assert max(map(len, table.splitlines())) <= 80


def test_a_stronger_attack_leaves_less(dialled):
    def robust_accuracy(epsilon):
        asked = ["--widths", "1", "--attack", "--epsilon", epsilon, "--workers", "0", "--json"]
        (size,) = fedquilt("evaluate", dialled, *asked).json["sizes"]
        return size["user_accuracy"], size["robust_accuracy"]

    plain, untouched = robust_accuracy("0")
    assert untouched == pytest.approx(plain)
    assert robust_accuracy("0.5")[1] < plain


def test_evaluate_without_dials_and_attacks_shows_neither(dialled):
    result = fedquilt("evaluate", dialled, "--workers", "0")
    assert "robust" not in result.out
    sizes = fedquilt("evaluate", dialled, "--workers", "0", "--json").json["sizes"]
    assert {size["robustness"] for size in sizes} == {None}
    assert {size["robust_accuracy"] for size in sizes} == {None}


def test_evaluate_refuses_a_robustness_that_a_run_does_not_have(finished):
    result = fedquilt("evaluate", finished[0], "--robustness", "0.5", "--workers", "0")
    assert_refused(result, "no robustness to choose")


def test_evaluate_refuses_data_of_another_shape(finished, tmp_path):
    path = tmp_path / "mine.npz"
    images, labels = np.zeros((20, 9, 9), np.uint8), np.arange(20) % 10
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert_refused(fedquilt("evaluate", finished[0], "--data", path), "(1, 9, 9)", "(1, 8, 8)")


# cost


@pytest.mark.parametrize(
    ("model", "params"),
    [
        ("heterofl-cnn", [1556874, 391370, 98922, 25274, 6594]),
        pytest.param(
            "heterofl-resnet18",
            [9622090, 2408746, 603802, 151762, 38350],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_cost_has_the_published_parameter_counts(model, params):
    result = fedquilt(
        "cost", "--model", model, "--width", "1,.5,.25", "--width", ".125,.0625", "--json"
    )
    assert [size["params"] for size in result.json["sizes"]] == params


def test_cost_of_one_width_is_one_object():
    price = fedquilt("cost", "--model", "mlp", "--data", "digits", "--json").json
    assert price.keys() == {"width", "params", "macs", "bytes", "memory"}
    assert price["width"] == 1
    assert price["bytes"] == 4 * price["params"]


def test_cost_finds_the_widest_subnet_within_limits():
    asked = ["--model", "mlp", "--set", "model.hidden=[8]", "--input", "1,4,4", "--classes", "3"]
    price = fedquilt("cost", *asked, "--params", "100", "--json").json
    assert price["width"] == 4 / 8
    assert price["params"] == 16 * 4 + 4 + 4 * 3 + 3
    assert_refused(fedquilt("cost", *asked, "--params", "9"), "no subnet meets")
    assert_refused(fedquilt("cost", *asked, "--params", "9", "--width", "1,0.5"), "at most one")


def test_cost_says_what_the_sizes_of_a_method_and_a_smaller_depth_cost():
    small = [
        "--model",
        "resnet20",
        "--set",
        "model.channels=[8,8,16]",
        "--input",
        "3,8,8",
        "--json",
    ]
    found = fedquilt("cost", *small, "--method", "nefl", "--set", "method.gammas=[0.5, 1.0]").json
    whole, half = found["sizes"]
    assert (whole["width"], whole["share"], half["width"]) == (1.0, 1.0, 0.5)
    assert abs(half["params"] / whole["params"] - 0.5) < 0.011
    shallow = fedquilt("cost", *small, "--depth", "0.3").json
    full = fedquilt("cost", *small).json
    assert shallow["params"] < 0.5 * full["params"]
    assert shallow["macs"] < 0.5 * full["macs"]
    assert_refused(fedquilt("cost", *small, "--method", "nefl", "--depth", ".5"), "its own sizes")
    assert_refused(
        fedquilt("cost", *small, "--method", "nefl", "--set", "method.tolerance=abc"),
        "method.tolerance",
    )


def test_cost_of_a_model_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "def net(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Linear(6, num_classes))\n"
    )
    assert_refused(fedquilt("cost", "--model", f"{file}:net"), "--input")
    result = fedquilt("cost", "--model", f"{file}:net", "--input", "3,2,2", "--width", "1,0.5")
    assert re.search(r"1 +148 ", result.out)
    assert re.search(r"0\.5 +79 ", result.out)


def test_cost_of_nets_that_read_texts(tmp_path):
    lstm = fedquilt("cost", "--model", "char-lstm", "--json").json
    assert lstm["params"] == sum(p.numel() for p in make_model("char-lstm", {}).parameters())
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "def net(vocabulary, length, num_classes):\n"
        "    return nn.Sequential(\n"
        "        nn.Embedding(vocabulary, 3), nn.Flatten(), nn.Linear(3 * length, num_classes))\n"
    )
    mine = ["--model", f"{file}:net", "--input", "5", "--tokens", "7", "--json"]
    assert fedquilt("cost", *mine).json["params"] == 7 * 3 + 15 * 10 + 10
    assert fedquilt("cost", *mine, "--classes", "2").json["params"] == 7 * 3 + 15 * 2 + 2


# customize


@pytest.mark.parametrize("ending", ["onnx", "pt2", "safetensors"])
def test_customize_writes_a_checked_file(finished, tmp_path, ending):
    path = tmp_path / "new" / f"small.{ending}"
    result = fedquilt("customize", finished[0], "--width", "0.25", "--out", path, "--json")
    assert result.code == 0, result.err
    facts = result.json
    assert (facts["path"], facts["width"], facts["params"]) == (str(path), 0.25, 54)
    assert facts["checked"] is True
    assert facts["bytes"] == path.stat().st_size
    assert set(facts["input"]["scale"]) == {"mean", "std"}
    outputs = _outputs(path)
    assert outputs is None or outputs.shape == (5, 10)  # any number of examples


def _outputs(path):
    inputs = torch.rand(5, 1, 8, 8)
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(inputs)
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        return session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
    assert load_file(path)["0.weight"].shape == (2, 1, 3, 3)
    return None


def test_a_model_is_taken_away_with_what_its_inputs_went_through(tmp_path):
    chain = '["Resize(6)", "RandomCrop(4)", "HorizontalFlip(0.5)"]'
    settings = ["--set", f"data.transforms={chain}", "--clients", "2", "--rounds", "1"]
    model = ["--model", "mlp", "--set", "model.hidden=[4]", "--workers", "0"]
    folder, path = tmp_path / "run", tmp_path / "small.safetensors"
    assert fedquilt("train", *settings, *model, "--out", folder).code == 0
    asked = ["customize", folder, "--out", path]
    told = "feed it images / 255, after Resize(size=6, mode='bilinear'), CenterCrop(size=4), less "
    assert told in " ".join(fedquilt(*asked).out.split())
    facts = fedquilt(*asked, "--json").json["input"]
    assert facts["transforms"] == ["Resize(size=6, mode='bilinear')", "CenterCrop(size=4)"]
    assert facts["shapes"] == [[1, 1, 4, 4]]
    again = fedquilt("evaluate", folder, "--workers", "0", "--json")
    assert again.code == 0, again.err


def test_customize_says_whose_statistics_an_untrained_size_has(finished, tmp_path):
    path = tmp_path / "small.safetensors"
    result = fedquilt("customize", finished[0], "--width", "0.2", "--out", path)
    assert "no client trained width 0.2" in result.out
    assert "statistics of width 0.25" in result.out
    assert "compared" in result.out


def test_customize_meets_limits(finished, tmp_path):
    path = tmp_path / "small.safetensors"
    asked = ["--params", "100", "--upload", "2000", "--out", path, "--json"]
    facts = fedquilt("customize", finished[0], *asked).json
    assert 54 <= facts["params"] <= 100


def test_customize_takes_a_robustness(dialled, tmp_path):
    path = tmp_path / "small.safetensors"
    asked = ["--width", "0.5", "--robustness", "0.3", "--out", path]
    facts = fedquilt("customize", dialled, *asked, "--json").json
    assert (facts["width"], facts["robustness"], facts["family"]) == (0.5, 0.3, None)
    assert facts["needs_batches"] is False
    assert facts["statistics_of"] is None
    text = fedquilt("customize", dialled, *asked).out
    assert "width 0.5, robustness 0.3" in text
    assert "beware" not in text


def test_customize_writes_a_family(dialled, tmp_path):
    import onnxruntime

    path = tmp_path / "family.onnx"
    result = fedquilt("customize", dialled, "--family", "--out", path, "--json")
    assert result.code == 0, result.err
    facts = result.json
    assert facts["family"] == {"has_robustness": True, "widths": [0.5, 1.0]}
    assert (facts["robustness"], facts["checked"]) == (None, True)
    session = onnxruntime.InferenceSession(path)
    kept = json.loads(session.get_modelmeta().custom_metadata_map["fedquilt"])
    assert kept["family"] == facts["family"]
    image, dial = session.get_inputs()
    feed = {image.name: np.zeros((5, 1, 8, 8), np.float32), dial.name: np.array(0.7, np.float32)}
    assert session.run(["logits_by_width"], feed)[0].shape == (2, 5, 10)


def test_a_family_is_described_in_words(dialled, tmp_path):
    text = fedquilt("customize", dialled, "--family", "--out", tmp_path / "a.pt2").out
    assert "widths 0.5, 1 as rows of the output" in text
    assert "input 'robustness'" in text


def test_customize_refuses_points_and_families_that_a_run_does_not_have(
    finished, dialled, tmp_path
):
    out = ["--out", tmp_path / "a.onnx"]
    asked = ["customize", finished[0], *out]
    assert_refused(fedquilt(*asked, "--robustness", "0.5"), "no robustness to choose")
    assert_refused(fedquilt(*asked, "--family"), "several widths or a robustness dial")
    asked = ["customize", dialled, *out]
    assert_refused(fedquilt(*asked, "--width", "0.4"), "one base of width 0.5, got width 0.4")
    assert list(tmp_path.iterdir()) == []


def test_customize_refuses_a_file_that_it_cannot_write(finished, tmp_path):
    result = fedquilt("customize", finished[0], "--width", "0.25", "--out", tmp_path / "a.txt")
    assert_refused(result, "'.txt'", ".onnx")
    assert list(tmp_path.iterdir()) == []


# bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--data", "digit"], ["'digit'", "did you mean 'digits'?"]),
        (["train", "--data", "no/such.npz"], ["does not exist"]),
        (["train", "--method", "hetero"], ["did you mean 'heterofl'?"]),
        (["train", "--model", "heterofl-cn"], ["did you mean 'heterofl-cnn'?"]),
        (["train", "--model", "nowhere.py:net"], ["nowhere.py", "does not exist"]),
        (["train", "--partition", "idd"], ["did you mean 'iid'?"]),
        (["train", "--budgets", "1,0"], ["(0, 1]", "got 0"]),
        (["train", "--budgets", "2"], ["(0, 1]", "got 2"]),
        (["train", "--budgets", "z1"], ["'z1'"]),
        (["train", "--method", "splitmix", "--budgets", "1,0.1"], ["not train even one base"]),
        (["train", "--method", "depthfl", "--budgets", "1,0.1"], ["no size meets", "width=0.1"]),
        (["train", "--method", "lg-fedavg", "--set", "method.shared=['x']"], ["names no tensor"]),
        (["train", "--rounds", "0"], ["'rounds'", "got 0"]),
        (["train", "--rounds", "many"], ["'many'", "train --help"]),
        (["train", "--fraction", "1.5"], ["'method.fraction'", "got 1.5"]),
        (["train", "--clients", "5000"], ["every client needs an example", "5000"]),
        (["train", "--set", "local_training.epocs=2"], ["did you mean 'local_training.epochs'?"]),
        (["train", "--set", "method.scalar=true"], ["did you mean 'method.scaler'?"]),
        (["train", "--set", "model.norn=group"], ["did you mean 'model.norm'?"]),
        (["train", "--set", "model.norm=grup"], ["'grup'", "group"]),
        (["train", "--set", "data.augment=flop"], ["'flop'", "crop-flip"]),
        (["train", "--set", "epochs"], ["NAME=VALUE"]),
        (["train", "none.toml"], ["none.toml", "does not exist"]),
        (["train", "--rond", "3"], ["--rond", "--rounds"]),
        (["cost", "--model", "resnet19"], ["'resnet19'", "preresnet18"]),
        (["cost", "--model", "mlp", "--width", "0"], ["(0, 1]", "got 0"]),
        (["cost", "--model", "mlp", "--width", "-1"], ["(0, 1]", "got -1"]),
        (["cost", "--model", "mlp", "--width", "2"], ["(0, 1]", "got 2"]),
        (["cost", "--model", "mlp", "--width", "nan"], ["(0, 1]", "got nan"]),
        (["cost", "--model", "mlp", "--width", "half"], ["'half'"]),
        (["cost", "--model", "mlp", "--input", "a,b"], ["'a,b'"]),
        (["cost", "--model", "mlp", "--input", "1,8,8", "--data", "digits"], ["leave out --input"]),
        (["cost"], ["--model", "cost --help"]),
        (["customize", "nowhere", "--width", "0", "--out", "a.pt2"], ["(0, 1]", "got 0"]),
        (["customize", "nowhere", "--width", "2", "--out", "a.pt2"], ["(0, 1]", "got 2"]),
        (["customize", "a", "--robustness", "2", "--out", "a.pt2"], ["from 0", "to 1", "got 2"]),
        (
            ["customize", "a", "--robustness", ".5", "--family", "--out", "a.pt2"],
            ["leave out --robustness"],
        ),
        (["evaluate", "nowhere", "--widths", "-1"], ["(0, 1]", "got -1"]),
        (["evaluate", "nowhere", "--robustness", "0,2"], ["from 0", "to 1", "got 2"]),
        (["evaluate", "nowhere", "--robustness", "much"], ["'much'"]),
        (["evaluate", "nowhere", "--epsilon", "8/255"], ["--epsilon", "add --attack"]),
        (["evaluate", "nowhere", "--attack", "--epsilon", "1/0"], ["8/255", "'1/0'"]),
        (["evaluate", "nowhere", "--attack", "--epsilon", "-1"], ["epsilon >= 0"]),
        (["evaluate", "nowhere", "--attack", "--steps", "0"], ["steps >= 1"]),
        (["evaluate", "nowhere"], ["nowhere"]),
        (["report", "nowhere", "--target", "40"], ["(0, 1]", "got 40", "write 40 % as 0.4"]),
        (["report", "nowhere", "--target", "most"], ["'most'", "report --help"]),
        (["trian"], ["'trian'"]),
    ],
)
def test_bad_input_is_refused_with_one_sentence(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(fedquilt(*arguments), *words)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


IMAGES = np.zeros((20, 8, 8), np.uint8)
LABELS = np.arange(20) % 10


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x_train": IMAGES, "y_train": LABELS}, ["lacks x_test, y_test"]),
        (
            {"x_train": IMAGES, "y_train": LABELS - 1, "x_test": IMAGES, "y_test": LABELS},
            ["y_train", "-1 to 8"],
        ),
        (
            {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES, "y_test": LABELS + 5},
            ["y_test", "10, 11"],
        ),
    ],
)
def test_unusable_data_is_refused(arrays, words, tmp_path):
    np.savez(tmp_path / "mine.npz", **arrays)
    before = contents(tmp_path)
    out = tmp_path / "run"
    assert_refused(fedquilt("train", "--data", tmp_path / "mine.npz", "--out", out), *words)
    assert contents(tmp_path) == before


def test_a_directory_that_holds_a_run_or_other_files_is_left_alone(finished, tmp_path):
    before = contents(finished[0])
    assert_refused(fedquilt("train", *TINY, "--out", finished[0]), "already holds a run")
    assert contents(finished[0]) == before
    (tmp_path / "thesis.tex").write_text("years of work")
    assert_refused(fedquilt("train", *TINY, "--out", tmp_path), "not empty")
    assert_refused(fedquilt("train", *TINY, "--out", tmp_path / "thesis.tex"), "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


# code


@pytest.fixture
def foreign(finished, copied, tmp_path):
    """A directory of somebody else, whose model is a file that leaves word when it runs."""
    trace, file = tmp_path / "it-ran", tmp_path / "theirs.py"
    file.write_text(f"open({str(trace)!r}, 'w').close()\n" + NET)
    config = copied / "config.toml"
    mine = re.search(r'^name = "(.*mine\.py:net)"', config.read_text(), re.MULTILINE)[1]
    config.write_text(config.read_text().replace(mine, f"{file}:net"))
    path = copied / "model" / "bundle.json"
    about = json.loads(path.read_text())
    about["config"]["model"]["name"] = f"{file}:net"
    about.pop("digest", None)
    write_document(path, about)
    return copied, mine, trace


def commands(folder, tmp_path):
    return {
        "customize": ["customize", folder, "--out", tmp_path / "x.safetensors"],
        "evaluate": ["evaluate", folder],
        "report": ["report", folder, "--out", tmp_path / "page"],
        "finished": ["train", "--resume", folder],
        "resume": ["train", "--resume", folder, "--rounds", "3"],
    }


@pytest.mark.parametrize("name", commands("", Path()))
def test_code_that_a_directory_names_does_not_run(foreign, tmp_path, name):
    folder, _, trace = foreign
    before = contents(folder)
    result = fedquilt(*commands(folder, tmp_path)[name], trust=False)
    assert_refused(result, "names code as its model", "theirs.py:net", "--trust")
    assert not trace.exists()
    assert contents(folder) == before
    fedquilt(*commands(folder, tmp_path)[name], trust=True)
    assert trace.exists()


@pytest.mark.parametrize("name", ["customize", "evaluate", "report"])
def test_code_that_the_user_names_runs_instead_of_the_directorys(foreign, tmp_path, name):
    folder, mine, trace = foreign
    result = fedquilt(*commands(folder, tmp_path)[name], "--model", mine, trust=False)
    assert result.code == 0, result.err
    assert not trace.exists()


def test_a_run_is_resumed_with_the_code_that_the_user_names(finished, copied):
    file = re.search(r'^name = "(.*mine\.py:net)"', (copied / "config.toml").read_text(), re.M)[1]
    asked = ["train", "--resume", copied, "--rounds", "3", "--model", file]
    result = fedquilt(*asked, trust=False)
    assert result.code == 0, result.err


def test_a_finished_runs_settings_do_not_let_its_bundle_name_code(foreign, finished, tmp_path):
    folder, mine, trace = foreign
    (folder / "config.toml").write_bytes((finished[0] / "config.toml").read_bytes())
    result = fedquilt("train", "--resume", folder, "--model", mine, trust=False)
    assert result.code == 0, result.err
    assert not trace.exists()


def test_a_damaged_model_is_refused(copied):
    (copied / "model" / "params.safetensors").write_bytes(b"not what was written")
    assert_refused(fedquilt("evaluate", copied), "damaged")
    write_document(copied / "model" / "bundle.json", {"format": "something else"})
    assert_refused(fedquilt("evaluate", copied), "not a bundle")


def test_unexpected_problems_keep_their_traceback(monkeypatch):
    def broken(config):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("fedquilt.cli.train.load_source", broken)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        main(["train"])


def test_report_writes_a_page_with_clients_and_trade_offs(dialled, finished, tmp_path):
    run = shutil.copytree(dialled, tmp_path / "dialled")
    points = ["--robustness", "0,1", "--attack", "--steps", "1", "--widths", "1,0.5"]
    assert fedquilt("evaluate", run, *points, "--workers", "0").code == 0
    result = fedquilt(
        "report", run, finished[0], "--out", tmp_path / "page", "--workers", "0", "--json"
    )
    assert result.code == 0, result.err
    paths = json.loads(result.out)
    page = Path(paths["page"])
    figures = page.read_text().partition('id="figure-data">')[2].partition("</script>")[0]
    titles = [figure["title"] for figure in json.loads(figures)]
    assert {"Robust against standard accuracy", "Clients", "Coverage of a"} < set(titles)
    assert len(titles) == len(list(page.parent.glob("*.png"))) >= 11
    data = json.loads(Path(paths["data"]).read_text())
    assert set(data) == {"dialled", "a"}
    assert len(data["dialled"]["scores"]) == 4
    assert all(s["robust_accuracy"] is not None for s in data["dialled"]["scores"])
    assert len(data["dialled"]["clients"]) == 3
    assert all(c["params_per_round"] > 0 for c in data["dialled"]["clients"])


def read_local_accuracies(clients):
    """What each client of a record says about its own model."""
    metrics = clients["metrics"]
    pairs = zip(metrics["right"], metrics["tested"], strict=True)
    return {str(c): right / count for c, (right, count) in zip(clients["id"], pairs, strict=True)}


def test_clients_test_their_own_models_and_the_report_tells(tmp_path):
    runs = {name: tmp_path / name for name in ("fedavg", "adds")}
    for name, folder in runs.items():
        asked = ["--method", name, "--rounds", "2", "--evaluate-every", "1", "--workers", "0"]
        chosen = ["--partition", "dirichlet:0.5", "--fraction", "1", "--test-locally"]
        result = fedquilt("train", *TINY, *asked, *chosen, "--out", folder)
        assert result.code == 0, result.err
        assert re.search(
            r"round 2/2 · loss [\d.]+ · local accuracy [\d.]+% · 4 clients", result.out
        )
        assert "test_locally = true" in (folder / "config.toml").read_text()
    targets = ["--target", "0.01", "--target", "1.0"]
    page = tmp_path / "page"
    result = fedquilt("report", *runs.values(), *targets, "--out", page, "--workers", "0")
    assert result.code == 0, result.err
    text = (page / "index.html").read_text()
    for words in ("Rounds to a target", "In the mean over clients"):
        assert f"<h3>{words}" in text
    assert '"title": "Sampling rates of adds"' in text
    data = json.loads((page / "report.json").read_text())
    for name, folder in runs.items():
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        rounds = [read_local_accuracies(line["clients"]) for line in lines if "clients" in line]
        assert data[name]["local"] == rounds[-1]  # everybody took part
        means = [sum(found.values()) / 4 for found in rounds]
        assert [t["accuracy"] for t in data[name]["local_tests"]] == pytest.approx(means)
        first, never = data[name]["targets"]
        assert (first["rounds"], first["local_rounds"], never["rounds"]) == (1, 1, None)
        assert first["speed_up"] == (None if name == "fedavg" else 1.0)
    assert len(data["adds"]["compressions"]) == 4
    assert data["fedavg"]["compressions"] == data["fedavg"]["rates"] == []
    assert 0 < data["adds"]["mean_shares"]["params"] < 1 == data["fedavg"]["mean_shares"]["params"]


def test_report_refuses_what_is_no_run(tmp_path):
    result = fedquilt("report", tmp_path, "--out", tmp_path / "page")
    assert result.code == 2
    assert "is not a run's directory" in result.err
    assert not (tmp_path / "page").exists()


OWN_TASK = """
import fedquilt as fq
from torch import nn


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


def loss(output, target):
    return (output[:, 0] - target).square().mean()


@fq.metric(higher_is_better=False)
def error(output, target):
    return (output[:, 0] - target).abs()
"""


def test_a_run_with_its_own_loss_is_evaluated_as_it_was_trained(tmp_path):
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    np.savez(tmp_path / "d.npz", x_train=x, y_train=x.sum(1), x_test=x, y_test=x.sum(1))
    code, out = tmp_path / "own.py", tmp_path / "run"
    code.write_text(OWN_TASK)
    task = ("--loss", f"{code}:loss", "--metrics", f"{code}:error,mae")
    small = ("--rounds", "1", "--clients", "2", "--budgets", "1,0.5", "--workers", "0")
    data = ("--data", tmp_path / "d.npz", "--model", f"{code}:net")
    result = fedquilt("train", *data, *task, *small, "--out", out, "--json")
    assert result.code == 0, result.err
    again = fedquilt("evaluate", out, "--json")
    assert again.code == 0, again.err
    trained, evaluated = (json.loads(found.out)["sizes"] for found in (result, again))
    assert [size["error"] for size in trained] == [size["error"] for size in evaluated]
    refused = fedquilt("evaluate", out, "--model", f"{code}:net", trust=False)
    assert refused.code != 0
    assert "add --trust" in refused.err
