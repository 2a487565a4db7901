"""The events of a run in Python's ``logging``."""

from __future__ import annotations

import logging

from fedquilt.federation.client import client_label
from fedquilt.formatting import format_count
from fedquilt.runs.event_lines import describe_event
from fedquilt.runs.events import (
    CheckpointDamaged,
    CheckpointSaved,
    ClientDone,
    ClientProgress,
    EnvironmentChanged,
    Event,
    ProblemFound,
    RoundRepeated,
    RoundStarted,
    RunEnded,
    RunStarted,
)

logger = logging.getLogger(__name__)


class EventLogger:
    """A callback that logs every event: problems as warnings, rounds as infos, clients as debug."""

    def __init__(self) -> None:
        self._num_rounds = 0

    def __call__(self, event: Event) -> None:
        """Logs an event."""
        if isinstance(event, RunStarted | RoundStarted):
            self._num_rounds = event.total
        level = _choose_level(event)
        if logger.isEnabledFor(level):
            logger.log(level, "%s", _describe(event, self._num_rounds))


def _choose_level(event: Event) -> int:
    match event:
        case RunEnded(state="failed"):
            return logging.ERROR
        case ClientDone():
            return logging.DEBUG if event.problem is None else logging.WARNING
        case CheckpointDamaged() | EnvironmentChanged() | ProblemFound() | RoundRepeated():
            return logging.WARNING
        case RoundStarted() | ClientProgress() | CheckpointSaved():
            return logging.DEBUG
    return logging.INFO


def _describe(event: Event, num_rounds: int) -> str:
    """A line about an event, also about those that people are not shown."""
    match event:
        case RunStarted():
            rounds = format_count(event.total, "round")
            what = f"resuming after round {event.round} of {rounds}" if event.round else rounds
            return f"run starts: {what}" + ("" if event.folder is None else f", in {event.folder}")
        case RunEnded():
            return f"run {event.state}" + (f": {event.problem}" if event.problem else "")
        case RoundStarted():
            tasks = format_count(event.num_tasks, "task")
            return f"round {event.round}/{event.total} ({event.phase}) starts with {tasks}"
        case ClientProgress():
            return f"{client_label(event.client)} is {event.done:.0%} done"
        case ClientDone(problem=None):
            return f"{client_label(event.client)} has answered"
        case CheckpointSaved():
            return f"saved {event.path}"
    return describe_event(event, num_rounds)
