"""What a run is doing now, in a small file for whoever watches it; results do not depend on it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.events import (
    ClientDone,
    ClientProgress,
    Evaluated,
    Event,
    RoundDone,
    RoundStarted,
    RunEnded,
)

MIN_SECONDS = 1.0  # between two writes, while clients work
MAX_LISTED = 40  # clients of each kind in the file, however many there are


@dataclass(frozen=True)
class RunStatus:
    """What a run is doing.

    Args:
        state: ``running``, ``finished`` or ``stopped``.
        process: The number of its process.
        host: The machine that it runs on.
        time: When this was written, in seconds since 1970.
        round: The current round, from 1.
        total: The number of rounds of all phases.
        phase: The name of the phase.
        num_tasks: The number of tasks of the round.
        num_done: The number of clients of the round that have answered or failed.
        working: What part of its work each client has done, of those that report it.
        failed: Why clients of this round failed.
    """

    state: str = "running"
    process: int = 0
    host: str = ""
    time: float = 0.0
    round: int = 0
    total: int = 0
    phase: str = ""
    num_tasks: int = 0
    num_done: int = 0
    working: Mapping[int, float] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether the run goes on; a process that was killed could not say so."""
        if self.state != "running":
            return False
        if self.host != platform.node():
            return True  # its processes cannot be seen from here
        return Path(f"/proc/{self.process}").exists() or not Path("/proc/self").exists()


class StatusWriter:
    """A callback that keeps the status of a run in its directory up to date."""

    def __init__(self, directory: RunDirectory) -> None:
        self._file = directory.status_file
        self._status = RunStatus(process=os.getpid(), host=platform.node())
        self._written = -MIN_SECONDS

    def __call__(self, event: Event) -> None:
        """Takes an event into account."""
        status = self._status
        match event:
            case RoundStarted():
                self._status = replace(
                    status,
                    round=event.round,
                    total=event.total,
                    phase=event.phase,
                    num_tasks=event.num_tasks,
                    num_done=0,
                    working={},
                    failed={},
                )
            case ClientProgress():
                working = {**status.working, event.client: round(event.done, 3)}
                if len(working) <= MAX_LISTED:
                    self._status = replace(status, working=working)
            case ClientDone():
                working = {c: done for c, done in status.working.items() if c != event.client}
                failed = dict(status.failed)
                if event.problem is not None and len(failed) < MAX_LISTED:
                    failed[event.client] = event.problem[:300]
                self._status = replace(
                    status, num_done=status.num_done + 1, working=working, failed=failed
                )
            case RoundDone() | Evaluated():
                self._status = replace(status, working={})
            case RunEnded() if status.total:  # it was not refused before its first round
                state = "finished" if event.state == "finished" else "stopped"
                self._status = replace(status, state=state, working={})
            case _:
                return
        self._write(at_once=not isinstance(event, ClientProgress | ClientDone))

    def _write(self, *, at_once: bool) -> None:
        if not at_once and time.monotonic() - self._written < MIN_SECONDS:
            return
        self._written = time.monotonic()
        document = asdict(replace(self._status, time=time.time()))
        part = self._file.with_name(f".{self._file.name}.part")
        with suppress(OSError):  # a full disk is no reason to stop here
            part.write_text(json.dumps(document))
            part.replace(self._file)


def read_status(directory: RunDirectory) -> RunStatus | None:
    """What a run is doing; None if it has not said."""
    try:
        document: dict[str, Any] = json.loads(directory.status_file.read_text())
        working = {int(client): float(done) for client, done in document["working"].items()}
        failed = {int(client): str(problem) for client, problem in document["failed"].items()}
        return RunStatus(**{**document, "working": working, "failed": failed})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
