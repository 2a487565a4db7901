"""Progress of many runs: a line for each that is done."""

from __future__ import annotations

import time

from rich.console import Console

from fedquilt.cli.console import print_lines
from fedquilt.comparison.progress import (
    ComparisonEvent,
    TrialDone,
    TrialFailed,
    TrialProgress,
    TrialsQueued,
    VariantLeftOut,
)
from fedquilt.formatting import format_count, format_duration


class TrialLog:
    """A line for every run that is done, and on a terminal what is under way."""

    def __init__(self, console: Console) -> None:
        self._console, self._started = console, time.monotonic()
        self._status = console.status("") if console.is_terminal else None
        self._under_way: dict[str, str] = {}
        self._total = 0

    def __enter__(self) -> TrialLog:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, event: ComparisonEvent) -> None:
        """Prints what has ended, and shows what is under way."""
        match event:
            case TrialsQueued():
                self._total = event.num_trials
                done = f", {event.num_done} of them done before" if event.num_done else ""
                self._print(f"{event.purpose}: {format_count(event.num_trials, 'run')}{done}")
            case TrialProgress():
                name = f"{event.trial.variant}, seed {event.trial.seed}"
                self._under_way[name] = f"{name}: round {event.round} of {event.total}"
            case TrialDone():
                self._end(event, f"{event.result.wall_seconds:.0f} s")
            case TrialFailed():
                self._end(event, f"failed: {event.problem}")
            case VariantLeftOut():
                self._print(f"left out {event.variant}: {event.reason}")
        if self._status is not None:
            self._status.update("; ".join(self._under_way.values()))

    def _end(self, event: TrialDone | TrialFailed, what: str) -> None:
        name = f"{event.trial.variant}, seed {event.trial.seed}"
        self._under_way.pop(name, None)
        spent = format_duration(time.monotonic() - self._started)
        done = self._total - event.num_left
        self._print(f"[{done}/{self._total}, {spent}] {name}: {what}")

    def _print(self, line: str) -> None:
        print_lines(self._console, line)
