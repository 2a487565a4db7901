"""Laws of whole rounds and runs, for every method."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fedquilt.errors import TrainingError
from fedquilt.federation.client import Failure, Update
from fedquilt.runs.loop import ClientDone, Pace, RoundDone, num_bytes
from fedquilt.structure.subnet import Subnet


def test_any_number_of_workers_gives_the_same_bits(case):
    found = []
    for workers in (0, 1, 2):
        with case.engine(workers) as engine:
            state, scores, events = case.run(engine, pace=Pace(evaluate_every=2))
        rounds = [replace(e, seconds=0.0) for e in events if isinstance(e, RoundDone)]
        found.append((case.bits(state.params), scores, rounds))
    assert found[0] == found[1] == found[2]


class StopNow(KeyboardInterrupt):
    pass


def interrupted(after: int):
    left = iter(range(after))

    def watch(event) -> None:
        if next(left, None) is None:
            raise StopNow

    return watch


def test_stopped_and_resumed_is_the_same_as_uninterrupted(case, tmp_path):
    pace = Pace(evaluate_every=1, checkpoint_every=2)
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    with case.engine(folder=tmp_path / "whole" / "clients") as engine:
        expected, scores, events = case.run(engine, tmp_path / "whole", pace=pace)
    most = max(sum(isinstance(e, ClientDone) for e in events) // 3, 8)
    draw = random.Random(0)
    for attempt in range(40):
        try:
            with case.engine(folder=tmp_path / "cut" / "clients") as engine:
                state, found, _ = case.run(
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


def weights(width: float, rows: int, case) -> int:
    """Learned numbers of the tiny net, counted by hand."""
    first, second = case.sizes(width)
    convolutions = (9 * first + first) + (9 * first * second + second)
    return convolutions + 2 * first + 2 * second + classifier(width, rows, case)


def classifier(width: float, rows: int, case) -> int:
    return rows * case.sizes(width)[1] + rows


def statistics(width: float, case) -> int:
    return 2 * sum(case.sizes(width))


COUNTERS = 2 * 8  # num_batches_tracked of two normalisation layers, as int64


def expected_traffic(case, client, request: str) -> tuple[int, int]:
    """Bytes to and from a client in a round of training."""
    width, own = client.budget.width, len(client.labels)
    if request == "heterofl dynamic":
        width = case.method.width_of(case.setup, 0, client)
    if request.startswith("heterofl"):
        down, up = (4 * weights(width, rows, case) + COUNTERS for rows in (4, own))
        return down, up
    if request == "fedavg":
        both = 4 * (weights(0.5, 4, case) + statistics(0.5, case)) + COUNTERS
    elif request == "lg-fedavg":
        both = 4 * classifier(0.5, 4, case)
    else:
        both = 0
    return both, both


def test_a_client_receives_and_sends_exactly_its_subnets_bytes(case, request):
    name = request.node.callspec.params["case"]
    with case.engine() as engine:
        _, _, events = case.run(engine)
    first = next(e for e in events if isinstance(e, RoundDone))
    before = events[: events.index(first)]
    cohort = {e.client for e in before if isinstance(e, ClientDone)}
    traffic = [expected_traffic(case, c, name) for c in case.setup.clients if c.id in cohort]
    assert (first.bytes_down, first.bytes_up) == tuple(map(sum, zip(*traffic, strict=True)))


def test_a_closing_phase_moves_only_statistics_up(case):
    state = case.closing(case.start())
    if state is None:
        return
    tasks, updates = case.tasks(state), case.updates(state)
    for task, update in zip(tasks, updates, strict=True):
        sizes = case.method.asked_of(case.setup, case.setup.clients[task.client])
        down = sum(4 * (weights(w, 4, case) + statistics(w, case)) + COUNTERS for w in sizes)
        up = sum(4 * statistics(w, case) for w in sizes)
        assert sum(num_bytes(case.setup, s) for s in task.subnets) == down
        assert sum(t.nbytes for part in update.params for t in part.values()) == up


def spoilt(update: Update, how: str) -> Update | None:
    """The update with something wrong, or None if it has nothing that could be."""
    subnet, tensors = update.subnets[0], dict(update.params[0])
    if how == "weight":
        return replace(update, weight=float("nan"))
    if how == "extra":
        return replace(update, params=({**tensors, "stranger": torch.zeros(1)},))
    if how == "subnet":
        return replace(update, subnets=(Subnet((("no such group", 1),)),))
    floats = [n for n, t in tensors.items() if t.is_floating_point()]
    is_narrow = any(group != "classifier" for group, _ in subnet.kept)
    if not floats or (how == "wider" and not is_narrow):
        return None
    if how == "wider":
        return replace(update, subnets=(replace(subnet, kept=()),))
    victim = tensors.pop(floats[-1]).clone()
    if how in ("nan", "inf"):
        victim.view(-1)[-1] = float(how)
    changed = {"shape": victim[:-1], "type": victim.long(), "missing": None}.get(how, victim)
    if changed is not None:
        tensors[floats[-1]] = changed
    return replace(update, params=(tensors,))


class Spoiling:
    """An engine that spoils the first update that it can, or loses it."""

    def __init__(self, engine, how: str, *, lose: bool) -> None:
        self._engine, self._how, self._lose = engine, how, lose
        self.victim: int | None = None
        self.kept, self.forget_others = engine.kept, engine.forget_others

    def run(self, tasks):
        for result in self._engine.run(tasks):
            bad = spoilt(result, self._how) if result.params and self.victim is None else None
            if bad is not None:
                self.victim = result.client
                yield Failure(result.client, "lost") if self._lose else bad
            else:
                yield result


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
}


@pytest.mark.parametrize("how", SPOILS)
def test_bad_updates_are_refused_named_and_counted_and_the_round_goes_on(case, how):
    people = replace(case.people, test={})  # nothing to evaluate, which takes longest
    short = replace(case, setup=replace(case.setup, rounds=1), people=people)
    found = []
    for lose in (False, True):
        with case.engine() as engine:
            spoiling = Spoiling(engine, how, lose=lose)
            state, _, events = short.run(spoiling)
        done = next(e for e in events if isinstance(e, RoundDone))
        found.append((done, case.bits(state.params), spoiling.victim))
    (refused, params, victim), (lost, params_without, _) = found
    if victim is None:  # nothing that travels could be spoilt in this way
        assert refused.bytes_up == 0
        return
    assert [f.client for f in refused.failures] == [f.client for f in lost.failures] == [victim]
    assert f"client {victim}" in refused.failures[0].reason
    assert SPOILS[how] in refused.failures[0].reason
    assert refused.num_clients == lost.num_clients > 0
    assert params == params_without


def test_a_round_without_any_usable_answer_is_refused(case):
    class Silent:
        kept = staticmethod(dict)

        def run(self, tasks):
            return (Failure(t.client, "gone fishing") for t in tasks)

    with pytest.raises(TrainingError, match=r"round 1; client \d: gone fishing"):
        case.run(Silent())
