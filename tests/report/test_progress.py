"""What a console shows of a run."""

import io

import pytest
from rich.console import Console

from fedquilt.evaluation.scores import SizeScore
from fedquilt.federation.client import Failure
from fedquilt.report.progress import ProgressBar, ProgressState, render_progress
from fedquilt.runs.event_lines import describe_event
from fedquilt.runs.events import (
    ClientDone,
    ClientProgress,
    EnvironmentChanged,
    Evaluated,
    RoundDone,
    RoundStarted,
    RunEnded,
)

SCORES = (
    SizeScore(1.0, 100, 1000, 0.9, 0.95, 0.3, 50),
    SizeScore(0.5, 25, 250, 0.8, 0.85, 0.4, 50),
)
FAILURES = (Failure(2, "out of memory"),)
ROUND = (
    RoundStarted(1, "train", 2, 10),
    ClientDone(1),
    ClientDone(2, "out of memory"),
    RoundDone(1, "train", 0.5, 1, FAILURES, 10, 10, 1.5),
    RoundStarted(1, "statistics", 1, 10),
    ClientDone(1),
    Evaluated(1, SCORES, (), 0, 0, False, 0.1),
)


def shown(state):
    console = Console(file=io.StringIO(), width=100)
    console.print(render_progress(state))
    return console.file.getvalue()


def test_plain_lines_are_one_per_round_evaluation_and_failure():
    file = io.StringIO()
    progress = ProgressBar(Console(file=file), num_rounds=10)
    for event in ROUND:
        progress(event)
    progress(RunEnded("finished"))
    assert file.getvalue().splitlines() == [
        "client 2 failed: out of memory",
        "round 1/10 · loss 0.5000 · 1 client · 1 failed · 1.5 s",
        "round 1/10 · accuracy 90.0% at 1, 80.0% at 0.5",
    ]


@pytest.mark.parametrize("is_live", [False, True])
def test_another_environment_is_reported_on_every_console(is_live):
    class File(io.StringIO):
        def isatty(self):
            return is_live

    file = File()
    console = Console(file=file, force_terminal=is_live, force_interactive=is_live, width=400)
    progress = ProgressBar(console, num_rounds=10)
    progress(EnvironmentChanged(3, "torch 2.6 -> 2.7"))
    progress(RunEnded("finished"))
    assert "after round 3 in another environment (torch 2.6 -> 2.7): the last bits" in (
        file.getvalue()
    )


def test_a_client_that_names_itself_is_named_once():
    assert (
        describe_event(ClientDone(2, "client 2 sent nothing"), 9) == "client 2 failed: sent nothing"
    )


def test_local_accuracy_is_shown_where_clients_tested():
    tested = RoundDone(1, "train", 0.5, 2, (), 10, 10, 1.5, {4: 0.5, 7: 0.75})
    assert describe_event(tested, 10) == (
        "round 1/10 · loss 0.5000 · local accuracy 62.5% · 2 clients · 1.5 s"
    )
    state = ProgressState(10)
    for event in (RoundStarted(1, "train", 2, 10), tested):
        state.update(event)
    assert "local accuracy 62.5%" in shown(state)
    state.update(RoundDone(2, "search", None, 2, (), 10, 10, 1.5))
    assert "local accuracy" not in shown(state)


@pytest.mark.parametrize(
    ("widths", "text"),
    [
        ((1, 0.5, 0.25), "accuracy 60.0% at 1, 50.0% at 0.5, 45.0% at 0.25"),
        ((1, 0.5, 0.25, 0.125, 0.0625), "accuracy 60.0% at 1 to 41.2% at 0.0625, mean 47.8% of"),
    ],
)
def test_lines_about_accuracy_fit_eighty_columns(widths, text):
    scores = tuple(SizeScore(w, 1, 1, 0.4 + 0.2 * w, None, 0.3, 50) for w in widths)
    line = describe_event(Evaluated(100, scores, (), 0, 0, True, 0.1), 100)
    assert text in line
    assert len(line) <= 80


def test_long_lines_are_not_broken():
    file = io.StringIO()
    progress = ProgressBar(Console(file=file, width=20), num_rounds=10)
    progress(ClientDone(2, "a reason that is longer than twenty letters"))
    progress(RunEnded("finished"))
    assert file.getvalue().count("\n") == 1


def test_the_picture_has_round_phase_clients_loss_accuracy_failures_and_time():
    now = [0.0]
    state = ProgressState(10, clock=lambda: now[0])
    for event in ROUND:
        state.update(event)
    now[0] = 7.0
    expected = ["round 1/10", "statistics", "1/1 clients", "loss 0.5000", "1 failed"]
    for words in [*expected, "1:03 left", "90.0% at 1, 80.0% at 0.5"]:
        assert words in shown(state)


def test_time_left_counts_clients_and_only_this_sitting():
    now = [100.0]
    state = ProgressState(12, clock=lambda: now[0])
    state.update(RoundStarted(11, "train", 4, 12))  # resumed after ten rounds
    assert state.seconds_left is None
    state.update(ClientDone(0))
    state.update(ClientDone(1))
    now[0] = 110.0
    assert state.rounds_done == 10.5
    assert state.seconds_left == pytest.approx(30.0)


def test_two_clients_of_ten_that_are_half_done_are_one_of_ten():
    now = [0.0]
    state = ProgressState(4, clock=lambda: now[0])
    state.update(RoundStarted(2, "search", 10, 4))
    for share in (0.2, 0.5):
        state.update(ClientProgress(6, share))
        state.update(ClientProgress(3, share))
    now[0] = 20.0
    assert state.rounds_done == pytest.approx(1.1)
    assert state.seconds_left == pytest.approx(20.0 / 0.1 * 2.9)
    assert "search · 1.0/10 clients" in shown(state)
    state.update(ClientDone(3))
    assert state.rounds_done == pytest.approx(1.15)
    state.update(ClientProgress(6, 0.1))  # its worker died
    assert state.rounds_done == pytest.approx(1.11)
    state.update(ClientDone(6, "out of memory"))
    assert state.rounds_done == pytest.approx(1.2)
    assert "search · 2/10 clients" in shown(state)


def test_shares_of_a_round_do_not_count_in_the_next():
    state = ProgressState(4)
    for event in (
        RoundStarted(1, "search", 2, 4),
        ClientProgress(0, 0.5),
        RoundStarted(2, "a", 2, 4),
    ):
        state.update(event)
    assert state.clients_done == 0


def test_plain_lines_tell_of_long_rounds_now_and_then():
    now, file = [0.0], io.StringIO()
    progress = ProgressBar(Console(file=file), num_rounds=100, clock=lambda: now[0])
    now[0] = 100.0  # what came before the round does not count
    progress(RoundStarted(31, "search", 4, 131))
    for second in range(1, 26):
        now[0] = 100.0 + second
        progress(ClientProgress(4, second / 100))
        progress(ClientProgress(3, min(second / 15, 1.0)))
        progress(ClientProgress(9, 1.0))  # done, but its result has to wait
    progress(RoundStarted(32, "search", 4, 131))
    now[0] += 9.0
    progress(ClientProgress(4, 0.5))
    progress(RunEnded("finished"))
    assert file.getvalue().splitlines() == [
        "round 31/131 (search) · client 3 60%, client 4 10%",
        "round 31/131 (search) · client 4 20%",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_display_is_drawn_ten_times_a_second_at_most_and_prints_no_shares():
    now, file = [0.0], Terminal()
    console = Console(file=file, force_terminal=True, width=100)
    progress = ProgressBar(console, num_rounds=100, clock=lambda: now[0])
    progress(RoundStarted(31, "search", 10, 131))
    for millisecond in range(1, 20_001):
        now[0] = millisecond / 1000
        progress(ClientProgress(3, millisecond / 40_000))
    pictures = file.getvalue().count("10 clients")
    assert "0.5/10 clients" in file.getvalue()
    progress(RunEnded("finished"))
    assert 100 <= pictures <= 201
    assert "client 3" not in file.getvalue()
