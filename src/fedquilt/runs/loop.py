"""The training loop: plan, let clients work, merge; evaluate and save on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedquilt.devices import CPU
from fedquilt.engines.engine import Engine, ignore_progress
from fedquilt.errors import TrainingError
from fedquilt.evaluation.accuracy import evaluate
from fedquilt.evaluation.clients import ClientRecord
from fedquilt.evaluation.scores import SizeScore
from fedquilt.federation.client import Task, derive_seed
from fedquilt.federation.hostile import Attack
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Phase, Setup, State, offload_state, sample_cohort
from fedquilt.federation.tasks import map_tasks
from fedquilt.methods.method import Method
from fedquilt.runs.accounting import RoundAccounting
from fedquilt.runs.attacks import measure_backdoor
from fedquilt.runs.checkpoint import Checkpoint
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.environment import Environment, describe_environment_change, read_environment
from fedquilt.runs.events import (
    Callback,
    ClientProgress,
    EnvironmentChanged,
    Evaluated,
    ProblemFound,
    RoundDone,
    RoundRepeated,
    RoundStarted,
    StoppedEarly,
    combine_callbacks,
)
from fedquilt.runs.exchange import RoundPlan, make_exchange
from fedquilt.runs.health import Finding, Record, add_to_history, find_problems
from fedquilt.runs.phases import count_rounds, find_phase, require_same_rounds
from fedquilt.runs.policies import Cadence, FaultPolicy
from fedquilt.runs.privacy import PrivateRounds, require_same_privacy
from fedquilt.runs.record_format import encode_event, expand_record
from fedquilt.runs.saved_run import Position, SavedRun
from fedquilt.runs.secure_preflight import make_secure
from fedquilt.runs.selection import Selection
from fedquilt.runs.selector import ModelSelector
from fedquilt.structure.memory import is_large, release_freed_memory
from fedquilt.training.local_test import WithLocalTest

HEALTH_CHECK_EVERY, EARLY_ROUNDS = 5, 10  # rounds; of the first ones, each is checked


@dataclass(eq=False)
class TrainingLoop:
    """One run in progress.

    ``has_server_test`` says whether the server has test data, ``testers`` which clients have.
    ``on_finished`` is called with the finished state, before its last evaluation. ``available``
    returns the clients that can be asked now; None means all of them. ``privacy`` plans and
    accounts for the rounds of a private run. With ``secure`` the server learns sums only.
    With ``attack`` some clients are hostile.
    ``selection`` says which round's model is kept, by the data of ``validators``.
    """

    setup: Setup
    method: Method
    engine: Engine
    has_server_test: bool
    testers: Collection[int]
    directory: RunDirectory | None = None
    fingerprint: str = ""
    cadence: Cadence = field(default_factory=Cadence)
    callbacks: Iterable[Callback] = ()
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    on_finished: Callable[[TrainingLoop, State], None] | None = None
    available: Callable[[], Collection[int]] | None = None
    privacy: PrivateRounds | None = None
    secure: SecureAggregation | None = None
    selection: Selection = field(default_factory=Selection)
    validators: Collection[int] = ()
    attack: Attack | None = None
    environments: tuple[Environment, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.environments = (read_environment(device=getattr(self.engine, "device", CPU)),)
        self._notify = combine_callbacks(self.callbacks)
        self._aggregations = {
            phase.name: self.method.aggregation(self.setup, phase.name)
            for phase in self.method.phases(self.setup)
        }
        if self.privacy is not None:
            self._aggregations = {
                name: self.privacy.make_pipeline(pipeline)
                for name, pipeline in self._aggregations.items()
            }
            self.testers = ()  # what clients' own test data say is no part of the budget
        if self.secure is not None:
            self.testers = ()  # each client would tell how many of its examples are answered right
            self._aggregations = make_secure(self._aggregations, self.secure)
        self._client_exchange = make_exchange(self.setup, self.secure, self.attack)
        self._saved = SavedRun(self.directory, self.fingerprint, self.engine, self._notify)
        self._selector = ModelSelector(self.selection, self.setup, self.method)
        self._history: list[Record] = []
        self._clients: list[Sequence[ClientRecord]] = []
        self._reported: set[tuple[str, tuple[int, ...]]] = set()
        self.num_trained = 0  # rounds that are done

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the records so far show about the run's health."""
        return self._find_problems(self._history)

    @property
    def privacy_spent(self) -> dict[str, Any] | None:
        """What the rounds so far have cost, as the last record says; None: there is no privacy."""
        spent = [record["privacy"] for record in self._history if record.get("privacy")]
        return spent[-1] if spent else None

    @property
    def clients(self) -> tuple[Sequence[ClientRecord], ...]:
        """What clients did in each round; empty if that is in the records of a directory."""
        return tuple(self._clients)

    def run(self, *, resume: bool = False) -> tuple[State, tuple[SizeScore, ...]]:
        """Starts or resumes, and trains to the last round."""
        return self.train_from(self.restore() if resume else self.start())

    def start(self) -> Position:
        """The position before the first round."""
        state = self.method.start(self.setup)
        if self.privacy is not None:
            state = self.privacy.start(state)
        return Position(Checkpoint(state, self.engine.client_versions()), False)

    def train_from(self, position: Position) -> tuple[State, tuple[SizeScore, ...]]:
        """Trains to the last round; returns the finished state and its scores."""
        done, is_evaluated = position.checkpoint, position.is_evaluated
        done = replace(done, state=offload_state(done.state))
        del position
        if is_large(self.setup.model):
            release_freed_memory()  # of the state as it was started or read
        self._selector.progress = done.selection
        last_saved = done.state.round
        total = self._count_rounds(done.state)
        try:
            if not is_evaluated:  # stopped after the round, before its evaluation was recorded
                self._evaluate_if_due(done.state, total)
            while done.state.round < total and not self._selector.is_stopped:
                done = self._run_round(
                    done.state, find_phase(done.state.round, self.method, self.setup)
                )
                if is_large(self.setup.model):
                    release_freed_memory()  # of the state before
                self._evaluate_if_due(done.state, total)
                is_due = self._is_due(self.cadence.checkpoint_every, done.state.round, total)
                if is_due or self._selector.is_stopped:
                    self._save(done)
                    last_saved = done.state.round
                self._saved.remove_old_states(replace(done, selection=self._selector.progress))
        except (KeyboardInterrupt, TrainingError):
            if done.state.round > last_saved:
                self._save(done)
            raise
        self.num_trained = done.state.round
        if done.state.round < total:
            progress = self._selector.progress
            self._notify(StoppedEarly(done.state.round, progress.num_worse, progress.best_round))
        return self._evaluate(self._select(done), is_final=True)

    def _select(self, done: Checkpoint) -> State:
        """The state that is kept, with the clients' states that belong to it."""
        kept = self._selector.select(done)
        if kept.state is not done.state and (kept.client_versions or done.client_versions):
            used = self._saved.list_used_versions(replace(done, selection=self._selector.progress))
            clients = {client for versions in used for client in versions}
            latest = {c: max(versions.get(c, 0) for versions in used) for c in clients}
            self.engine.restore(kept.client_versions, after=latest)
        return kept.state

    def _count_rounds(self, state: State) -> int:
        """The number of the last round; a private run ends where its budget does."""
        if self.privacy is not None:
            return max(self.privacy.count_affordable_rounds(state), state.round)
        return count_rounds(self.method, self.setup)

    @staticmethod
    def _is_due(every: int, round: int, total: int) -> bool:
        return round == total or (every > 0 and round > 0 and round % every == 0)

    def _run_round(self, state: State, phase: Phase) -> Checkpoint:
        """Runs one communication round; the state and the client versions after it."""
        started = time.perf_counter()
        merged, accounting = self._exchange_with_quorum(state, phase, state.round + 1)
        done = RoundDone(
            state.round + 1,
            phase.name,
            accounting.loss,
            accounting.num_accepted,
            tuple(accounting.failures),
            accounting.bytes_down,
            accounting.bytes_up,
            time.perf_counter() - started,
            accounting.local,
            accounting.sent,
            accounting.losses,
            accounting.scales,
            accounting.clients,
            secure=accounting.secure,
            merging=accounting.merging,
        )
        if self.privacy is not None:
            done = self.privacy.conceal(done, state)
        self._record(done)
        if done.round <= EARLY_ROUNDS or done.round % HEALTH_CHECK_EVERY == 0:
            self._report_problems(done.round)
        merged = offload_state(replace(merged, round=state.round + 1))
        return Checkpoint(merged, self.engine.client_versions())

    def _exchange_with_quorum(
        self, state: State, phase: Phase, number: int
    ) -> tuple[State, RoundAccounting]:
        """Repeats an exchange until enough clients have answered, as the fault policy allows."""
        versions = self.engine.client_versions()
        merged, accounting = self._exchange(state, phase, number)
        for _ in range(self.faults.attempts - 1):
            if accounting.has_enough:
                break
            self._notify(RoundRepeated(number, accounting.num_accepted, accounting.quorum))
            self.engine.restore(versions)  # discards the client states of the failed attempt
            merged, accounting = self._exchange(state, phase, number)
        accounting.require_quorum(f"phase {phase.name}, round {number}")
        return merged, accounting

    def _exchange(self, state: State, phase: Phase, number: int) -> tuple[State, RoundAccounting]:
        """Plans a round, lets clients work, and merges the valid updates."""
        state = replace(state, phase=phase.name)
        stream = (2,) if phase.is_closing else ()
        seed = derive_seed(self.setup.seed, state.round, *stream)
        oversample = 0.0 if phase.is_closing else self.faults.oversample
        tasks: Sequence[Task]
        if self.privacy is not None:
            tasks = self.privacy.plan(state, self._find_available())
        else:
            sampling = "fixed" if phase.is_closing else self.setup.sampling
            cohort = sample_cohort(
                self.setup.registry, phase, seed, oversample, self._find_available(), sampling
            )
            tasks = self.method.plan(self.setup, state, cohort)
        if self.cadence.test_locally and not phase.is_closing:
            tasks = map_tasks(self._add_local_test, tasks)
        total = count_rounds(self.method, self.setup)
        self._notify(RoundStarted(number, phase.name, len(tasks), total))
        aggregation = self._aggregations[phase.name]
        needed = min(len(tasks), phase.count_needed(self.setup.registry))
        quorum = self.faults.required_replies(needed)
        if self.privacy is not None:
            quorum = min(1, needed)  # the noise does not depend on how many answer
        accounting = RoundAccounting(self.setup, state, self._notify, aggregation, quorum)
        self.engine.on_progress = lambda client, done: self._notify(ClientProgress(client, done))
        enough = needed if oversample else None
        plan = RoundPlan(state, tasks, aggregation, phase.is_closing, enough)
        merged = self._client_exchange.run(self.engine, plan, accounting)
        self.engine.on_progress = ignore_progress  # evaluation is not the round's progress
        return merged, accounting

    def _find_available(self) -> Collection[int] | None:
        """The clients that can be asked; None: all of them, or none is known to be available."""
        if self.available is None:
            return None
        known = self.setup.registry.numbers
        return {client for client in self.available() if client in known} or None

    def _keep_available(self, clients: Collection[int]) -> Collection[int]:
        """Of some clients those that can be asked."""
        available = self._find_available()
        return clients if available is None else [c for c in clients if c in available]

    def _add_local_test(self, task: Task) -> Task:
        """The task, with a test of the trained model if the client has test data."""
        is_tester = task.client in self.testers
        tested = WithLocalTest(task.recipe, scale=self.method.scales_outputs)
        return replace(task, recipe=tested) if is_tester else task

    def _run_closing_phases(self, state: State) -> tuple[State, list[RoundAccounting]]:
        """The state after the method's closing phases, and the accounting of each."""
        closings = []
        for phase in self.method.phases(self.setup):
            if phase.is_closing:
                for _ in range(phase.rounds):
                    merged, accounting = self._exchange_with_quorum(state, phase, state.round)
                    state = replace(merged, round=state.round)
                    closings.append(accounting)
        return state, closings

    def _evaluate_if_due(self, state: State, total: int) -> None:
        """Evaluates between rounds, and after the last one if a model is selected.

        ``train_from`` does the final evaluation, of the model that is kept.
        """
        is_between = state.round < total or self._selector.compares(state)
        if is_between and self._is_due(self.cadence.evaluate_every, state.round, total):
            self._evaluate(state, is_final=False)

    def _evaluate(self, state: State, *, is_final: bool) -> tuple[State, tuple[SizeScore, ...]]:
        """Finishes a copy of the state and evaluates it; returns both."""
        started = time.perf_counter()
        versions = self.engine.client_versions()
        finished, closings = self._run_closing_phases(state)
        if is_final and self.on_finished is not None:
            self.on_finished(self, finished)  # before an evaluation that may fail
        failures = [failure for accounting in closings for failure in accounting.failures]
        find_scores = partial(
            evaluate,
            self.setup,
            self.method,
            finished,
            has_server_test=self.has_server_test,
            testers=self._keep_available(self.testers),
            on_failure=failures.append,
        )
        scores = measure_backdoor(
            self.attack, self.engine, find_scores(engine=self.engine), find_scores
        )
        is_compared = not is_final and self._selector.compares(state)
        validation = None
        if is_compared:
            validation = self._selector.score(
                finished, self.engine, self._keep_available(self.validators), failures.append
            )
        if not is_final and self.engine.client_versions() != versions:
            self.engine.restore(versions)  # training continues from the states before
        progress = self._selector.progress
        if is_compared:
            progress = self._selector.compare(progress, state, versions, validation)
        done = Evaluated(
            finished.round,
            scores,
            tuple(failures),
            sum(accounting.bytes_down for accounting in closings),
            sum(accounting.bytes_up for accounting in closings),
            is_final,
            time.perf_counter() - started,
            dict(pair for accounting in closings for pair in accounting.scales.items()),
            secure=next((one.secure for one in reversed(closings) if one.secure), None),
            validation=validation,
            best_round=progress.best_round if self.selection.is_on else None,
        )
        records = [*self._history, encode_event(done, self.setup.structure)]
        self._record(replace(done, findings=self._find_problems(records)))
        self._selector.progress = progress  # after it is recorded, see ``compare_recorded``
        self._report_problems(finished.round)
        return finished, scores

    def _find_problems(self, records: Sequence[Record]) -> tuple[Finding, ...]:
        """What the records show about the health of the run."""
        classes = self.setup.structure.classes if self.setup.task.has_classes else None
        return find_problems(
            records, self.setup.structure.groups[classes].size if classes else None
        )

    def _report_problems(self, round: int) -> None:
        """Reports problems that the records show, each once."""
        for finding in self._find_problems(self._history):
            key = finding.kind, finding.clients
            if key not in self._reported:
                self._reported.add(key)
                self._notify(ProblemFound(round, finding))

    def _save(self, done: Checkpoint) -> None:
        self._saved.save(
            replace(done, environments=self.environments, selection=self._selector.progress)
        )

    def restore(self) -> Position:
        """The position of the newest good checkpoint; the start if there is none at all.

        Everything later is removed from the directory.
        """
        position = self._saved.find_position(self._require_same)
        for record in self._saved.read_records():
            add_to_history(self._history, record)
        if position is None:
            return self.start()
        done = position.checkpoint
        self._compare_environment(done)
        if position.is_evaluated:
            done = self._selector.compare_recorded(done, self._history[-1] if self._history else {})
        return replace(position, checkpoint=done)

    def _require_same(self, restored: Checkpoint) -> None:
        """Refuses a checkpoint of a run with other rounds, or with another kind of privacy."""
        require_same_rounds(restored.state, self.method, self.setup)
        require_same_privacy(restored.state, is_private=self.privacy is not None)

    def _compare_environment(self, restored: Checkpoint) -> None:
        """Takes over the environments of the run so far, and reports a change of it."""
        (current,) = self.environments
        self.environments = restored.environments
        if change := describe_environment_change(restored.environments[-1], current):
            self.environments += (current,)
            self._notify(EnvironmentChanged(restored.state.round, change))

    def _record(self, event: RoundDone | Evaluated) -> None:
        """Writes a record; times go to another file, so that equal runs have equal records."""
        self._notify(event)
        record = encode_event(event, self.setup.structure)
        timing = {"round": event.round, "event": type(event).__name__, "seconds": event.seconds}
        add_to_history(self._history, expand_record(record))
        if not self._saved.add_record(record, timing) and isinstance(event, RoundDone):
            self._clients.append(event.clients)
