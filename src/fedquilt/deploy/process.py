"""A child process with a log file, which can be terminated together with all its descendants.

Flower's processes start others, some of them in their own sessions. All inherit an environment
variable with a unique value. On Linux, descendants are found by it, whatever their parent is.
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

from fedquilt.engines.processes import exit_with_parent

MARKER = "FEDQUILT_PROCESS"  # the environment variable by which descendants are found
if sys.platform == "win32":
    KILL = signal.SIGTERM  # which ends a process at once there
else:
    KILL = signal.SIGKILL
TIMEOUT = 10.0  # seconds between a polite signal and SIGKILL
POLL_INTERVAL = 0.05  # seconds
NUM_ERROR_LINES = 3  # lines of the log that an error quotes
ANSI_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class ManagedProcess:
    """A running command, in its own session, whose output goes to a log file.

    On Linux it is killed when this process ends, however that happens. The kernel ties this to the
    thread that started it, so start it in a thread that stays.
    """

    def __init__(
        self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
    ) -> None:
        self._marker = f"{MARKER}={secrets.token_hex(8)}"
        self._log_path, parent = log, os.getpid()
        with log.open("ab") as file:
            self._start = file.tell()
            self._process = subprocess.Popen(
                [str(part) for part in command],
                env={**environment, MARKER: self._marker.partition("=")[2]},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if sys.platform == "win32" else lambda: exit_with_parent(parent),
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    @property
    def log_text(self) -> str:
        """The output of this process so far, without colors."""
        with self._log_path.open("rb") as file:
            file.seek(self._start)
            return ANSI_COLORS.sub("", file.read().decode(errors="replace"))

    @property
    def last_error(self) -> str:
        """The last error of the log, or else its last lines, in one line."""
        lines = [" ".join(line.split()) for line in self.log_text.splitlines() if line.strip()]
        errors = [i for i, line in enumerate(lines) if line.startswith("ERROR")]
        first = errors[-1] if errors else max(len(lines) - NUM_ERROR_LINES, 0)
        return " / ".join(lines[first : first + NUM_ERROR_LINES]) or "its log is empty"

    def list_processes(self) -> set[int]:
        """The ids of this process and its descendants that are running."""
        self._process.poll()  # reaps the process if it has ended
        if sys.platform != "linux":
            return {self.pid} if self.exit_code is None else set()
        running = {pid: stat for pid in _list_pids() if (stat := _read_stat(pid)) is not None}
        family = {pid for pid in running if pid == self.pid or self._has_marker(pid)}
        while True:
            sessions = {running[pid][1] for pid in family}
            more = {
                p for p, (parent, sid) in running.items() if parent in family or sid in sessions
            }
            if more <= family:
                return family
            family |= more

    def send_signal(self, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to the process, and SIGTERM to its descendants.

        Descendants that wait for something would not notice by themselves that it has ended.
        """
        for pid in self.list_processes():
            _send_signal(pid, signal_number if pid == self.pid else signal.SIGTERM)

    def terminate(self, timeout: float = TIMEOUT) -> None:
        """Waits until the process and its descendants have ended; kills them after the timeout."""
        end = time.monotonic() + timeout
        while (running := self.list_processes()) and time.monotonic() < end:
            time.sleep(POLL_INTERVAL)
        while running:
            for pid in running:
                _send_signal(pid, KILL)
            time.sleep(POLL_INTERVAL)
            running = self.list_processes()
        self._process.wait()
        if sys.platform not in ("linux", "win32"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, KILL)

    def _has_marker(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # another user's process, or one that has just ended
            return False
        return self._marker.encode() in environment.split(b"\0")


def _send_signal(pid: int, signal_number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def _list_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _read_stat(pid: int) -> tuple[int, int] | None:
    """The parent and the session of a process; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent, _, session = text.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else (int(parent), int(session))
