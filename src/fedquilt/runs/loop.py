"""The loop: plan, let clients work, merge; evaluate and save on the way."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedquilt.engines.engine import Engine, nobody
from fedquilt.engines.kept import KeptStates
from fedquilt.errors import CheckpointError, ConfigError, DamageError, TrainingError
from fedquilt.evaluation.accuracy import SizeScore, evaluate
from fedquilt.federation.boundary import EXAMPLES, LOSS, MOST_LOSS, admit
from fedquilt.federation.client import Failure, Task, Update, seed_of
from fedquilt.federation.state import Phase, Setup, State, sample
from fedquilt.methods.method import Method
from fedquilt.ranges import Count, NotNegative, Number, check_fields
from fedquilt.runs import checkpoint
from fedquilt.runs.checkpoint import Checkpoint
from fedquilt.runs.health import Finding, Record, findings
from fedquilt.runs.origin import Origin, change, origin
from fedquilt.runs.records import Records, read_records
from fedquilt.structure.cut import Params, shapes
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.tested import RIGHT, TESTED, Tested

NOTICED_EVERY = 5  # rounds between two looks at a run's health


@dataclass(frozen=True)
class RoundStarted:
    """A round begins, with this many tasks; the run has ``total`` rounds in all its phases."""

    round: int
    phase: str
    num_tasks: int
    total: int


@dataclass(frozen=True)
class ClientProgress:
    """A client at work has done this share of it; only long work is worth a word."""

    client: int
    done: float


@dataclass(frozen=True)
class ClientDone:
    """A client has answered, or failed for a reason."""

    client: int
    problem: str | None = None


@dataclass(frozen=True)
class RoundDone:
    """A round is over.

    ``local`` is the accuracy of each client's own model on its own test data, before models were
    merged; empty if nobody asked. ``sent`` are the bytes that each client sent, ``losses`` the
    training losses of each, None where that is no number, and ``scales`` the largest number in
    the statistics that it sent, if it did.
    """

    round: int
    phase: str
    loss: float | None
    num_clients: int
    failures: tuple[Failure, ...]
    bytes_down: int
    bytes_up: int
    seconds: float
    local: Mapping[int, float] = field(default_factory=dict)
    sent: Mapping[int, int] = field(default_factory=dict)
    losses: Mapping[int, float | None] = field(default_factory=dict)
    scales: Mapping[int, float] = field(default_factory=dict)

    @property
    def local_accuracy(self) -> float | None:
        """The mean over clients; None if nobody asked."""
        return sum(self.local.values()) / len(self.local) if self.local else None


@dataclass(frozen=True)
class RoundLost:
    """A round had too few answers to count, and is done again."""

    round: int
    num_clients: int
    quorum: int


@dataclass(frozen=True)
class Evaluated:
    """The model has been finished and evaluated after a round; ``is_final`` at the run's end.

    Failures are those of the closing phases and of clients that tested; bytes and scales those of
    the former. Findings are of the whole run so far.
    """

    round: int
    scores: tuple[SizeScore, ...]
    failures: tuple[Failure, ...]
    bytes_down: int
    bytes_up: int
    is_final: bool
    seconds: float
    scales: Mapping[int, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Noticed:
    """The records so far show something that whoever runs this should know; said once."""

    round: int
    finding: Finding


@dataclass(frozen=True)
class Saved:
    """A checkpoint has been written."""

    round: int
    path: Path


@dataclass(frozen=True)
class Moved:
    """The run goes on elsewhere than where it was after this round: its last bits may differ."""

    round: int
    change: str


@dataclass(frozen=True)
class CheckpointDamaged:
    """The newest checkpoint cannot be used, so that the run goes on after this earlier round."""

    round: int
    problem: str


Event = (
    RoundStarted
    | ClientProgress
    | ClientDone
    | RoundDone
    | RoundLost
    | Evaluated
    | Saved
    | Moved
    | Noticed
    | CheckpointDamaged
)
Watch = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Watches nothing."""


@dataclass(frozen=True)
class Pace:
    """How often things are done, in rounds; 0 means only at the end.

    With ``test_locally`` clients test their own models in every round, before they are merged.
    """

    evaluate_every: Number = 0
    checkpoint_every: Number = 10
    test_locally: bool = False

    def __post_init__(self) -> None:
        """Refuses what counts no rounds."""
        check_fields(self)


@dataclass(frozen=True)
class Tolerance:
    """What a round may lack.

    It counts with at least ``quorum`` answers, or with those of half of its clients (None), which
    is one of one or two; if there are fewer, nothing of it remains and it is done again, up to
    ``tries`` times in all. Then the run ends. So it is in closing phases. ``spare`` is the share of
    clients that are asked beyond those that are needed: the round then ends with as many answers as
    are needed.
    """

    quorum: Count | None = None
    tries: Count = 1
    spare: NotNegative = 0.0

    def __post_init__(self) -> None:
        """Refuses what makes no sense."""
        check_fields(self)

    def least(self, num_clients: int) -> int:
        """The answers without which a round of so many clients does not count.

        >>> [Tolerance().least(count) for count in (1, 2, 3, 10)], Tolerance(quorum=4).least(3)
        ([1, 1, 2, 5], 3)
        """
        half = math.ceil(num_clients / 2)
        return half if self.quorum is None else min(self.quorum, num_clients)


@dataclass(eq=False)
class Loop:
    """One run in progress."""

    setup: Setup
    method: Method
    engine: Engine
    held_out: bool
    testers: tuple[int, ...]
    folder: Path | None = None
    fingerprint: str = ""
    pace: Pace = field(default_factory=Pace)
    watch: Watch = ignore
    tolerance: Tolerance = field(default_factory=Tolerance)
    keep: Callable[[State], None] = lambda state: None  # what is done with the finished state
    present: Callable[[], Collection[int]] | None = None  # whom to sample from; None: all clients
    origins: tuple[Origin, ...] = field(default_factory=lambda: (origin(),), init=False)

    def __post_init__(self) -> None:
        self._records = None if self.folder is None else Records(self.folder)
        self._kept = None if self.folder is None else KeptStates(self.folder / "clients")
        self._history: list[Record] = []
        self._noticed: set[tuple[str, tuple[int, ...]]] = set()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the records so far show about the run's health."""
        return self._found(self._history)

    def run(self, *, resume: bool = False) -> tuple[State, tuple[SizeScore, ...]]:
        """Trains to the last round; the finished state and its scores."""
        done, is_evaluated = self._resumed() if resume else (self._started(), False)
        if resume and self.folder is not None:
            self._history.extend(read_records(self.folder))
        last_saved = done.state.round
        total = num_rounds(self.method, self.setup)
        try:
            if not is_evaluated:  # stopped after the round, before its evaluation was recorded
                self._evaluate_if_due(done.state, total)
            while done.state.round < total:
                done = self._round(done.state, phase_of(done.state.round, self.method, self.setup))
                self._evaluate_if_due(done.state, total)
                if self._is_due(self.pace.checkpoint_every, done.state.round, total):
                    self._save(done)
                    last_saved = done.state.round
                self._forget_old_states(done)
        except (KeyboardInterrupt, TrainingError):
            if done.state.round > last_saved:
                self._save(done)
            raise
        return self._evaluate(done.state, is_final=True)

    @staticmethod
    def _is_due(every: int, round: int, total: int) -> bool:
        return round == total or (every > 0 and round > 0 and round % every == 0)

    def _round(self, state: State, phase: Phase) -> Checkpoint:
        """One communication round; the state after it, and what clients keep with it."""
        started = time.perf_counter()
        merged, ledger = self._counted(state, phase, state.round + 1)
        done = RoundDone(
            state.round + 1,
            phase.name,
            ledger.loss,
            ledger.num_accepted,
            tuple(ledger.failures),
            ledger.bytes_down,
            ledger.bytes_up,
            time.perf_counter() - started,
            ledger.local,
            dict(ledger.sent),
            ledger.losses,
            ledger.scales,
        )
        self._record(done)
        if done.round % NOTICED_EVERY == 0:
            self._notice(done.round)
        return Checkpoint(replace(merged, round=state.round + 1), self.engine.kept())

    def _counted(self, state: State, phase: Phase, number: int) -> tuple[State, _Ledger]:
        """An exchange with enough answers, tried so often; refused if there are too few."""
        kept = self.engine.kept()
        merged, ledger = self._exchange(state, phase, number)
        for _ in range(self.tolerance.tries - 1):
            if ledger.has_enough:
                break
            self.watch(RoundLost(number, ledger.num_accepted, ledger.quorum))
            self.engine.restore(kept)  # what clients kept with it is forgotten too
            merged, ledger = self._exchange(state, phase, number)
        ledger.refuse_too_few(f"phase {phase.name}, round {number}")
        return merged, ledger

    def _exchange(self, state: State, phase: Phase, number: int) -> tuple[State, _Ledger]:
        """Plan, let clients work, merge what is usable."""
        state = replace(state, phase=phase.name)
        stream = (2,) if phase.is_closing else ()
        seed = seed_of(self.setup.seed, state.round, *stream)
        spare = 0.0 if phase.is_closing else self.tolerance.spare
        cohort = sample(self.setup.clients, phase, seed, spare, self._present())
        tasks = self.method.plan(self.setup, state, cohort)
        if self.pace.test_locally and not phase.is_closing:
            tasks = [self._tested(task) for task in tasks]
        total = num_rounds(self.method, self.setup)
        self.watch(RoundStarted(number, phase.name, len(tasks), total))
        opened = partial(self.method.opened, self.setup, state)
        needed = min(len(tasks), phase.needed(self.setup.clients))
        quorum = self.tolerance.least(needed)
        ledger = _Ledger(self.setup, state.params, self.watch, opened, quorum)
        sent = Counter(subnet for task in tasks for subnet in task.subnets)
        ledger.bytes_down = sum(num_bytes(self.setup, s) * count for s, count in sent.items())
        whole = (task.params.values() for task in tasks if not task.subnets)
        ledger.bytes_down += sum(tensor.nbytes for tensors in whole for tensor in tensors)
        self.engine.tell = lambda client, done: self.watch(ClientProgress(client, done))
        results = self.engine.run(tasks, **({"enough": needed} if spare else {}))
        merged = self.method.merge(self.setup, state, ledger.accepted(tasks, results))
        self.engine.tell = nobody  # whoever evaluates is not one of the round's clients
        return merged, ledger

    def _present(self) -> Collection[int]:
        """Clients that can be asked; all of them, if nobody knows better."""
        everyone = {client.id for client in self.setup.clients}
        return everyone if self.present is None else everyone & set(self.present()) or everyone

    def _tested(self, task: Task) -> Task:
        """The task, and then a test of what the client has made of it."""
        is_tester = task.client in self.testers
        tested = Tested(task.recipe, scale=self.method.scales_outputs)
        return replace(task, recipe=tested) if is_tester else task

    def _finished(self, state: State) -> tuple[State, list[_Ledger]]:
        """A copy of the state after the method's closing phases, and how those went."""
        ledgers = []
        for phase in self.method.phases(self.setup):
            if phase.is_closing:
                for _ in range(phase.rounds):
                    merged, ledger = self._counted(state, phase, state.round)
                    state = replace(merged, round=state.round)
                    ledgers.append(ledger)
        return state, ledgers

    def _evaluate_if_due(self, state: State, total: int) -> None:
        """An evaluation on the way; the one at the end is another matter."""
        if state.round < total and self._is_due(self.pace.evaluate_every, state.round, total):
            self._evaluate(state, is_final=False)

    def _evaluate(self, state: State, *, is_final: bool) -> tuple[State, tuple[SizeScore, ...]]:
        """The finished state, and its scores."""
        started = time.perf_counter()
        kept = self.engine.kept()
        finished, ledgers = self._finished(state)
        if is_final:
            self.keep(finished)  # before an evaluation that may fail
        failures = [failure for ledger in ledgers for failure in ledger.failures]
        scores = tuple(
            evaluate(
                self.setup,
                self.method,
                finished,
                self.engine,
                held_out=self.held_out,
                testers=tuple(client for client in self.testers if client in self._present()),
                tell=failures.append,
            )
        )
        if not is_final and self.engine.kept() != kept:
            self.engine.restore(kept)  # training goes on from what it left
        done = Evaluated(
            finished.round,
            scores,
            tuple(failures),
            sum(ledger.bytes_down for ledger in ledgers),
            sum(ledger.bytes_up for ledger in ledgers),
            is_final,
            time.perf_counter() - started,
            {client: scale for ledger in ledgers for client, scale in ledger.scales.items()},
        )
        self._record(replace(done, findings=self._found([*self._history, asdict(done)])))
        self._notice(finished.round)
        return finished, scores

    def _found(self, records: Sequence[Record]) -> tuple[Finding, ...]:
        """What the records show."""
        classes = self.setup.structure.classes
        return findings(records, self.setup.structure.groups[classes].size if classes else None)

    def _notice(self, round: int) -> None:
        """Says what the records show, unless it was said before."""
        for finding in self._found(self._history):
            about = finding.kind, finding.clients
            if about not in self._noticed:
                self._noticed.add(about)
                self.watch(Noticed(round, finding))

    def _save(self, done: Checkpoint) -> None:
        if self.folder is None or self._kept is None or self._records is None:
            return
        try:  # what the checkpoint names is on the disk before it is
            self._kept.sync(done.kept)
            done = replace(done, origins=self.origins, records=self._records.mark(done.state.round))
        except OSError as problem:
            raise CheckpointError(
                f"what belongs to round {done.state.round} could not be written to {self.folder} "
                f"({problem}); make room and resume"
            ) from problem
        path = checkpoint.save(self.folder / "checkpoints", done, self.fingerprint)
        self.watch(Saved(done.state.round, path))

    def _forget_old_states(self, done: Checkpoint) -> None:
        """Of what clients keep, only this round's versions and the checkpoints' are needed."""
        if done.kept:
            saved = [] if self.folder is None else checkpoint.saved(self.folder / "checkpoints")
            self.engine.forget_others(done.kept, *(checkpoint.kept_of(path) for path in saved))

    def _started(self) -> Checkpoint:
        return Checkpoint(self.method.start(self.setup), self.engine.kept())

    def _resumed(self) -> tuple[Checkpoint, bool]:
        """Where the run goes on, and whether that round was evaluated."""
        assert self.folder is not None
        assert self._records is not None
        checkpoint.tidy(self.folder / "checkpoints")
        paths = checkpoint.saved(self.folder / "checkpoints")
        damaged: dict[Path, DamageError] = {}
        for path in reversed(paths):
            try:
                restored = checkpoint.load(path, self.fingerprint)
                refuse_other_rounds(restored.state, self.method, self.setup)
                self.engine.restore(restored.kept)
                is_evaluated = self._records.cut_back(restored.records, restored.state.round)
            except DamageError as problem:
                damaged[path] = problem
                continue
            self._forget_damaged(damaged, restored)
            self._forget_old_states(restored)
            self._note_origin(restored)
            return restored, is_evaluated
        if paths:
            newest, *_ = damaged.values()
            raise CheckpointError(
                f"{newest} (no other checkpoint can be used; if nothing can be restored, start "
                "the run anew in another directory)"
            ) from newest
        self._records.cut_back()
        return self._started(), False  # stopped before the first checkpoint

    def _forget_damaged(self, damaged: Mapping[Path, DamageError], restored: Checkpoint) -> None:
        """Says what cannot be used, and removes it: it would be in the way of the next ones."""
        for path, problem in damaged.items():
            self.watch(CheckpointDamaged(restored.state.round, str(problem)))
            checkpoint.discard(path)

    def _note_origin(self, restored: Checkpoint) -> None:
        """Remembers where the run has been, and says so if that is not where it is now."""
        (here,) = self.origins
        self.origins = restored.origins
        if changed := change(restored.origins[-1], here):
            self.origins += (here,)
            self.watch(Moved(restored.state.round, changed))

    def _record(self, event: RoundDone | Evaluated) -> None:
        """Adds to the run's records; times apart, so that records of equal runs are equal."""
        self.watch(event)
        record: dict[str, Any] = asdict(event)
        timing = {
            "round": record["round"],
            "event": type(event).__name__,
            "seconds": record.pop("seconds"),
        }
        self._history.append(record)
        if self._records is not None:
            self._records.add(record, timing)


def num_rounds(method: Method, setup: Setup) -> int:
    """The rounds of all phases but the closing ones."""
    return sum(phase.rounds for phase in method.phases(setup) if not phase.is_closing)


def phase_of(round: int, method: Method, setup: Setup) -> Phase:
    """The phase that a round, counted from 0, belongs to."""
    for phase in method.phases(setup):
        if not phase.is_closing:
            if round < phase.rounds:
                return phase
            round -= phase.rounds
    raise AssertionError("a round after the last phase")


def refuse_other_rounds(state: State, method: Method, setup: Setup) -> None:
    """Refuses to go on from a state that a run of so many rounds would never have been in."""
    total = num_rounds(method, setup)
    if state.round > total:
        raise ConfigError(f"the run has done {state.round} rounds, and {total} are less")
    if state.round and (phase := phase_of(state.round - 1, method, setup)).name != state.phase:
        raise ConfigError(
            f"the run has done {state.round} rounds and was in its phase {state.phase}; with "
            f"{setup.rounds} rounds of training that would be {phase.name}; resume it with as many "
            "rounds as it was started with"
        )


def num_bytes(setup: Setup, subnet: Subnet) -> int:
    """Bytes of a subnet's tensors, as they travel."""
    item = {n: t.element_size() for n, t in named_tensors(setup.model).items()}
    return sum(math.prod(shape) * item[n] for n, shape in shapes(setup.structure, subnet).items())


class _Ledger:
    """Lets good updates through, refuses bad ones, and counts both."""

    def __init__(
        self,
        setup: Setup,
        params: Params,
        watch: Watch,
        opened: Callable[[Update], Update],
        quorum: int,
    ) -> None:
        self._setup, self._params, self._watch = setup, params, watch
        self._opened, self.quorum = opened, quorum
        self.failures: list[Failure] = []
        self.num_accepted = 0
        self.bytes_down = 0
        self.sent: Counter[int] = Counter()  # bytes, by client
        self._loss = self._examples = 0.0
        self.local: dict[int, float] = {}
        self.losses: dict[int, float | None] = {}
        self.scales: dict[int, float] = {}

    def accepted(
        self, tasks: Sequence[Task], results: Iterable[Update | Failure]
    ) -> Iterator[Update]:
        """The updates that were asked for, as they come."""
        for task, result in zip(tasks, results, strict=True):
            update = admit(self._setup, task, result, self._params, self._opened)
            if isinstance(update, Failure):
                self.failures.append(update)
                self._watch(ClientDone(update.client, update.reason))
                continue
            assert isinstance(result, Update)
            self.num_accepted += 1
            self._note(update)
            self.sent[update.client] += sum(
                t.nbytes for part in result.params for t in part.values()
            )
            self._watch(ClientDone(update.client))
            yield update

    def _note(self, update: Update) -> None:
        """What the client reports; a loss that is no number is not averaged with those that are."""
        metrics = update.metrics
        if LOSS in metrics:
            is_number = abs(metrics[LOSS]) <= MOST_LOSS
            self.losses[update.client] = _shown(metrics[LOSS]) if is_number else None
            if is_number:
                self._loss += metrics[LOSS] * metrics[EXAMPLES]
                self._examples += metrics[EXAMPLES]
        statistics = [
            float(part[name].abs().max())
            for part in update.params
            for name in self._setup.structure.statistics & part.keys()
            if part[name].is_floating_point() and part[name].numel()
        ]
        if statistics:
            self.scales[update.client] = _shown(max(statistics))
        if metrics.get(TESTED):
            self.local[update.client] = metrics[RIGHT] / metrics[TESTED]

    @property
    def bytes_up(self) -> int:
        """What clients sent, all together."""
        return self.sent.total()

    @property
    def has_enough(self) -> bool:
        """Whether as many answers could be used as must be."""
        return self.num_accepted >= self.quorum

    def refuse_too_few(self, when: str) -> None:
        """Raises if there are fewer answers."""
        if not self.has_enough:
            count = self.num_accepted
            who = f"{count} of {self.quorum} clients that are needed" if count else "no client"
            raise TrainingError(
                f"{who} gave a usable answer in {when}; {_commonest(self.failures)}"
            )

    @property
    def loss(self) -> float | None:
        """Mean training loss over examples, if it is a number."""
        mean = self._loss / self._examples if self._examples else math.nan
        return mean if math.isfinite(mean) else None


def _shown(value: float) -> float:
    """A number with the digits that records need."""
    return float(f"{value:.5g}")


def _commonest(failures: Sequence[Failure]) -> str:
    """The first failure of the kind that most are of; of one kind are those that differ in numbers.

    >>> _commonest([Failure(0, "tired"), Failure(1, "3 left"), Failure(2, "-0.5 left")])
    'client 1: 3 left (2 of 3 failed like this)'
    """
    kinds = [re.sub(r"-?\d[\d.]*", "#", failure.reason) for failure in failures]
    kind, count = Counter(kinds).most_common(1)[0]
    share = f" ({count} of {len(failures)} failed like this)" if len(failures) > 1 else ""
    return f"{failures[kinds.index(kind)]}{share}"
