"""The order of tasks: the largest first within a window, so that few results wait to be merged."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.test_local import wait_for

from fedquilt.engines import dispatch
from fedquilt.engines.dispatch import TaskQueue
from fedquilt.engines.worker import WorkReply, WorkRequest
from fedquilt.federation.client import ClientResult, Task, Update
from fedquilt.federation.tasks import LazyTasks
from fedquilt.structure.subnet import Subnet

SIZES = st.lists(st.sampled_from([1.0, 2.0, 4.0, 16.0]), max_size=60)


def make_queue(sizes: list[float]) -> TaskQueue:
    return TaskQueue(len(sizes), sizes.__getitem__, 1)


def request(number: int) -> WorkRequest:
    path = Path()
    return WorkRequest(number, number, (), None, 0, path, None, path, path)  # type: ignore[arg-type]


@given(SIZES, st.integers(1, 8), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_window_bounds_the_results_that_wait_and_every_task_is_begun_once(
    sizes: list[float], window: int, workers: int, chance: random.Random
) -> None:
    """Workers finish in any order; whoever merges takes what is next, when it is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "TASKS_PER_WORKER", window)
        queue, at_work, begun, merged = make_queue(sizes), [], [], 0
        while merged < len(sizes):
            while queue.num_waiting and len(at_work) < workers:
                number = queue.take_next()
                queue.requests[number] = request(number)
                begun.append(number)
                at_work.append(number)
                assert number < merged + window
            done = at_work.pop(chance.randrange(len(at_work)))
            queue.add_result(done, WorkReply(done))
            while queue.has_result(merged):
                assert queue.pop_result(merged)[1].number == merged
                merged += 1
            assert sum(map(queue.has_result, range(len(sizes)))) < window
        assert sorted(begun) == list(range(len(sizes)))


@given(SIZES)
def test_a_round_within_the_window_begins_with_the_largest_tasks(sizes: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "TASKS_PER_WORKER", 60)
        queue = make_queue(sizes)
        begun = [queue.take_next() for _ in sizes]
        assert begun == sorted(range(len(sizes)), key=lambda number: -sizes[number])


def test_tasks_that_are_put_back_come_first_and_in_their_order() -> None:
    queue = TaskQueue(6, lambda number: 1.0, 1)
    assert [queue.take_next() for _ in range(3)] == [0, 1, 2]
    queue.put_back([2, 0])
    assert queue.put_back_alone(1)
    assert not queue.put_back_alone(1)
    assert [queue.take_next() for _ in range(5)] == [1, 2, 0, 3, 4]


@dataclass(frozen=True)
class WaitForWord:
    """A recipe whose first client waits until it is told to go on."""

    folder: str

    def run(self, task, context):
        if task.client == 0:
            wait_for((Path(self.folder) / "go").exists)
        params = ({"bias": torch.full((4,), float(task.client))},)
        return ClientResult(Update(task.client, task.subnets, params, 1.0, {}))


def test_no_more_updates_wait_as_files_than_the_window_has_tasks(
    engine, places, tmp_path, monkeypatch
):
    monkeypatch.setattr(dispatch, "TASKS_PER_WORKER", 3)
    window, params = 6, {"bias": torch.zeros(4)}
    subnets = [Subnet(), Subnet.from_channels({"h": [0]})]
    tasks = [
        Task(c, (subnets[c % 7 == 0],), params, WaitForWord(str(tmp_path)), c) for c in range(40)
    ]
    made, most = engine(2), [0]

    def count() -> int:
        most[0] = max(most[0], len(list(places[0].glob("fedquilt-*/update-*"))))
        return most[0]

    def watch() -> None:
        wait_for(lambda: count() >= window - 2)  # a worker may hold one more behind the first
        (tmp_path / "go").touch()

    thread = threading.Thread(target=watch)
    thread.start()
    clients = []
    for update in made.run(tasks):
        clients.append(update.client)
        assert count() < window
        assert update.params[0]["bias"].tolist() == [update.client] * 4
    thread.join()
    assert clients == list(range(40))


def test_tensors_of_one_task_alone_are_written_when_it_begins_and_removed_when_it_is_merged(
    engine, places, tmp_path, monkeypatch
):
    """In a secure sum every client has its own; files for all of them would be there at once."""
    monkeypatch.setattr(dispatch, "TASKS_PER_WORKER", 2)
    (tmp_path / "go").touch()
    tasks = [
        Task(c, (Subnet(),), {"bias": torch.ones(4)}, WaitForWord(str(tmp_path)), c)
        for c in range(20)
    ]
    for _ in engine(2).run(tasks):
        assert len(list(places[1].glob("fedquilt-*/params-*"))) <= 4
    assert not list(places[1].glob("fedquilt-*/params-*"))


def test_tensors_that_are_made_for_each_task_are_not_taken_for_those_of_another(engine):
    """What is freed leaves its id to what is made next."""

    def make(number: int) -> Task:
        params = {"bias": torch.full((4,), float(number))}
        return Task(number, (Subnet(),), params, SendBack(), number)

    updates = list(engine(1).run(LazyTasks(300, make)))
    assert [update.params[0]["bias"].tolist() for update in updates] == [
        [float(number)] * 4 for number in range(300)
    ]


@dataclass(frozen=True)
class SendBack:
    """A recipe that sends back what it got."""

    def run(self, task, context):
        params = ({name: tensor.clone() for name, tensor in task.params.items()},)
        return ClientResult(Update(task.client, task.subnets, params, 1.0, {}))
