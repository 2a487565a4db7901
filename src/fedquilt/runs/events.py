"""What a run tells its callbacks while it works.

A callback is a function of one event. It is called in the order in which things happen:

>>> import torch, fedquilt as fq
>>> def follow(event: fq.Event) -> None:
...     match event:
...         case fq.RunStarted():
...             print(f"{event.settings['method']}, seed {event.settings['seed']}")
...         case fq.RoundStarted():
...             print(f"round {event.round} of {event.total}: {event.num_tasks} clients")
...         case fq.ClientDone():
...             print(f"client {event.client}: {event.problem or 'done'}")
...         case fq.RoundDone():
...             print(f"{event.bytes_up} bytes received")
...         case fq.Evaluated():
...             print(f"{len(event.scores)} size evaluated")
...         case fq.CheckpointSaved():
...             print(f"saved as {event.path.name}")
...         case fq.ProblemFound():
...             print(event.finding.sentence)
...         case fq.RunEnded():
...             print(event.state)
>>> data = (torch.rand(12, 4), torch.arange(12) % 3)
>>> clients = fq.make_clients(data, test=data, count=2)
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
>>> callbacks: list[fq.Callback] = [follow]
>>> run = fq.train(model, data[0], "fedavg", clients, 1, workers=0, callbacks=callbacks)
FedAvg, seed 0
round 1 of 1: 2 clients
client 0: done
client 1: done
536 bytes received
1 size evaluated
finished

An exception that a callback raises ends the run. A ``Tracker`` is a callback that does not: it is
switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedquilt.errors import ConfigError
from fedquilt.evaluation.clients import ClientRecord
from fedquilt.evaluation.scores import SizeScore
from fedquilt.federation.client import Failure
from fedquilt.federation.privacy.accountant import PrivacySpent
from fedquilt.runs.health import Finding

RunState = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunStarted:
    """A run starts, or goes on from a checkpoint.

    Args:
        total: The number of rounds of all phases.
        round: The number of rounds that are done already; 0 of a new run.
        settings: The settings of the run by name, as plain values.
        folder: The run's directory; None: it is in memory only.
        is_resumed: Whether the run goes on.
    """

    total: int
    round: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    is_resumed: bool = False


@dataclass(frozen=True)
class RunEnded:
    """A run that was started has ended; it is the last event.

    Args:
        state: ``finished``; ``stopped`` by Ctrl-C or a signal; or ``failed``.
        problem: Why it failed; None: it has not.
    """

    state: RunState
    problem: str | None = None


@dataclass(frozen=True)
class RoundStarted:
    """A round starts.

    Args:
        round: The number of the round, from 1.
        phase: The name of the method's phase.
        num_tasks: The number of tasks of the round.
        total: The number of rounds of all phases.
    """

    round: int
    phase: str
    num_tasks: int
    total: int


@dataclass(frozen=True)
class ClientProgress:
    """A client has done this fraction of its work; reported for long work only."""

    client: int
    done: float


@dataclass(frozen=True)
class ClientDone:
    """A client has answered, or failed.

    Args:
        client: The client's number.
        problem: Why it failed; None: it has answered.
    """

    client: int
    problem: str | None = None


@dataclass(frozen=True)
class SecureRound:
    """What is recorded about the secure sum of a round.

    Args:
        threshold: Clients without whom no ring is opened.
        opened: The number of cells that were opened, and so averaged.
        closed: For each part of the model that was not opened its number of cells, and why; these
            cells keep the server's values.
        clipped: How many changes of single weights were clipped, over all clients.
    """

    threshold: int
    opened: int
    closed: tuple[tuple[int, str], ...] = ()
    clipped: int = 0


@dataclass(frozen=True)
class RoundDone:
    """A round is over.

    Args:
        round: The number of the round, from 1.
        phase: The name of the method's phase.
        loss: The mean training loss of the clients; None if there is none that is finite.
        num_clients: The number of clients whose updates were merged.
        failures: The clients without a usable update, and why.
        bytes_down: The bytes that were sent to clients.
        bytes_up: The bytes that clients sent.
        seconds: How long the round took.
        local: The accuracy of each client's own model on its own test data, before the models were
            merged; empty without ``test_locally``.
        sent: The bytes that each client sent.
        losses: The training loss of each client; None if it was not finite.
        scales: The largest value in the normalization statistics that each client sent, if any.
        clients: What every client that was asked received, returned and reported.
        privacy: What a private run has spent so far; None: it is not private. Then the numbers of
            clients and bytes are expected ones, and nothing is told of single clients.
        secure: What the secure sum of the round was of; None without secure aggregation.
        merging: Numbers about the aggregation, such as how many cells kept the server's values
            because a robust rule had too few updates of them.
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
    clients: Sequence[ClientRecord] = ()
    privacy: PrivacySpent | None = None
    secure: SecureRound | None = None
    merging: Mapping[str, float] = field(default_factory=dict)

    @property
    def local_accuracy(self) -> float | None:
        """The mean over clients; None without local tests."""
        return sum(self.local.values()) / len(self.local) if self.local else None


@dataclass(frozen=True)
class RoundRepeated:
    """A round had fewer answers than its quorum, and is repeated."""

    round: int
    num_clients: int
    quorum: int


@dataclass(frozen=True)
class Evaluated:
    """The model was evaluated after a round.

    Args:
        round: The number of rounds that are done.
        scores: The scores of each size, the largest first.
        failures: The failures of the closing phases and of the evaluation.
        bytes_down: The bytes that were sent to clients in the closing phases.
        bytes_up: The bytes that clients sent in the closing phases.
        is_final: Whether the run is at its end.
        seconds: How long the closing phases and the evaluation took.
        scales: As in ``RoundDone``, of the closing phases.
        findings: What the records of the whole run so far show about its health.
        secure: As in ``RoundDone``, of the last closing phase.
        validation: The score by which models are selected; None: there is no selection, or the
            score is not known.
        best_round: The round of the best model so far, 0 if none has a score; None: there is no
            selection.
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
    secure: SecureRound | None = None
    validation: float | None = None
    best_round: int | None = None


@dataclass(frozen=True)
class StoppedEarly:
    """The run ends before its last round: no better model came for long enough.

    Args:
        round: The number of rounds that are done.
        num_evaluations: The evaluations since the best model.
        best_round: The round of the best model; 0: no model had a score.
    """

    round: int
    num_evaluations: int
    best_round: int


@dataclass(frozen=True)
class ProblemFound:
    """The records so far show a problem; each problem is reported once.

    Args:
        round: The number of the round in which it was found.
        finding: The problem: its kind, how severe it is, and a sentence about it.
    """

    round: int
    finding: Finding


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint has been written.

    Args:
        round: The number of rounds that are done.
        path: The file.
    """

    round: int
    path: Path


@dataclass(frozen=True)
class EnvironmentChanged:
    """The run resumes in another environment, so that last bits of its results may differ."""

    round: int
    change: str


@dataclass(frozen=True)
class PassSizeChosen:
    """It was chosen how many clients with subnets of one size train in one pass.

    Args:
        size: The number of values in such a subnet.
        clients: The most clients in one pass; 1: each trains alone.
        reason: Why.
    """

    size: str
    clients: int
    reason: str


@dataclass(frozen=True)
class WaitingForLock:
    """Another process works in the run's directory; this one waits, at most ``seconds``."""

    folder: Path | None
    seconds: float


@dataclass(frozen=True)
class CheckpointDamaged:
    """A checkpoint is damaged, so that the run resumes from ``round``, which is earlier."""

    round: int
    problem: str


Event = (
    RunStarted
    | RunEnded
    | RoundStarted
    | ClientProgress
    | ClientDone
    | RoundDone
    | RoundRepeated
    | Evaluated
    | StoppedEarly
    | CheckpointSaved
    | EnvironmentChanged
    | ProblemFound
    | CheckpointDamaged
    | PassSizeChosen
    | WaitingForLock
)
Callback = Callable[[Event], None]


def list_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Lists callbacks, and refuses what is none."""
    if callable(callbacks):
        raise ConfigError("callbacks is a list of callables, such as [print], got one callable")
    listed = tuple(callbacks)
    for callback in listed:
        if not callable(callback):
            raise ConfigError(
                f"a callback is a callable that takes an event, got {type(callback).__name__}"
            )
    return listed


def combine_callbacks(callbacks: Iterable[Callback]) -> Callback:
    """One callback that calls several, in their order.

    >>> heard = []
    >>> combine_callbacks([heard.append, heard.append])(ClientDone(3))
    >>> len(heard)
    2
    """
    listed = list_callbacks(callbacks)

    def notify(event: Event) -> None:
        for callback in listed:
            callback(event)

    return notify
