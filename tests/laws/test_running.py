"""Laws of whole rounds and runs, for every method."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedquilt.errors import TrainingError
from fedquilt.federation.client import Failure, Task, Update, client_label
from fedquilt.runs.events import ClientDone, Evaluated, RoundDone
from fedquilt.runs.policies import Cadence
from fedquilt.structure.cut import (
    compute_shapes,
    copy_subnet_tensors,
    global_name,
    index_cells,
    view_cells,
    write_cells,
)
from fedquilt.structure.subnet import Subnet
from fedquilt.training.ternary import CODE


def test_any_number_of_workers_gives_the_same_bits(case):
    short, found = replace(case, setup=replace(case.setup, rounds=2)), []
    for workers in (0, 2):  # one worker: tests/engines/test_local.py
        with case.engine(workers) as engine:
            state, scores, events = short.run(engine, cadence=Cadence(evaluate_every=1))
        rounds = [replace(e, seconds=0.0) for e in events if isinstance(e, RoundDone)]
        found.append((case.bits(state.params), scores, rounds))
    assert found[0] == found[1]


class StopNow(KeyboardInterrupt):
    pass


def interrupted(after: int):
    left = iter(range(after))

    def watch(event) -> None:
        if next(left, None) is None:
            raise StopNow

    return watch


def test_stopped_and_resumed_is_the_same_as_uninterrupted(case, tmp_path):
    pace = Cadence(evaluate_every=2, checkpoint_every=2)
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    with case.engine(folder=tmp_path / "whole" / "clients") as engine:
        expected, scores, events = case.run(engine, tmp_path / "whole", cadence=pace)
    most = max(sum(isinstance(e, ClientDone) for e in events) // 3, min(8, len(events) // 4))
    draw = random.Random(0)
    for attempt in range(40):
        again = case.anew()
        try:
            with again.engine(folder=tmp_path / "cut" / "clients") as engine:
                state, found, _ = again.run(
                    engine,
                    tmp_path / "cut",
                    interrupted(most + draw.randrange(12)) if attempt < 20 else None,
                    pace,
                    resume=attempt > 0,
                )
            break
        except StopNow:
            continue
    assert attempt > 0
    assert case.bits(state.params) == case.bits(expected.params)
    assert found == scores
    records = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut")]
    assert records[0] == records[1]


def sent_bytes(case, tasks) -> int:
    """What really travels to clients: the cells of their subnets, or all if there are none."""
    return sum(
        tensor.nbytes
        for task in tasks
        for tensors in (
            [
                copy_subnet_tensors(task.params, case.setup.structure, subnet)
                for subnet in task.subnets
            ]
            or [task.params]
        )
        for tensor in tensors.values()
    )


def returned_bytes(updates) -> int:
    return sum(t.nbytes for update in updates for part in update.params for t in part.values())


def test_records_count_exactly_the_bytes_of_the_subnets_that_travel(case, replaying):
    short = replace(case, setup=replace(case.setup, rounds=1))
    _, _, events = short.run(replaying)
    rounds = [e for e in events if isinstance(e, RoundDone)]  # of one phase or more
    *calls, _ = replaying.calls  # the last is the evaluation
    trained, closing = calls[: len(rounds)], calls[len(rounds) :]
    assert [(done.bytes_down, done.bytes_up) for done in rounds] == [
        (sent_bytes(case, tasks), returned_bytes(updates)) for tasks, updates in trained
    ]
    final = next(e for e in events if isinstance(e, Evaluated))
    assert final.bytes_down == sum(sent_bytes(case, tasks) for tasks, _ in closing)
    assert final.bytes_up == sum(returned_bytes(updates) for _, updates in closing)


def alone(case, task: Task) -> Task:
    """The task with nothing but its subnets' cells: all others are not numbers."""
    structure = case.setup.structure
    params = {
        n: torch.full_like(t, math.nan) if t.is_floating_point() else t
        for n, t in task.params.items()
    }
    for subnet in task.subnets:
        for name, index in index_cells(structure, subnet).items():
            source = global_name(name, structure, subnet)
            source = source if source in params else name  # not trained yet: the shared one
            write_cells(params[source], index, view_cells(task.params[source], index))
    return replace(task, params=params)


def test_clients_need_nothing_but_what_travels(case):
    start = case.start()
    for state in (start, *case.closings(start)):
        tasks = case.tasks(state)
        found = [case.done(some) for some in (tasks, [alone(case, task) for task in tasks])]
        for update, same in zip(*found, strict=True):
            assert [*map(case.bits, update.params)] == [*map(case.bits, same.params)]
            assert replace(update, params=()).__dict__ == replace(same, params=()).__dict__


def test_what_comes_back_is_part_of_what_was_sent(case):
    start, structure = case.start(), case.setup.structure
    for state in (start, *case.closings(start)):
        for task, update in zip(case.tasks(state), case.updates(state), strict=True):
            assert task.client == update.client
            sent = [
                {
                    global_name(n, structure, s): shape
                    for n, shape in compute_shapes(structure, s).items()
                }
                for s in task.subnets
            ]
            parts = zip(sent[: len(update.subnets)], update.subnets, update.params, strict=True)
            for known, subnet, tensors in parts:
                assert set(tensors) == set(structure.tensor_names(subnet))
                for name, tensor in tensors.items():
                    whole = known[global_name(name, structure, subnet)]
                    assert all(a <= b for a, b in zip(tensor.shape, whole, strict=True))


def test_a_closing_phase_moves_only_statistics_up(case):
    for state in case.closings(case.start()):
        for update in case.updates(state):
            for tensors in update.params:
                assert set(tensors) <= case.setup.structure.statistics


def spoilt(case, update: Update, how: str, number: int) -> Update | None:
    """The update with something wrong in one of its subnets, or None if nothing there could be."""
    structure, subnet = case.setup.structure, update.subnets[number]
    tensors = dict(update.params[number])

    def changed(subnet: Subnet = subnet, tensors: dict[str, Tensor] = tensors) -> Update:
        subnets, params = list(update.subnets), list(update.params)
        subnets[number], params[number] = subnet, tensors
        return replace(update, subnets=tuple(subnets), params=tuple(params))

    if how == "weight":
        return replace(update, weight=float("nan"))
    if how == "short":
        return replace(update, params=update.params[:number] + update.params[number + 1 :])
    if how == "extra":
        return changed(tensors={**tensors, "stranger": torch.zeros(1)})
    if how == "subnet":
        return changed(Subnet((("no such group", 1),)))
    if how == "wider":
        wider = replace(subnet, kept=())
        is_narrow = compute_shapes(structure, wider) != compute_shapes(structure, subnet)
        return changed(wider) if is_narrow else None
    names = [n for n, t in tensors.items() if n == CODE or (t.is_floating_point() and t.ndim)]
    if not names:
        return None
    victim, is_code = tensors.pop(names[-1]).clone(), names[-1] == CODE
    if how in ("nan", "inf"):
        numbers = victim[4:8].view(torch.float32) if is_code else victim.view(-1)
        numbers[-1] = float(how)
    other = victim[None] if is_code else victim[:-1]  # codes are as long as it takes
    bad = {"shape": other, "type": victim.long(), "missing": None}.get(how, victim)
    return changed(tensors=tensors if bad is None else {**tensors, names[-1]: bad})


class Spoiling:
    """An engine whose answer of one client is spoilt in one of its subnets, or lost."""

    def __init__(self, engine, spoil) -> None:
        self._engine, self._spoil = engine, spoil
        self.client_versions, self.remove_unused = engine.client_versions, engine.remove_unused

    def run(self, tasks):
        results = list(self._engine.run(tasks))
        # the last of those with most subnets, so that others come before it
        victim = max(results, key=lambda r: (len(r.subnets), r.client), default=None)
        yield from (self._spoil(r) if r is victim else r for r in results)


SPOILS = {
    "nan": "not finite",
    "inf": "not finite",
    "shape": "shape",
    "type": "int64",
    "missing": "other tensors",
    "extra": "stranger",
    "weight": "weight nan",
    "subnet": "no such group",
    "wider": "another width",
    "short": "sets of tensors",
}


@pytest.mark.parametrize("how", SPOILS)
def test_bad_updates_are_refused_named_and_counted_and_the_round_goes_on(case, replaying, how):
    victims = []

    def lose(update: Update) -> Failure:
        victims.append(update)
        return Failure(update.client, "lost")

    try:
        expected, lost = case.first_round(Spoiling(replaying, lose))
    except TrainingError:  # only one was asked, so that there is no round to go on
        expected, lost = None, None
        assert len(replaying.calls[0][0]) == 1
    (victim,) = victims
    bad = [spoilt(case, victim, how, number) for number in range(len(victim.subnets))]
    if not any(bad):  # nothing that travels could be spoilt in this way
        assert how == "wider" or not returned_bytes([victim])
    for update in filter(None, bad):
        spoiling = Spoiling(replaying, lambda _, bad=update: bad)
        if lost is None:
            with pytest.raises(
                TrainingError, match=f"{client_label(victim.client)} .*{SPOILS[how]}"
            ):
                case.first_round(spoiling)
            continue
        state, refused = case.first_round(spoiling)
        assert [f.client for f in refused.failures] == [f.client for f in lost.failures]
        assert client_label(victim.client) in refused.failures[0].reason
        assert SPOILS[how] in refused.failures[0].reason
        assert refused.num_clients == lost.num_clients > 0
        assert case.bits(state.params) == case.bits(expected.params)
        assert state.method_state == expected.method_state


def test_a_round_without_any_usable_answer_is_refused(case):
    class Silent:
        client_versions = staticmethod(dict)

        def run(self, tasks):
            return (Failure(t.client, "gone fishing") for t in tasks)

    with pytest.raises(
        TrainingError, match=r"round 1; (client \d|all clients together): gone fishing"
    ):
        case.run(Silent())
