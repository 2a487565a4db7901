"""Shows the progress of a run: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import html
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as RichProgressBar
from rich.table import Table
from rich.text import Text

from fedquilt.federation.client import client_label
from fedquilt.formatting import format_duration, format_percent
from fedquilt.runs.event_lines import SEPARATOR, describe_event, describe_values
from fedquilt.runs.events import (
    CheckpointDamaged,
    ClientDone,
    ClientProgress,
    EnvironmentChanged,
    Evaluated,
    Event,
    ProblemFound,
    RoundDone,
    RoundStarted,
    RunEnded,
    RunStarted,
    WaitingForLock,
)

PRINTED_WHILE_LIVE = (
    ClientDone | EnvironmentChanged | CheckpointDamaged | ProblemFound | WaitingForLock
)
REFRESH_INTERVAL = 0.1  # seconds between two updates of the live display, at least
LINE_INTERVAL = 10.0  # seconds between two lines about clients' progress in a long round


@dataclass
class ProgressState:
    """The progress of a run, as its events have reported it.

    Args:
        num_rounds: The rounds of all phases.
        clock: Tells the time in seconds.
    """

    num_rounds: int
    clock: Callable[[], float] = time.monotonic
    round: int = 0  # the current one
    finished_rounds: int = 0  # also those before the run was resumed
    phase: str = "starting"
    num_tasks: int = 0
    num_done: int = 0
    client_progress: dict[int, float] = field(default_factory=dict)  # fraction done, by client
    loss: float | None = None
    local_accuracy: float | None = None  # mean over clients
    evaluation: Evaluated | None = None
    num_failures: int = 0
    _start: tuple[float, float] | None = None  # time and finished rounds at the first event

    def update(self, event: Event) -> None:
        """Takes an event into account."""
        match event:
            case RoundStarted():
                self.round, self.phase, self.num_rounds = event.round, event.phase, event.total
                self.num_tasks, self.num_done, self.client_progress = event.num_tasks, 0, {}
                if self._start is None:
                    self.finished_rounds = max(event.round - 1, 0)
                    self._start = self.clock(), self.finished_rounds
            case ClientProgress():
                self.client_progress[event.client] = event.done
            case ClientDone():
                self.client_progress.pop(event.client, None)
                self.num_done += 1
                self.num_failures += event.problem is not None
            case RoundDone():
                self.finished_rounds, self.loss = event.round, event.loss
                self.local_accuracy = event.local_accuracy
            case Evaluated():
                self.evaluation = event

    @property
    def clients_done(self) -> float:
        """The clients that are done, and the fractions of the others."""
        return self.num_done + sum(self.client_progress.values())

    @property
    def rounds_done(self) -> float:
        """The rounds that are finished, and the fraction of the current one."""
        is_running = self.round > self.finished_rounds and self.num_tasks > 0
        return self.finished_rounds + (self.clients_done / self.num_tasks if is_running else 0)

    @property
    def seconds_left(self) -> float | None:
        """The remaining time at the speed so far; None while that is not known."""
        if self._start is None or self.rounds_done <= self._start[1]:
            return None
        seconds, first = self.clock() - self._start[0], self._start[1]
        return seconds / (self.rounds_done - first) * (self.num_rounds - self.rounds_done)


class Display(Protocol):
    """Where the progress of a run is shown again and again, in one place."""

    def show(self, state: ProgressState) -> None:
        """Shows the progress as it is now."""
        ...

    def close(self) -> None:
        """Ends the display."""
        ...


class TerminalDisplay:
    """A display at the bottom of a terminal, which is removed in the end."""

    def __init__(self, console: Console) -> None:
        # without a refreshing thread: workers are forked from this process
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, state: ProgressState) -> None:
        """Shows the progress as it is now."""
        self._live.update(render_progress(state), refresh=True)

    def close(self) -> None:
        """Removes the display."""
        self._live.stop()


class ProgressBar:
    """A callback that shows the progress of a run.

    A terminal gets a live display, a notebook with ipywidgets a widget, anything else one line for
    each round, evaluation and problem.

    Args:
        console: Where to write; None: to standard output.
        num_rounds: The rounds of the run, until its first event tells.
        clock: Tells the time in seconds.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> clients = fq.make_clients(data, test=data, count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(
    ...     model, data[0], "fedavg", clients, 1, workers=0, callbacks=[fq.ProgressBar()]
    ... )  # doctest: +ELLIPSIS
    round 1/1 · loss ... · 2 clients · ... s
    round 1/1 · accuracy ...% at 1
    """

    def __init__(
        self,
        console: Console | None = None,
        num_rounds: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(markup=False, highlight=False, emoji=False)
        self._clock, self._state = clock, ProgressState(num_rounds, clock)
        self._make_display = find_display(self._console)
        self._display: Display | None = None
        self._last_refresh = float("-inf")
        self._last_line = clock()

    @property
    def num_rounds(self) -> int:
        """The rounds of the whole run, as far as it is known."""
        return self._state.num_rounds

    def __call__(self, event: Event) -> None:
        """Shows an event.

        Args:
            event: What has happened.
        """
        if isinstance(event, RunStarted):
            self._state = ProgressState(event.total, self._clock)
        self._state.update(event)
        line = describe_event(event, self._state.num_rounds)
        if line and (self._make_display is None or isinstance(event, PRINTED_WHILE_LIVE)):
            self._print(line)
        if isinstance(event, RunEnded):
            self._close()
        elif self._make_display is not None:
            self._refresh(is_due=not isinstance(event, ClientDone | ClientProgress))
        elif isinstance(event, RoundStarted):
            self._last_line = self._clock()
        elif isinstance(event, ClientProgress):
            self._print_client_progress()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _print_client_progress(self) -> None:
        line, now = describe_client_progress(self._state), self._clock()
        if line and now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            self._print(line)

    def _refresh(self, *, is_due: bool) -> None:
        now = self._clock()
        if self._make_display is not None and (
            is_due or now - self._last_refresh >= REFRESH_INTERVAL
        ):
            self._last_refresh = now
            self._display = self._display or self._make_display()
            self._display.show(self._state)

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


def find_display(console: Console) -> Callable[[], Display] | None:
    """What makes a display where this console writes; None: lines are better there."""
    if console.is_jupyter:
        return WidgetDisplay if importlib.util.find_spec("ipywidgets") else None
    is_live = console.is_interactive and console.file.isatty()
    return partial(TerminalDisplay, console) if is_live else None


def describe_client_progress(state: ProgressState) -> str:
    """How far each client is, in one line; an empty one if no client is at work.

    >>> state = ProgressState(131, round=31, phase="search")
    >>> state.client_progress.update({4: 0.104, 3: 0.42, 5: 1.0})
    >>> describe_client_progress(state)
    'round 31/131 (search) · client 3 42%, client 4 10%'
    """
    clients = [
        f"{client_label(client)} {fraction:.0%}"
        for client, fraction in sorted(state.client_progress.items())
        if fraction < 1
    ]
    if not clients:
        return ""
    return f"round {state.round}/{state.num_rounds} ({state.phase}){SEPARATOR}{', '.join(clients)}"


def render_progress(state: ProgressState) -> RenderableType:
    """Renders the live display."""
    bar = Table.grid(padding=(0, 1))
    seconds = state.seconds_left
    bar.add_row(
        Text(f"round {state.round}/{state.num_rounds}"),
        RichProgressBar(total=state.num_rounds, completed=state.rounds_done, width=32),
        Text("" if seconds is None else f"{format_duration(seconds)} left"),
    )
    lines: list[RenderableType] = [bar, Text(describe_round_progress(state))]
    if state.evaluation is not None:
        lines.append(Text(describe_last_evaluation(state.evaluation), style="dim"))
    return Group(*lines)


def describe_round_progress(state: ProgressState) -> str:
    """What the current round is about, and how far it is."""
    num_done = f"{state.clients_done:.1f}" if state.client_progress else state.num_done
    facts = [state.phase, f"{num_done}/{state.num_tasks} clients"]
    if state.loss is not None:
        facts.append(f"loss {state.loss:.4f}")
    if state.local_accuracy is not None:
        facts.append(f"local accuracy {format_percent(state.local_accuracy)}")
    if state.num_failures:
        facts.append(f"{state.num_failures} failed")
    return SEPARATOR.join(facts)


def describe_last_evaluation(evaluation: Evaluated) -> str:
    """What the last evaluation has shown."""
    return f"after round {evaluation.round}: {describe_values(evaluation.scores)}"


class WidgetDisplay:
    """A display in a notebook: a bar and two lines, which stay as they were in the end."""

    def __init__(self) -> None:
        import ipywidgets
        from IPython.display import display

        self._bar: Any = ipywidgets.FloatProgress(0.0, min=0.0, max=1.0)
        self._head: Any = ipywidgets.Label()
        self._lines: Any = ipywidgets.HTML()
        head = ipywidgets.HBox([self._bar, self._head])
        display(ipywidgets.VBox([head, self._lines]))  # type: ignore[no-untyped-call]

    def show(self, state: ProgressState) -> None:
        """Shows the progress as it is now."""
        seconds = state.seconds_left
        left = "" if not seconds else f"{SEPARATOR}{format_duration(seconds)} left"
        self._bar.max = max(float(state.num_rounds), 1.0)
        self._bar.value = state.rounds_done
        self._head.value = f"round {state.round}/{state.num_rounds}{left}"
        lines = [describe_round_progress(state)]
        if state.evaluation is not None:
            lines.append(describe_last_evaluation(state.evaluation))
        self._lines.value = "<br>".join(html.escape(line) for line in lines)

    def close(self) -> None:
        """Marks the bar as done."""
        self._bar.bar_style = "success" if self._bar.value >= self._bar.max else "warning"
