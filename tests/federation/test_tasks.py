"""Tasks that are made when they are asked for."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch

import fedquilt as fq
from fedquilt.federation import tasks as planned
from fedquilt.federation.growing import ClientValues
from fedquilt.federation.tasks import LazyTasks, map_tasks, plan_each

STEPS = fq.LocalTraining(epochs=1, batch_size=2, max_grad_norm=None)
RECIPE = fq.LocalSGD(STEPS, lr=0.1)


def make_task(number: int) -> fq.Task:
    return fq.Task(number, (fq.Subnet(),), {}, RECIPE, seed=number)


def test_a_task_that_several_parts_of_a_round_ask_for_is_made_once():
    made: Counter[int] = Counter()

    def make(row: int) -> fq.Task:
        made[row] += 1
        return make_task(row)

    tasks = LazyTasks(3 * planned.NUM_READY, make)
    behind = iter(tasks)
    for row, task in enumerate(tasks):  # the second reader is not further behind than a window
        if row >= planned.NUM_READY // 2:
            assert next(behind) is tasks[row - planned.NUM_READY // 2]
        assert task.client == row
    assert set(made.values()) == {1}


def test_tasks_are_changed_one_by_one_and_keep_their_order():
    clients = [fq.Client(number, num_examples=1) for number in (3, 5, 8)]
    tasks = plan_each(clients, lambda client: make_task(client.id))
    changed = map_tasks(lambda task: make_task(task.client + 1), tasks)
    assert [task.client for task in changed] == [4, 6, 9]
    assert [task.client for task in changed[1:]] == [6, 9]
    with pytest.raises(IndexError):
        changed[3]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_round_holds_a_window_of_its_tasks_and_no_subnets_twice(workers, monkeypatch):
    """With a list of all tasks, or of all updates, 60 would be there at the end."""
    monkeypatch.setattr(planned, "NUM_READY", 4)
    alive: weakref.WeakSet[fq.Task] = weakref.WeakSet()
    most, rounds = [0], []

    class Noting(fq.HeteroFL):
        def plan_training(self, setup, state, cohort):
            def note(task: fq.Task) -> fq.Task:
                alive.add(task)
                return task

            return map_tasks(note, super().plan_training(setup, state, cohort))

    def watch(event: fq.Event) -> None:
        if isinstance(event, fq.ClientDone):
            most[0] = max(most[0], len(alive))
        if isinstance(event, fq.RoundDone):
            rounds.append(event)

    data = torch.rand(120, 4), torch.arange(120) % 3
    clients = fq.make_clients(data, count=60, budgets=(1.0, 0.5))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    method = Noting(STEPS, fraction=1.0, own_rows=False)
    fq.train(model, data[0][:1], method, clients, rounds=1, workers=workers, callbacks=[watch])
    assert most[0] <= 2 * 4 + 2
    (done,) = rounds
    assert len(done.clients) == len(done.losses) == 60
    subnets = {id(subnet) for record in done.clients for subnet in record.returned}
    assert len(subnets) == 2  # one for each budget, though each came in a message of its own


def test_values_of_clients_are_those_that_were_added():
    given = {3: 0.5, 8: None, 2: -1.0}
    values = ClientValues(given)
    assert dict(values.items()) == dict(values) == given
    assert list(values.values()) == list(given.values())
    with pytest.raises(KeyError):
        values[4]
    assert ClientValues({3: 7}, kind="q") == {3: 7}
