"""Runs of a comparison, queued over the cores: one process each.

A process that is forked has the model, the data and the methods of its parent. One that starts anew
loads them from a file, which all runs share. Every run has one thread, and the bits that it would
have alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from fedquilt.comparison.execute import execute_trial
from fedquilt.comparison.progress import (
    ComparisonCallback,
    TrialDone,
    TrialFailed,
    TrialProgress,
    TrialsQueued,
    ignore_events,
)
from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.spending import Device
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.trial import Address, Trial, compute_address
from fedquilt.engines.processes import (
    ForkedInput,
    ProcessInput,
    StoredInput,
    choose_start_method,
    exit_with_parent,
    retain_freed_memory,
    start_process,
)
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.errors import ConfigError, FedquiltError, describe_exception
from fedquilt.runs.engines import count_cores

STOP_SECONDS = 20.0  # for a run that is stopped to save itself


@dataclass(frozen=True)
class FailedTrial:
    """A run that failed, and why."""

    problem: str


Outcome = TrialResult | FailedTrial
Trials = tuple[tuple[Trial, Address], ...]
StoredTrials = ForkedInput[Trials] | StoredInput[Trials]


def run_trials(
    trials: Sequence[Trial],
    store: TrialStore,
    *,
    workers: int | None = None,
    device: Device | None = None,
    purpose: str = "runs",
    on_event: ComparisonCallback = ignore_events,
) -> list[Outcome]:
    """Does all runs that are not done yet; returns what came of each, in order.

    Trials with the same address are one run. So are those that differ in their scoring alone; they
    are scored one after another. A run that was stopped is resumed. One that fails does not stop
    the others; it is tried again when it is asked for again.

    Args:
        trials: The runs.
        store: Where they are kept.
        workers: How many run at a time; None: one per core, 0: one after another in this process.
        device: How fast the simulated devices are; None: ``Device()``.
        purpose: What the runs are for, in a word.
        on_event: Is called with what happens.
    """
    if workers is not None and workers < 0:
        raise ConfigError(f"the number of workers is at least 0, got {workers}")
    addresses = [compute_address(trial) for trial in trials]
    unique = dict(zip(map(str, addresses), zip(trials, addresses, strict=True), strict=True))
    outcomes: dict[str, Outcome] = {}
    for key, (_, address) in unique.items():
        result = store.find_result(address)
        if result is not None:
            outcomes[key] = result
    waiting = [pair for key, pair in unique.items() if key not in outcomes]
    on_event(TrialsQueued(purpose, len(unique), len(outcomes)))
    count = count_cores() if workers is None else workers
    queue = _Queue(deque(waiting), store, device or Device(), on_event, outcomes)
    if count == 0 or any(trial.device != "cpu" for trial, _ in waiting):
        queue.run_here()
    else:
        queue.run_in_processes(min(count, len(waiting)))
    return [outcomes[str(address)] for address in addresses]


@dataclass
class _Running:
    """A run in a process of its own."""

    trial: Trial
    address: Address
    process: BaseProcess
    pipe: Connection


@dataclass
class _Queue:
    """Runs that wait, and what came of others."""

    waiting: deque[tuple[Trial, Address]]
    store: TrialStore
    device: Device
    on_event: ComparisonCallback
    outcomes: dict[str, Outcome]

    def run_here(self) -> None:
        """Does one run after another."""
        while self.waiting:
            trial, address = self.waiting.popleft()

            def on_round(round: int, total: int, trial: Trial = trial) -> None:
                self.on_event(TrialProgress(trial, round, total))

            outcome: Outcome
            try:
                outcome = execute_trial(trial, address, self.store, self.device, on_round=on_round)
            except Exception as problem:
                outcome = FailedTrial(describe_problem(problem))
            self._add(trial, address, outcome, 0)

    def run_in_processes(self, count: int) -> None:
        """Keeps so many processes busy; stops them all if this one is stopped."""
        method = choose_start_method()
        running: list[_Running] = []
        scratch = ScratchDirectory()
        try:
            path, what = scratch.make_path("runs-"), "the models, data and methods of a comparison"
            trials = tuple(self.waiting)
            stored = ProcessInput(trials, path, what).for_method(method)
            while self.waiting or running:
                while len(running) < count and (pair := self._take_next(running)) is not None:
                    running.append(self._start(pair, method, stored, trials.index(pair)))
                ready = connection.wait([one.pipe for one in running])
                for one in [one for one in running if one.pipe in ready]:
                    if self._receive(one, len(running) - 1):
                        running.remove(one)
        finally:
            _stop(running)
            scratch.close()

    def _take_next(self, running: Sequence[_Running]) -> tuple[Trial, Address] | None:
        """The first that waits, if its run is not under way for another scoring."""
        under_way = {one.address.run for one in running}
        pair = next((pair for pair in self.waiting if pair[1].run not in under_way), None)
        if pair is not None:
            self.waiting.remove(pair)
        return pair

    def _start(
        self, pair: tuple[Trial, Address], method: str, stored: StoredTrials, number: int
    ) -> _Running:
        """Starts a run, which is the one with this number."""
        trial, address = pair
        ours, theirs = multiprocessing.get_context(method).Pipe(duplex=False)
        args = (theirs, stored, number, self.store, self.device, os.getpid())
        process = start_process(method, _run_process, args, daemon=False)
        theirs.close()
        return _Running(trial, address, process, ours)

    def _receive(self, one: _Running, num_running: int) -> bool:
        """Takes a message; whether it was the last one."""
        try:
            message = one.pipe.recv()
        except (EOFError, OSError):
            one.process.join()
            message = FailedTrial(_describe_exit(one.process.exitcode))
        if isinstance(message, tuple):
            self.on_event(TrialProgress(one.trial, *message))
            return False
        one.process.join()
        outcome = self.store.find_result(one.address) if message is None else message
        assert outcome is not None
        self._add(one.trial, one.address, outcome, num_running)
        return True

    def _add(self, trial: Trial, address: Address, outcome: Outcome, num_running: int) -> None:
        self.outcomes[str(address)] = outcome
        left = len(self.waiting) + num_running
        if isinstance(outcome, FailedTrial):
            self.on_event(TrialFailed(trial, outcome.problem, left))
        else:
            self.on_event(TrialDone(trial, outcome, left))


def _run_process(
    pipe: Connection,
    stored: StoredTrials,
    number: int,
    store: TrialStore,
    device: Device,
    parent: int,
) -> None:
    """The main function of a process: does one run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the run saves itself
    exit_with_parent(parent)
    retain_freed_memory()
    torch.set_num_threads(1)
    message: FailedTrial | None = None
    try:
        trial, address = stored.load()[number]
        execute_trial(
            trial, address, store, device, on_round=lambda *progress: _send(pipe, progress)
        )
    except KeyboardInterrupt:
        os._exit(1)
    except Exception as problem:
        message = FailedTrial(describe_problem(problem))
    _send(pipe, message)


def _send(pipe: Connection, message: object) -> None:
    """Sends a message; if the comparison was killed, this process ends."""
    try:
        pipe.send(message)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)


def describe_problem(problem: Exception) -> str:
    """A problem in one sentence; of other code's with where it was raised."""
    if isinstance(problem, FedquiltError):
        return " ".join(str(problem).split())
    return describe_exception(problem)


def _stop(running: Sequence[_Running]) -> None:
    """Lets runs save themselves, and ends their processes."""
    for one in running:
        one.process.terminate()
    for one in running:
        one.process.join(STOP_SECONDS)
        if one.process.is_alive():
            one.process.kill()
            one.process.join()


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}; compare again to go on with it"
    return f"its process ended with exit code {code}; compare again to go on with it"
