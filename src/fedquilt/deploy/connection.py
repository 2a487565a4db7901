"""Runs that are sent to a SuperLink, with Flower's own commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedquilt.deploy.service import COLOURS
from fedquilt.engines.worker import die_with
from fedquilt.errors import FederationError, TrainingError

OFFLINE = {  # Flower tells nobody, asks nobody, and installs nothing
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "UV_OFFLINE": "1",
}
STARTED = re.compile(r"Successfully started run (\d+)")
FRAME = re.compile(r"[─│╭╮╰╯]+")  # around what Flower's commands say when they refuse
RAISED = re.compile(r"^\w+ failed with exception: ")
COMPLETED = "finished:completed"
MOST_LINES = 20  # of the end, to tell why a run could not be started
SECONDS = 120.0  # for a question


@dataclass(frozen=True)
class Connection:
    """A SuperLink by its name in a Flower configuration: in a home of ours, or the user's own."""

    name: str
    home: Path | None = None

    def run(
        self,
        app: Path,
        tell: Callable[[str], None],
        simulation: Mapping[str, int | float] | None = None,
    ) -> None:
        """Runs an app to its end, and hands on what it writes, line by line.

        ``simulation`` says what to simulate, if the SuperLink does that. Raises a TrainingError
        with what the server's app has to say if it fails. A run that is interrupted is stopped.
        """
        words = ["run", str(app), self.name, "--stream"]
        if simulation is not None:
            pairs = " ".join(f"{name}={value}" for name, value in simulation.items())
            words += ["--federation-config", pairs]
        number, last = None, deque[str](maxlen=MOST_LINES)
        with self._started(words) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    line = COLOURS.sub("", line).rstrip()
                    last.append(line)
                    if number is None and (found := STARTED.search(line)):
                        number = found[1]
                    tell(line)
            except BaseException:
                process.kill()
                if number is not None:
                    self._asked("stop", number, self.name)
                raise
        if number is None:
            raise FederationError(f"Flower did not start the run: {_plain(last)}")
        self._refuse_unfinished(number)

    def _refuse_unfinished(self, number: str) -> None:
        """Flower's command ends well however a run ended; the SuperLink knows."""
        answer = self._asked("list", self.name, "--run-id", number, "--format", "json")
        try:
            (found,) = json.loads(answer)["runs"]
        except (ValueError, LookupError):
            raise FederationError(
                "the SuperLink is not there any more, and so nobody knows how the run ended"
            ) from None
        if found["status"] != COMPLETED:
            why = RAISED.sub("", found["status-details"])
            raise TrainingError(why if why not in ("", "N/A") else f"the run is {found['status']}")

    def _asked(self, *words: str) -> str:
        """What a command of Flower prints, whether it succeeds or not."""
        with self._started(words) as process:
            try:
                return COLOURS.sub("", process.communicate(timeout=SECONDS)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                return f"no answer within {SECONDS:g} seconds"

    def _started(self, words: list[str] | tuple[str, ...]) -> subprocess.Popen[str]:
        """Flower's command, which does not hear of Ctrl-C, since that is ours."""
        parent = os.getpid()
        return subprocess.Popen(
            [executable("flwr"), *words],
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: die_with(parent),
        )


def executable(name: str) -> str:
    """One of Flower's commands, of the same installation as this Python."""
    return str(Path(sys.executable).parent / name)


def environment(home: Path | None) -> dict[str, str]:
    """In which Flower's commands run: they find each other, stay offline, and have one thread."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    near = ",".join(filter(None, [direct, "127.0.0.1", "localhost"]))
    place = {} if home is None else {"FLWR_HOME": str(home)}
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **OFFLINE, **own, **place, "NO_PROXY": near, "no_proxy": near}


def _plain(lines: deque[str] | list[str]) -> str:
    """What stands in Flower's frames, in one line.

    >>> _plain(["╭─ Error ──╮", "│ no such  │", "│ app      │", "╰──────────╯"])
    'Error no such app'
    """
    return " ".join(FRAME.sub(" ", " ".join(lines)).split())
