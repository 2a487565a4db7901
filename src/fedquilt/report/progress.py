"""A run as it goes: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.report.tables import percent
from fedquilt.runs.loop import ClientDone, Evaluated, Event, RoundDone, RoundStarted, Saved

SHORTEST_WAIT = 0.1  # seconds between two pictures of the live display


@dataclass
class Seen:
    """What the events have told so far."""

    total: int
    clock: Callable[[], float] = time.monotonic
    round: int = 0  # the one at work
    finished: int = 0  # rounds that are over, earlier sittings included
    phase: str = "starting"
    num_tasks: int = 0
    num_done: int = 0
    loss: float | None = None
    evaluated: Evaluated | None = None
    num_failures: int = 0
    _start: tuple[float, float] | None = None  # time and rounds at the first event

    def note(self, event: Event) -> None:
        """Takes an event in."""
        match event:
            case RoundStarted():
                self.round, self.phase = event.round, event.phase
                self.num_tasks, self.num_done = event.num_tasks, 0
                if self._start is None:
                    self.finished = max(event.round - 1, 0)
                    self._start = self.clock(), self.finished
            case ClientDone():
                self.num_done += 1
                self.num_failures += event.problem is not None
            case RoundDone():
                self.finished, self.loss = event.round, event.loss
            case Evaluated():
                self.evaluated = event
            case Saved():
                pass

    @property
    def rounds(self) -> float:
        """Rounds that are over, and the part of the one at work."""
        at_work = self.round > self.finished and self.num_tasks > 0
        return self.finished + (self.num_done / self.num_tasks if at_work else 0)

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None while there is none."""
        if self._start is None or self.rounds <= self._start[1]:
            return None
        seconds, first = self.clock() - self._start[0], self._start[1]
        return seconds / (self.rounds - first) * (self.total - self.rounds)


class Watch:
    """Shows the events of a run on a console, between ``with`` and its end."""

    def __init__(self, console: Console, num_rounds: int) -> None:
        self._console, self._seen = console, Seen(num_rounds)
        is_live = console.is_interactive and console.file.isatty()
        # no thread of its own: workers are forked from this process
        self._live = Live(console=console, auto_refresh=False, transient=True) if is_live else None
        self._drawn = float("-inf")

    def __enter__(self) -> Watch:
        """Starts the live display."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Takes the live display away."""
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Shows what an event changes."""
        self._seen.note(event)
        line = sentence(event, self._seen.total)
        if line and (self._live is None or isinstance(event, ClientDone)):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._live is not None:
            self._draw(self._live, is_due=not isinstance(event, ClientDone))

    def _draw(self, live: Live, *, is_due: bool) -> None:
        now = time.monotonic()
        if is_due or now - self._drawn >= SHORTEST_WAIT:
            self._drawn = now
            live.update(picture(self._seen), refresh=True)


def sentence(event: Event, total: int) -> str:
    """What a line says about an event; nothing about most clients."""
    match event:
        case ClientDone(problem=str()):
            return f"client {event.client} failed: {event.problem}"
        case RoundDone():
            failed = f", {len(event.failures)} failed" if event.failures else ""
            loss = "" if event.loss is None else f"loss {event.loss:.4f}, "
            clients = f"{event.num_clients} clients{failed}"
            return f"round {event.round}/{total}: {loss}{clients}, {event.seconds:.1f} s"
        case Evaluated():
            return f"round {event.round}/{total}: accuracy {_accuracies(event.scores)}"
    return ""


def _accuracies(scores: Sequence[SizeScore]) -> str:
    found = (s.local_accuracy if s.accuracy is None else s.accuracy for s in scores)
    return ", ".join(f"{percent(a)} at {s.width:g}" for s, a in zip(scores, found, strict=True))


def picture(seen: Seen) -> RenderableType:
    """The live display: how far, how well, how long."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(f"round {seen.round}/{seen.total}"),
        ProgressBar(total=seen.total, completed=seen.rounds, width=32),
        Text("" if seen.seconds_left is None else f"{_clock(seen.seconds_left)} left"),
    )
    facts = [seen.phase, f"{seen.num_done}/{seen.num_tasks} clients"]
    if seen.loss is not None:
        facts.append(f"loss {seen.loss:.4f}")
    if seen.num_failures:
        facts.append(f"{seen.num_failures} failed")
    lines: list[RenderableType] = [bar, Text(" · ".join(facts))]
    if seen.evaluated is not None:
        known = f"after round {seen.evaluated.round}: {_accuracies(seen.evaluated.scores)}"
        lines.append(Text(known, style="dim"))
    return Group(*lines)


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(83.4), _clock(7384)
    ('1:23', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
