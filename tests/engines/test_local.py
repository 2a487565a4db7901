"""The local engine on real processes that die, hang on, raise and are left alone."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedquilt.engines import worker
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.worker import Timeouts
from fedquilt.federation.client import ClientResult, Failure, Task, Update
from fedquilt.structure.subnet import Subnet

PARAMS = {"weight": torch.arange(12.0).view(4, 3), "bias": torch.ones(4)}
WAIT = 60.0


@dataclass(frozen=True)
class Drift:
    """A recipe that moves the subnet by numbers drawn from the task's seed, and may misbehave."""

    folder: str = ""  # where it leaves word of what it did
    culprit: int = -1  # the client that misbehaves
    times: int = 0  # how often
    how: str = ""
    keeps: bool = False  # a count of its own, between rounds

    def run(self, task, context):
        if self.folder:
            attempt = self._attempt(task.client)
            if task.client == self.culprit and attempt <= self.times:
                self._misbehave()
        generator = torch.Generator().manual_seed(task.seed)
        module = context.module(task.subnets[0], task.params)
        tensors = {
            n: t.detach() + torch.randn(t.shape, generator=generator)
            for n, t in module.state_dict().items()
        }
        metrics, state = {"pid": os.getpid()}, None
        if self.keeps:
            count = context.client_state.get("count", torch.zeros(())).item() + 1
            state = {"count": torch.tensor(float("nan") if self.how == "nan" else count)}
            metrics["count"] = count
        return ClientResult(Update(task.client, task.subnets, (tensors,), 1.0, metrics), state)

    def _attempt(self, client):
        path = Path(self.folder) / f"attempts-{client}"
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return len(path.read_text().splitlines())

    def _misbehave(self):
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "exit":
            os._exit(3)
        elif self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "long":
            time.sleep(3)
        elif self.how == "raise":
            raise ValueError("no coffee left")
        elif self.how == "hang":
            wait_for(lambda: (Path(self.folder) / "go").exists())


def wait_for(condition: Callable[[], bool], seconds: float = WAIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def tasks(recipe: Drift, count: int = 6) -> list[Task]:
    narrow = Subnet.from_channels({"h": [0, 2]})
    return [
        Task(c, (narrow if c % 2 else Subnet(),), PARAMS, recipe, seed=40 + c) for c in range(count)
    ]


def bits(results: list[Update | Failure]) -> list[object]:
    return [
        r
        if isinstance(r, Failure)
        else (
            r.client,
            r.subnets,
            [{n: t.numpy().tobytes() for n, t in p.items()} for p in r.params],
        )
        for r in results
    ]


@pytest.fixture
def undisturbed(engine: Callable[..., LocalEngine]) -> list[object]:
    with engine(0) as made:
        return bits(list(made.run(tasks(Drift()))))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_tasks_with_the_same_bits(engine, undisturbed, workers):
    made = engine(workers)
    assert bits(list(made.run(tasks(Drift())))) == undisturbed
    assert bits(list(made.run(tasks(Drift())))) == undisturbed
    assert list(made.run([])) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_whose_worker_was_killed_is_done_again(engine, undisturbed, tmp_path, workers):
    recipe = Drift(str(tmp_path), culprit=2, times=1, how="kill")
    assert bits(list(engine(workers).run(tasks(recipe)))) == undisturbed
    pids = (tmp_path / "attempts-2").read_text().split()
    assert len(set(pids)) == 2  # on a fresh worker
    others = [c for c in range(6) if c != 2]
    assert all(len((tmp_path / f"attempts-{c}").read_text().split()) == 1 for c in others)


def test_a_worker_killed_from_outside_in_mid_task_changes_nothing(engine, undisturbed, tmp_path):
    recipe = Drift(str(tmp_path), culprit=0, times=1, how="hang")
    word = tmp_path / "attempts-0"

    def assassin():
        wait_for(lambda: word.exists() and word.read_text().endswith("\n"))
        os.kill(int(word.read_text().split()[0]), signal.SIGKILL)

    thread = threading.Thread(target=assassin)
    thread.start()
    found = list(engine(2).run(tasks(recipe)))
    thread.join()
    assert bits(found) == undisturbed
    assert len(word.read_text().split()) == 2


@pytest.mark.parametrize(
    ("how", "said"),
    [("kill", "ended by SIGKILL twice.*memory"), ("exit", "twice with exit code 3")],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_loses_two_workers_has_failed_and_the_others_go_on(
    engine, undisturbed, tmp_path, workers, how, said
):
    recipe = Drift(str(tmp_path), culprit=3, times=9, how=how)
    made = engine(workers)
    found = list(made.run(tasks(recipe)))
    failure = found.pop(3)
    assert isinstance(failure, Failure)
    assert failure.client == 3
    assert re.search(said, failure.reason)
    expected = undisturbed[:3] + undisturbed[4:]
    assert bits(found) == expected
    assert len((tmp_path / "attempts-3").read_text().split()) == 2
    assert bits(list(made.run(tasks(Drift())))) == undisturbed  # and the engine is whole again


@pytest.mark.parametrize("workers", [0, 2])
def test_a_recipe_that_raises_is_a_failure_with_its_reason(engine, undisturbed, tmp_path, workers):
    recipe = Drift(str(tmp_path), culprit=1, times=9, how="raise")
    found = list(engine(workers).run(tasks(recipe)))
    assert isinstance(found[1], Failure)
    assert found[1].reason.startswith("ValueError: no coffee left (test_local.py:")
    del found[1]
    assert bits(found) == undisturbed[:1] + undisturbed[2:]


def test_workers_killed_between_rounds_are_replaced(engine, undisturbed):
    made = engine(2)
    pids = {int(u.metrics["pid"]) for u in made.run(tasks(Drift()))}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    assert bits(list(made.run(tasks(Drift())))) == undisturbed


def update_files(disk: Path) -> list[Path]:
    return list(disk.glob("fedquilt-*/update-*"))


def live_bytes() -> int:
    gc.collect()
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(found.values())


def test_updates_that_are_early_wait_as_files(engine, places, tmp_path):
    recipe = Drift(str(tmp_path), culprit=0, times=1, how="hang")
    made, count = engine(2), 12
    before = live_bytes()
    seen = {}

    def watcher():
        # the first task hangs, and its worker may hold one more that waits behind it
        wait_for(lambda: len(update_files(places[0])) >= count - 2)
        time.sleep(0.1)
        seen["bytes"] = live_bytes()
        (tmp_path / "go").touch()

    thread = threading.Thread(target=watcher)
    thread.start()
    results = made.run(tasks(recipe, count))
    first = next(results)
    thread.join()
    assert first.client == 0
    assert seen["bytes"] == before
    rest = list(results)
    assert [u.client for u in rest] == list(range(1, count))
    assert not update_files(places[0])


def nothing_left(places: tuple[Path, Path]) -> bool:
    return not multiprocessing.active_children() and not any(any(p.iterdir()) for p in places)


def test_nothing_is_left_after_close(engine, places):
    made = engine(2)
    list(made.run(tasks(Drift(keeps=True))))
    assert any(places[0].iterdir())
    made.close()
    assert nothing_left(places)
    made.close()  # twice is once


def test_nothing_is_left_after_an_exception_in_the_middle_of_a_round(engine, places, tmp_path):
    recipe = Drift(str(tmp_path), culprit=5, times=1, how="hang")
    made = engine(2)
    results = made.run(tasks(recipe))
    next(results)

    def serve() -> None:
        with made:
            raise RuntimeError("the server has a problem")

    with pytest.raises(RuntimeError, match="problem"):
        serve()
    assert nothing_left(places)  # although the results are still in somebody's hands
    results.close()
    assert nothing_left(places)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_round_that_was_left_does_not_disturb_the_next(
    engine, undisturbed, places, tmp_path, is_closed
):
    recipe = Drift(str(tmp_path), culprit=4, times=9, how="hang")
    made = engine(2)
    results = made.run(tasks(recipe))
    assert next(results).client == 0
    if is_closed:
        results.close()
    else:
        del results
    assert not update_files(places[0])
    assert not list(places[1].glob("fedquilt-*/params-*"))
    assert bits(list(made.run(tasks(Drift())))) == undisturbed
    made.close()
    assert nothing_left(places)


def has_vanished(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"  # dead, though nobody has asked after it


def doomed(make: Callable[..., LocalEngine], folder: Path) -> None:
    recipe = Drift(str(folder), culprit=1, times=9, how="hang")
    made = make(2)
    for _ in made.run(tasks(recipe)):
        pass


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux")
def test_workers_vanish_with_a_server_that_is_killed(engine, places, tmp_path):
    server = multiprocessing.get_context("fork").Process(target=doomed, args=(engine, tmp_path))
    server.start()

    def workers() -> set[int]:  # one may be through with several clients before the other begins
        words = [path.read_text() for path in tmp_path.glob("attempts-*")]
        return {int(pid) for word in words for pid in word.split()}

    wait_for(lambda: len(workers()) == 2)
    pids = workers()
    server.kill()
    server.join()
    wait_for(lambda: all(has_vanished(pid) for pid in pids), seconds=WAIT / 4)
    assert any(places[1].iterdir())  # nobody could tidy up ...

    def tidied() -> bool:  # ... but the next engine does, when the last thread is gone too
        engine(0).close()
        return nothing_left(places)

    wait_for(tidied, seconds=WAIT / 4)


def test_folders_of_engines_that_live_are_left_alone(engine, undisturbed):
    first, second = engine(1), engine(1)
    second.close()
    assert bits(list(first.run(tasks(Drift())))) == undisturbed


def test_without_room_in_shared_memory_parameters_go_to_disk(
    engine, undisturbed, places, monkeypatch
):
    real = shutil.disk_usage
    full = type(real("/"))(total=10, used=10, free=0)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda p: full if places[1] in Path(p).parents else real(p)
    )
    made = engine(2)
    results = made.run(tasks(Drift()))
    found = [next(results)]
    assert list(places[0].glob("fedquilt-*/params-*"))
    assert not list(places[1].glob("fedquilt-*/params-*"))
    assert bits(found + list(results)) == undisturbed
    assert not list(places[0].glob("fedquilt-*/params-*"))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_clients_keep_has_versions_that_can_be_restored(engine, tmp_path, workers):
    made = engine(workers, tmp_path / "clients")
    recipe = Drift(keeps=True)

    def counts(count=3):
        return [u.metrics["count"] for u in made.run(tasks(recipe, count))]

    assert (made.client_versions(), counts()) == ({}, [1, 1, 1])
    early = dict(made.client_versions())
    assert early == {0: 1, 1: 1, 2: 1}
    assert (counts(2), counts(2)) == ([2, 2], [3, 3])
    late = dict(made.client_versions())
    assert late == {0: 3, 1: 3, 2: 1}
    made.remove_unused(early, late)
    assert len(list((tmp_path / "clients").iterdir())) == 5
    made.restore(early)
    assert counts() == [2, 2, 2]
    made.restore(late)
    assert counts() == [4, 4, 2]
    made.close()
    again = engine(workers, tmp_path / "clients")  # another process, another day
    again.restore(early)
    assert [u.metrics["count"] for u in again.run(tasks(recipe, 3))] == [2, 2, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_is_not_finite_is_not_kept(engine, workers):
    made = engine(workers)
    list(made.run(tasks(Drift(keeps=True), 1)))
    list(made.run(tasks(Drift(keeps=True, how="nan"), 1)))
    (update,) = made.run(tasks(Drift(keeps=True), 1))
    assert update.metrics["count"] == 2
    assert made.client_versions() == {0: 2}


def test_a_state_is_not_advanced_by_a_round_that_nobody_finished(engine, tmp_path):
    made = engine(2, tmp_path / "clients")
    results = made.run(tasks(Drift(keeps=True), 4))
    next(results)
    results.close()
    assert made.client_versions() == {0: 1}
    assert [u.metrics["count"] for u in made.run(tasks(Drift(keeps=True), 4))] == [2, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_written_is_a_failure(engine, tmp_path, workers):
    folder = tmp_path / "clients"
    folder.write_text("not a folder")
    (result,) = engine(workers, folder).run(tasks(Drift(keeps=True), 1))
    assert isinstance(result, Failure)
    assert "clients" in result.reason


# workers that hang

QUICK = Timeouts(heartbeat=1.5)


def test_a_task_whose_worker_was_stopped_is_done_again(engine, undisturbed, tmp_path):
    recipe = Drift(str(tmp_path), culprit=2, times=1, how="stop")
    found = list(engine(2, timeouts=QUICK).run(tasks(recipe)))
    assert bits(found) == undisturbed
    assert len(set((tmp_path / "attempts-2").read_text().split())) == 2  # on a fresh worker


def test_a_client_whose_workers_are_stopped_twice_has_failed_and_the_others_go_on(
    engine, undisturbed, tmp_path
):
    recipe = Drift(str(tmp_path), culprit=3, times=9, how="stop")
    made = engine(2, timeouts=QUICK)
    found = list(made.run(tasks(recipe)))
    assert found.pop(3) == Failure(3, "its worker gave no sign of life for 1.5 seconds, twice")
    assert bits(found) == undisturbed[:3] + undisturbed[4:]
    assert len((tmp_path / "attempts-3").read_text().split()) == 2
    assert bits(list(made.run(tasks(Drift())))) == undisturbed  # and the engine is whole again


def test_workers_stopped_between_rounds_are_replaced(engine, undisturbed):
    made = engine(2, timeouts=QUICK)
    for pid in {int(u.metrics["pid"]) for u in made.run(tasks(Drift()))}:
        os.kill(pid, signal.SIGSTOP)
    assert bits(list(made.run(tasks(Drift())))) == undisturbed


def test_honest_work_may_take_longer_than_a_heartbeat(engine, undisturbed, tmp_path):
    recipe = Drift(str(tmp_path), culprit=1, times=9, how="long")
    assert bits(list(engine(2, timeouts=Timeouts(heartbeat=2.0)).run(tasks(recipe)))) == undisturbed
    assert len((tmp_path / "attempts-1").read_text().split()) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_work_that_takes_longer_than_its_deadline_has_failed_at_once(
    engine, undisturbed, tmp_path, workers
):
    recipe = Drift(str(tmp_path), culprit=1, times=9, how="hang")
    found = list(engine(workers, timeouts=Timeouts(deadline=0.5)).run(tasks(recipe)))
    assert found.pop(1) == Failure(1, "its work was not done within 0.5 seconds")
    assert bits(found) == undisturbed[:1] + undisturbed[2:]
    assert len((tmp_path / "attempts-1").read_text().split()) == 1


def test_a_server_that_was_busy_or_stopped_itself_blames_no_worker(
    engine, undisturbed, monkeypatch
):
    made = engine(2, timeouts=Timeouts(heartbeat=60, deadline=60))
    pids = {int(u.metrics["pid"]) for u in made.run(tasks(Drift()))}
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    found = list(made.run(tasks(Drift())))
    assert bits(found) == undisturbed
    assert {int(u.metrics["pid"]) for u in found} <= pids


def test_long_messages_go_another_way_and_leave_no_files(engine, undisturbed, places, monkeypatch):
    monkeypatch.setattr("fedquilt.engines.worker.MAX_MESSAGE_BYTES", 100)
    made = engine(2)
    assert bits(list(made.run(tasks(Drift())))) == undisturbed
    next(made.run(tasks(Drift())))
    assert not list(places[0].glob("fedquilt-*/*"))


def test_what_killed_engines_left_is_removed_by_the_next_one(engine, places):
    """Also by one that was killed before it had a folder; locks of others are not theirs."""
    for place in places:
        (place / "fedquilt-a").mkdir()
        (place / "fedquilt-a" / "update-1").write_bytes(b"half")
        for name in ("fedquilt-a.lock", "fedquilt-b.lock", "other.lock"):
            (place / name).touch()
    engine(1).close()
    assert [[p.name for p in place.iterdir()] for place in places] == [["other.lock"]] * 2
    for place in places:
        (place / "other.lock").unlink()


def test_a_worker_whose_sign_of_life_was_tidied_away_goes_on(engine, undisturbed, places):
    made = engine(2, timeouts=QUICK)
    for path in places[1].glob("fedquilt-*/pulse-*"):
        path.unlink()
    assert bits(list(made.run(tasks(Drift())))) == undisturbed
