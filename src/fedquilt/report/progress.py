"""A run as it goes: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.summary import main_accuracy
from fedquilt.federation.client import called
from fedquilt.report.tables import percent
from fedquilt.runs.health import Finding
from fedquilt.runs.loop import (
    CheckpointDamaged,
    ClientDone,
    ClientProgress,
    Evaluated,
    Event,
    Moved,
    Noticed,
    RoundDone,
    RoundLost,
    RoundStarted,
    Saved,
)

ALWAYS_SAID = ClientDone | Moved | CheckpointDamaged | Noticed  # also beside a live display
SHORTEST_WAIT = 0.1  # seconds between two pictures of the live display
LONGEST_SILENCE = 10.0  # seconds of a round without a line, if its clients tell how far they are


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
    under_way: dict[int, float] = field(default_factory=dict)  # client -> share that is done
    loss: float | None = None
    local: float | None = None  # accuracy of clients' own models, in the mean
    evaluated: Evaluated | None = None
    num_failures: int = 0
    _start: tuple[float, float] | None = None  # time and rounds at the first event

    def note(self, event: Event) -> None:
        """Takes an event in."""
        match event:
            case RoundStarted():
                self.round, self.phase, self.total = event.round, event.phase, event.total
                self.num_tasks, self.num_done, self.under_way = event.num_tasks, 0, {}
                if self._start is None:
                    self.finished = max(event.round - 1, 0)
                    self._start = self.clock(), self.finished
            case ClientProgress():
                self.under_way[event.client] = event.done
            case ClientDone():
                self.under_way.pop(event.client, None)
                self.num_done += 1
                self.num_failures += event.problem is not None
            case RoundDone():
                self.finished, self.loss = event.round, event.loss
                self.local = event.local_accuracy
            case Evaluated():
                self.evaluated = event
            case Saved() | Moved() | CheckpointDamaged() | Noticed():
                pass

    @property
    def clients(self) -> float:
        """Clients that are done, and the parts of those under way."""
        return self.num_done + sum(self.under_way.values())

    @property
    def rounds(self) -> float:
        """Rounds that are over, and the part of the one at work."""
        at_work = self.round > self.finished and self.num_tasks > 0
        return self.finished + (self.clients / self.num_tasks if at_work else 0)

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None while there is none."""
        if self._start is None or self.rounds <= self._start[1]:
            return None
        seconds, first = self.clock() - self._start[0], self._start[1]
        return seconds / (self.rounds - first) * (self.total - self.rounds)


class Watch:
    """Shows the events of a run on a console, between ``with`` and its end."""

    def __init__(
        self, console: Console, num_rounds: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._clock, self._seen = console, clock, Seen(num_rounds, clock)
        is_live = console.is_interactive and console.file.isatty()
        # no thread of its own: workers are forked from this process
        self._live = Live(console=console, auto_refresh=False, transient=True) if is_live else None
        self._drawn = float("-inf")
        self._silent_since = clock()

    @property
    def num_rounds(self) -> int:
        """The rounds of the whole run, as far as is known."""
        return self._seen.total

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
        if line and (self._live is None or isinstance(event, ALWAYS_SAID)):
            self._print(line)
        if self._live is not None:
            self._draw(self._live, is_due=not isinstance(event, ClientDone | ClientProgress))
        elif isinstance(event, RoundStarted):
            self._silent_since = self._clock()
        elif isinstance(event, ClientProgress):
            self._break_silence()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _break_silence(self) -> None:
        line, now = shares(self._seen), self._clock()
        if line and now - self._silent_since >= LONGEST_SILENCE:
            self._silent_since = now
            self._print(line)

    def _draw(self, live: Live, *, is_due: bool) -> None:
        now = self._clock()
        if is_due or now - self._drawn >= SHORTEST_WAIT:
            self._drawn = now
            live.update(picture(self._seen), refresh=True)


class Lines:
    """Hands the lines about a run's events to whoever writes them."""

    def __init__(self, write: Callable[[str], None], num_rounds: int) -> None:
        self._write, self._total = write, num_rounds

    def __call__(self, event: Event) -> None:
        """Writes what there is to say."""
        if isinstance(event, RoundStarted):
            self._total = event.total
        line = sentence(event, self._total)
        if line:
            self._write(line)


def sentence(event: Event, total: int) -> str:
    """What a line says about an event; nothing about most clients."""
    match event:
        case ClientDone(problem=str() as problem):
            who = called(event.client)
            return f"{who} failed: {problem.removeprefix(f'{who} ')}"
        case RoundDone():
            failed = f", {len(event.failures)} failed" if event.failures else ""
            loss = "" if event.loss is None else f"loss {event.loss:.4f}, "
            own = "" if not event.local else f"own models {percent(event.local_accuracy)}, "
            clients = f"{event.num_clients} clients{failed}"
            return f"round {event.round}/{total}: {loss}{own}{clients}, {event.seconds:.1f} s"
        case RoundLost():
            found = f"{event.num_clients} of {event.quorum} answers that are needed"
            return f"round {event.round}/{total}: {found}; it is done again"
        case Evaluated():
            return f"round {event.round}/{total}: accuracy {_accuracies(event.scores)}"
        case CheckpointDamaged():
            return f"{event.problem}; the run goes on from its checkpoint of round {event.round}"
        case Noticed(finding=finding):
            return f"round {event.round}/{total}: {said(finding)}"
        case Moved():
            return (
                f"the run goes on after round {event.round}, but not where it was "
                f"({event.change}): its last bits may differ from those of one that stayed"
            )
    return ""


def said(finding: Finding) -> str:
    """A finding in one line.

    >>> said(Finding("loss", True, "the training loss does not fall"))
    'warning: the training loss does not fall'
    """
    return f"{'warning' if finding.is_severe else 'note'}: {finding.sentence}"


def shares(seen: Seen) -> str:
    """What a line says about clients under way; nothing if there are none.

    >>> shares(Seen(131, round=31, phase="search", under_way={4: 0.104, 3: 0.42, 5: 1.0}))
    'round 31/131 (search): client 3 42%, client 4 10%'
    """
    found = [f"{called(c)} {d:.0%}" for c, d in sorted(seen.under_way.items()) if d < 1]
    return f"round {seen.round}/{seen.total} ({seen.phase}): {', '.join(found)}" if found else ""


def _accuracies(scores: Sequence[SizeScore]) -> str:
    return ", ".join(f"{percent(main_accuracy(s))} at {s.width:g}" for s in scores)


def picture(seen: Seen) -> RenderableType:
    """The live display: how far, how well, how long."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(f"round {seen.round}/{seen.total}"),
        ProgressBar(total=seen.total, completed=seen.rounds, width=32),
        Text("" if seen.seconds_left is None else f"{_clock(seen.seconds_left)} left"),
    )
    num_done = f"{seen.clients:.1f}" if seen.under_way else seen.num_done
    facts = [seen.phase, f"{num_done}/{seen.num_tasks} clients"]
    if seen.loss is not None:
        facts.append(f"loss {seen.loss:.4f}")
    if seen.local is not None:
        facts.append(f"own models {percent(seen.local)}")
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
