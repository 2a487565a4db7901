"""Clients in one pass on real processes: which go together, and what happens if one misbehaves."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.test_local import Drift, bits, tasks

from fedquilt.engines.dispatch import MAX_TRIES, TaskQueue
from fedquilt.engines.stacks import PassSizes, divide
from fedquilt.engines.worker import Timeouts, WorkerProblem, WorkRequest
from fedquilt.errors import ConfigError, CorruptFileError
from fedquilt.federation.client import Failure
from fedquilt.files import write_document
from fedquilt.training.stack.layers import UnstackableError
from fedquilt.training.stack.trial import Trial


@dataclass(frozen=True)
class Together(Drift):
    """Says how many clients were in the pass, and by whom it was tried."""

    most: int = 3
    log: str = ""

    def stack_key(self, task):
        return "one"

    def try_stacking(self, task, context, counts):
        if self.log:
            with Path(self.log).open("a") as file:
                print(task.client, counts, file=file)
        if self.most == 1:
            raise UnstackableError("it has no rule")
        return Trial(self.most, {1: 0.002, 3: 0.001})

    def run_stacked(self, tasks, contexts):
        results = [self.run(task, context) for task, context in zip(tasks, contexts, strict=True)]
        return [
            replace(r, update=replace(r.update, metrics={**r.update.metrics, "pass": len(tasks)}))
            for r in results
        ]


def run(engine, recipe, workers, clients_per_pass, count=8, **more):
    """Results and the number of clients in the pass of each, 1 for those that work alone."""
    with engine(workers, clients_per_pass=clients_per_pass, **more) as made:
        results = list(made.run(tasks(recipe, count)))
    sizes = [0 if isinstance(r, Failure) else r.metrics.get("pass", 1) for r in results]
    return bits(results), sizes


@given(st.integers(1, 70), st.integers(1, 20))
def test_stacks_are_at_most_as_large_as_allowed_and_nearly_equal(count, most):
    stacks = divide(range(count), most)
    assert [number for stack in stacks for number in stack] == list(range(count))
    sizes = {len(stack) for stack in stacks}
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert count < 4 or len(stacks) % 2 == 0 or most == 1


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_clients_of_one_shape_work_in_one_pass_on_any_number_of_workers(engine, workers):
    """Every other client has a narrow subnet, so that stacks are of clients 0, 2, 4 and so on."""
    alone, _ = run(engine, Drift(), 0, 1)
    found, sizes = run(engine, Together(), workers, 2)
    assert found == alone
    assert sizes == [2] * 8
    found, sizes = run(engine, Together(), workers, 1)
    assert (found, sizes) == (alone, [1] * 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_how_many_work_in_one_pass_is_tried_once_for_each_size(engine, tmp_path, workers):
    chosen = []
    with engine(workers, clients_per_pass="auto") as made:
        made.pass_sizes.on_change = lambda kind, size: chosen.append((kind, size.clients))
        for count in (8, 6, 7):
            results = list(made.run(tasks(Together(log=str(tmp_path / "log")), count)))
    assert sorted(chosen) == [("16", 3), ("8", 3)]
    assert sorted((tmp_path / "log").read_text().split("\n")) == [
        "",
        "0 (4, 8, 16)",
        "1 (4, 8, 16)",
    ]
    assert [r.metrics.get("pass", 1) for r in results] == [2, 3, 2, 3, 2, 3, 2]


def test_what_cannot_work_in_one_pass_works_alone_and_says_why(engine):
    with engine(0, clients_per_pass=4) as made:
        results = list(made.run(tasks(Together(most=1), 6)))
    assert ["pass" in r.metrics for r in results] == [False] * 6
    assert {(s.clients, s.reason) for s in made.pass_sizes.chosen.values()} == {
        (1, "it has no rule")
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_client_that_raises_fails_alone(engine, tmp_path, workers):
    alone, _ = run(engine, Drift(), 0, 1)
    recipe = Together(str(tmp_path), culprit=2, times=9, how="raise")
    found, _ = run(engine, recipe, workers, 4)
    assert isinstance(found[2], Failure)
    assert "no coffee left" in found[2].reason
    assert [r for i, r in enumerate(found) if i != 2] == [r for i, r in enumerate(alone) if i != 2]


@pytest.mark.parametrize(("times", "has_failed"), [(1, False), (2, False), (3, True)])
def test_a_pass_whose_worker_dies_is_done_again_and_then_each_client_alone(
    engine, tmp_path, times, has_failed
):
    alone, _ = run(engine, Drift(), 0, 1)
    recipe = Together(str(tmp_path), culprit=2, times=times, how="kill")
    found, sizes = run(engine, recipe, 2, 4)
    assert isinstance(found[2], Failure) == has_failed
    assert [r for i, r in enumerate(found) if i != 2] == [r for i, r in enumerate(alone) if i != 2]
    assert sizes[1::2] == [2] * 4  # the narrow clients are another pass
    assert (2 in sizes[0:4:2]) == (times == 1)


def test_a_late_pass_is_done_again_with_each_client_alone(engine, tmp_path):
    alone, _ = run(engine, Drift(), 0, 1, 4)
    recipe = Together(str(tmp_path), culprit=2, times=1, how="long")
    found, _ = run(engine, recipe, 1, 4, 4, timeouts=Timeouts(deadline=0.5))
    assert found == alone


def request(number: int, stack: tuple[int, ...] = ()) -> WorkRequest:
    path = Path()
    return WorkRequest(number, number, (), None, 0, path, None, path, path, stack)  # type: ignore[arg-type]


def make_queue() -> TaskQueue:
    stacks = {0: [(0, 2, 4), (1, 3)]}
    queue = TaskQueue(6, lambda number: 1.0, 1, lambda start: stacks.get(start, []))
    for number in range(6):
        stack = next((s for s in [(0, 2, 4), (1, 3)] if number in s), ())
        queue.requests[number] = request(number, stack)
    return queue


def test_a_queue_gives_out_each_stack_once():
    queue = make_queue()
    taken = [queue.find_stack(queue.take_next()) for _ in range(queue.num_waiting)]
    assert taken == [(0, 2, 4), (1, 3), (5,)]  # the largest first


def test_a_stack_that_was_answered_in_part_is_done_again_one_by_one():
    queue = make_queue()
    for _ in range(3):
        queue.take_next()
    sent = [queue.requests[number] for number in (2, 4, 1, 3, 5)]  # client 0 has answered
    queue.put_back_requests(sent)
    taken = [queue.find_stack(queue.take_next()) for _ in range(queue.num_waiting)]
    assert taken == [(2,), (4,), (1, 3), (5,)]
    assert queue.requests[4].stack == ()


def test_a_stack_is_tried_as_often_as_a_client_and_then_each_of_it_once():
    queue = make_queue()
    stack = [queue.requests[number] for number in (0, 2, 4)]
    for _ in range(3):
        queue.take_next()
    for _ in range(MAX_TRIES - 1):
        queue.retry_or_fail(stack, None, -9)
        assert queue.find_stack(queue.take_next()) == (0, 2, 4)
    queue.retry_or_fail(stack, None, -9)
    assert [queue.find_stack(queue.take_next()) for _ in range(3)] == [(0,), (2,), (4,)]
    queue.retry_or_fail([queue.requests[2]], WorkerProblem("it was silent", is_late=False), None)
    assert queue.has_result(2)
    assert not queue.has_result(0)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "many", None])
def test_a_wrong_number_of_clients_is_refused_in_one_sentence(wrong):
    with pytest.raises(ConfigError, match=r"at least 1, 'auto', or the passes.json .*got "):
        PassSizes(wrong)


def test_choices_of_another_run_are_taken_over(engine, tmp_path):
    with engine(0, clients_per_pass="auto") as made:
        list(made.run(tasks(Together(), 8)))
    path = tmp_path / "passes.json"
    write_document(path, made.pass_sizes.describe())
    recipe = Together(log=str(tmp_path / "log"))
    with engine(0, clients_per_pass=str(path)) as other:
        results = list(other.run(tasks(recipe, 8)))
    assert other.pass_sizes.chosen == made.pass_sizes.chosen
    assert {r.metrics["pass"] for r in results} == {2}
    assert not (tmp_path / "log").exists()  # nothing was tried
    path.write_text(json.dumps({"sizes": 3}))
    with pytest.raises(CorruptFileError):
        PassSizes(str(path))
    write_document(path, {"other": 3})
    with pytest.raises(CorruptFileError, match=r"wants the passes.json of a run"):
        PassSizes(str(path))
