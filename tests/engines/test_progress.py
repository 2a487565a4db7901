"""How far clients are, as the local engine tells it."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedquilt.engines import client_work, worker
from fedquilt.federation.client import ClientResult, Failure, Task, Update
from fedquilt.structure.subnet import Subnet

PARAMS = {"weight": torch.arange(12.0).view(4, 3), "bias": torch.ones(4)}
CLIENTS = (7, 3, 9, 5, 8)  # not the numbers of their tasks
STASH = []  # what a recipe leaves behind in its process


@dataclass(frozen=True)
class Telling:
    """A recipe that tells some shares, each client its own, and does nothing else."""

    shares: tuple[float, ...] = (0.25, 0.5, 0.75)

    def run(self, task, context):
        for share in self.shares:
            context.report_progress(share + task.client / 100)
        return done(task)


@dataclass(frozen=True)
class Heard:
    """A recipe that goes on when it has been heard, or dies if it is the culprit."""

    folder: str
    culprit: int = -1
    times: int = 0

    def run(self, task, context):
        folder = Path(self.folder)
        word = folder / f"attempts-{task.client}"
        with word.open("a") as file:
            file.write("x")
        attempt = len(word.read_text())
        context.report_progress(0.25)
        wait_for((folder / f"heard-{task.client}-{attempt}").exists)
        if task.client == self.culprit and attempt <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        context.report_progress(0.5)
        return done(task)


@dataclass(frozen=True)
class Flood:
    """A recipe that tells much too often."""

    calls: int = 100_000

    def run(self, task, context):
        for number in range(self.calls):
            context.report_progress(number / self.calls)
        return done(task)


@dataclass(frozen=True)
class Late:
    """A recipe that tells something in the name of the client before."""

    def run(self, task, context):
        for listener in STASH:
            listener(0.9)
        STASH.append(context.report_progress)
        return done(task)


def done(task: Task) -> ClientResult:
    return ClientResult(Update(task.client, (), (), 1.0, {}))


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def tasks(recipe: object, clients: Sequence[int] = CLIENTS) -> list[Task]:
    return [Task(c, (Subnet(),), PARAMS, recipe, seed=0) for c in clients]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words need not wait for each other."""
    monkeypatch.setattr(client_work, "MIN_REPORT_SECONDS", 0.0)


@pytest.fixture
def told() -> dict[int, list[float]]:
    return defaultdict(list)


@pytest.fixture
def listening(engine, told):
    """Makes engines that write down what they tell."""

    def make(workers):
        made = engine(workers)
        made.on_progress = lambda client, share: told[client].append(share)
        return made

    return make


@pytest.mark.parametrize("workers", [0, 2])
def test_each_client_tells_its_own_shares_before_its_result(listening, told, at_once, workers):
    results = []
    for result in listening(workers).run(tasks(Telling())):
        results.append(result.client)
        expected = [s + result.client / 100 for s in (0.25, 0.5, 0.75)]
        assert told[result.client] == [*expected, 1.0]  # the last, as the result may have waited
    assert results == list(CLIENTS)
    assert set(told) == set(CLIENTS)
    assert all(len(shares) == 4 for shares in told.values())  # and nothing after it


@pytest.mark.parametrize("workers", [0, 2])
def test_a_client_is_heard_while_it_works(engine, at_once, tmp_path, workers):
    made = engine(workers)
    made.on_progress = lambda client, _: (tmp_path / f"heard-{client}-1").touch()
    assert [r.client for r in made.run(tasks(Heard(str(tmp_path))))] == list(CLIENTS)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hundred_thousand_calls_are_a_hundred_messages(
    listening, told, at_once, monkeypatch, workers
):
    messages, receive = [], worker._receive

    def counted(pipe):
        messages.append(receive(pipe))
        return messages[-1]

    monkeypatch.setattr(worker, "_receive", counted)
    made = listening(workers)
    assert len(list(made.run(tasks(Flood(), (1, 2))))) == 2
    for client in (1, 2):
        assert 50 < len(told[client]) <= 101
        assert told[client] == sorted(set(told[client]))
    num_words = sum(map(len, told.values()))
    assert len(messages) == (num_words + 2 if workers else 0)  # and an answer each


@pytest.mark.parametrize("workers", [0, 2])
def test_at_most_four_words_a_second(listening, told, monkeypatch, workers):
    milliseconds = iter(range(10**9))  # one goes by whenever somebody looks
    clock = SimpleNamespace(monotonic=lambda: next(milliseconds) / 1000)
    monkeypatch.setattr(client_work, "time", clock)
    monkeypatch.setattr(client_work, "MIN_REPORT_STEP", 0.0)
    list(listening(workers).run(tasks(Flood(10_000), (1,))))
    assert 30 <= len(told[1]) <= 40 + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_quick_work_is_not_worth_a_word(listening, told, monkeypatch, workers):
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: 5.0))
    assert len(list(listening(workers).run(tasks(Telling())))) == len(CLIENTS)
    assert not told


@pytest.mark.parametrize("workers", [0, 2])
def test_shares_rise_to_one_whatever_a_recipe_says(listening, told, at_once, workers):
    shares = (0.5, float("nan"), 0.3, -1.0, 0.5, 7.0, float("inf"))
    list(listening(workers).run(tasks(Telling(shares), (0,))))
    assert told == {0: [0.5, 1.0]}


def test_a_client_whose_worker_died_starts_again_from_nothing(engine, told, at_once, tmp_path):
    found = list(hearing(engine(2), told, tmp_path).run(tasks(Heard(str(tmp_path), 9, times=1))))
    assert [r.client for r in found] == list(CLIENTS)
    assert all(isinstance(r, Update) for r in found)
    assert told.pop(9) == [0.25, 0.25, 0.5, 1.0]
    assert list(told.values()) == [[0.25, 0.5, 1.0]] * 4


def test_a_client_that_loses_two_workers_fails_though_it_was_heard(engine, told, at_once, tmp_path):
    found = list(hearing(engine(2), told, tmp_path).run(tasks(Heard(str(tmp_path), 9, times=9))))
    assert [r.client for r in found] == list(CLIENTS)
    assert [r.client for r in found if isinstance(r, Failure)] == [9]
    assert "SIGKILL twice" in found[2].reason
    assert told.pop(9) == [0.25, 0.25]
    assert list(told.values()) == [[0.25, 0.5, 1.0]] * 4


def hearing(made, told, folder):
    def on_progress(client, share):
        told[client].append(share)
        (folder / f"heard-{client}-{told[client].count(0.25)}").touch()

    made.on_progress = on_progress
    return made


def test_words_about_work_that_was_answered_are_not_passed_on(listening, told, at_once):
    assert len(list(listening(1).run(tasks(Late())))) == len(CLIENTS)
    assert not told
    assert not STASH  # it was the worker's


def test_a_client_that_is_done_has_no_more_to_tell(listening, told, at_once):
    contexts = []

    class Leaving(Telling):
        def run(self, task, context):
            contexts.append(context)
            return super().run(task, context)

    results = listening(0).run(tasks(Leaving((0.5,)), (0, 1)))
    next(results)
    contexts[0].report_progress(0.9)
    assert told == {0: [0.5, 1.0]}
    list(results)
    assert told == {0: [0.5, 1.0], 1: [0.51, 1.0]}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_problem_of_the_one_who_is_told_is_no_failure_of_the_client(engine, at_once, workers):
    def on_progress(client, share):
        raise ZeroDivisionError

    made = engine(workers)
    made.on_progress = on_progress
    with pytest.raises(ZeroDivisionError):
        list(made.run(tasks(Telling())))
    made.on_progress = lambda client, share: None
    assert [r.client for r in made.run(tasks(Telling()))] == list(CLIENTS)


def test_workers_that_are_left_in_mid_sentence_end_quietly(listening, at_once, monkeypatch, capfd):
    monkeypatch.setattr(client_work, "MIN_REPORT_STEP", 0.0)  # more words than fit into the pipe
    made = listening(1)
    results = made.run(tasks(Flood(), (1, 2)))
    made.on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert not capfd.readouterr().err


def interrupt(client, share):
    raise KeyboardInterrupt
