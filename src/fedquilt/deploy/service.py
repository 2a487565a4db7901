"""A process that runs beside this one, with a log, and that ends with all that it has started.

Flower's processes start others, some in sessions of their own. All of them inherit a mark in their
environment, by which they are found and ended, whoever their parent is by then (Linux).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedquilt.engines.worker import die_with

MARK = "FEDQUILT_SERVICE"  # the variable that a service and all of its children have
PATIENCE = 10.0  # seconds to end in after being asked
PAUSE = 0.05
NUM_WORDS = 3  # lines of a log that tell why it ended
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Service:
    """A running command in a session of its own.

    It dies with this process, however that ends (Linux), and in fact with the thread that started
    it, so start it in one that stays.
    """

    def __init__(
        self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
    ) -> None:
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        self._log, parent = log, os.getpid()
        with log.open("ab") as file:
            self._start = file.tell()
            self._process = subprocess.Popen(
                [str(word) for word in command],
                env={**environment, MARK: self._mark.partition("=")[2]},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """With which it ended; None while it runs."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """What it has written to its log so far."""
        with self._log.open("rb") as file:
            file.seek(self._start)
            return COLOURS.sub("", file.read().decode(errors="replace"))

    @property
    def last_words(self) -> str:
        """The last error in its log, or else the end of it, in one line."""
        lines = [" ".join(line.split()) for line in self.said.splitlines() if line.strip()]
        errors = [i for i, line in enumerate(lines) if line.startswith("ERROR")]
        first = errors[-1] if errors else max(len(lines) - NUM_WORDS, 0)
        return " / ".join(lines[first : first + NUM_WORDS]) or "it said nothing"

    def family(self) -> set[int]:
        """All processes that it has started and that run, itself included."""
        self._process.poll()  # one that has ended is not counted
        if sys.platform != "linux":
            return {self.pid} if self.exit_code is None else set()
        running = {pid: place for pid in _pids() if (place := _place(pid)) is not None}
        found = {pid for pid in running if pid == self.pid or self._is_marked(pid)}
        while True:
            sessions = {running[pid][1] for pid in found}
            more = {p for p, (parent, sid) in running.items() if parent in found or sid in sessions}
            if more <= found:
                return found
            found |= more

    def ask(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Sends the process a signal, and asks its children to end.

        They would notice by themselves that it is gone, but not while they wait for something.
        """
        for pid in self.family():
            _send(pid, how if pid == self.pid else signal.SIGTERM)

    def end(self, patience: float = PATIENCE) -> None:
        """Waits until all of it has ended, and ends by force what has not by then."""
        until = time.monotonic() + patience
        while (left := self.family()) and time.monotonic() < until:
            time.sleep(PAUSE)
        while left:
            for pid in left:
                _send(pid, signal.SIGKILL)
            time.sleep(PAUSE)
            left = self.family()
        self._process.wait()
        if sys.platform != "linux":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _is_marked(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # another's, or gone
            return False
        return self._mark.encode() in environment.split(b"\0")


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _place(pid: int) -> tuple[int, int] | None:
    """A process's parent and session; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent, _, session = text.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else (int(parent), int(session))
