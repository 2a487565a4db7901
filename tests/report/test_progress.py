"""What a watcher of a run sees."""

import io

import pytest
from rich.console import Console

from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.federation.client import Failure
from fedquilt.report.progress import Seen, Watch, picture
from fedquilt.runs.loop import ClientDone, Evaluated, RoundDone, RoundStarted

SCORES = (
    SizeScore(1.0, 100, 1000, 0.9, 0.95, 0.3, 50),
    SizeScore(0.5, 25, 250, 0.8, 0.85, 0.4, 50),
)
FAILURES = (Failure(2, "out of memory"),)
ROUND = (
    RoundStarted(1, "train", 2),
    ClientDone(1),
    ClientDone(2, "out of memory"),
    RoundDone(1, "train", 0.5, 1, FAILURES, 10, 10, 1.5),
    RoundStarted(1, "statistics", 1),
    ClientDone(1),
    Evaluated(1, SCORES, (), 0, 0, False, 0.1),
)


def test_plain_lines_are_one_per_round_evaluation_and_failure():
    file = io.StringIO()
    with Watch(Console(file=file), num_rounds=10) as watch:
        for event in ROUND:
            watch(event)
    assert file.getvalue().splitlines() == [
        "client 2 failed: out of memory",
        "round 1/10: loss 0.5000, 1 clients, 1 failed, 1.5 s",
        "round 1/10: accuracy 90.0% at 1, 80.0% at 0.5",
    ]


def test_long_lines_are_not_broken():
    file = io.StringIO()
    with Watch(Console(file=file, width=20), num_rounds=10) as watch:
        watch(ClientDone(2, "a reason that is longer than twenty letters"))
    assert file.getvalue().count("\n") == 1


def test_the_picture_has_round_phase_clients_loss_accuracy_failures_and_time():
    now = [0.0]
    seen = Seen(10, clock=lambda: now[0])
    for event in ROUND:
        seen.note(event)
    now[0] = 7.0
    console = Console(file=io.StringIO(), width=100)
    console.print(picture(seen))
    shown = console.file.getvalue()
    expected = ["round 1/10", "statistics", "1/1 clients", "loss 0.5000", "1 failed"]
    for words in [*expected, "1:03 left", "90.0% at 1, 80.0% at 0.5"]:
        assert words in shown


def test_time_left_counts_clients_and_only_this_sitting():
    now = [100.0]
    seen = Seen(12, clock=lambda: now[0])
    seen.note(RoundStarted(11, "train", 4))  # resumed after ten rounds
    assert seen.seconds_left is None
    seen.note(ClientDone(0))
    seen.note(ClientDone(1))
    now[0] = 110.0
    assert seen.rounds == 10.5
    assert seen.seconds_left == pytest.approx(30.0)
