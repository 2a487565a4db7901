"""Runs on a SuperLink, through Flower's documented commands.

``flwr run``, ``flwr list`` and ``flwr stop`` report in JSON, ``flwr log --stream`` hands on the log
of the server's app. Lines of that log which are meant for users start with ``LOG_MARKER``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.deploy.flower_internals import strip_exception_prefix
from fedquilt.engines.processes import exit_with_parent
from fedquilt.errors import FederationError, TrainingError

OFFLINE = {  # Flower sends no telemetry, checks for no update, and installs nothing
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "UV_OFFLINE": "1",
}
LOG_MARKER = "[fedquilt] "  # what the server's app puts before every line for users
COMPLETED = "finished:completed"  # Flower's status of a run that succeeded
TIMEOUT = 120.0  # seconds for a command that reports in JSON


@dataclass(frozen=True)
class SuperLinkConnection:
    """A SuperLink by its name in a Flower configuration.

    Args:
        name: The name in ``config.toml``.
        flwr_home: Flower's folder with that file; None means the user's own.
    """

    name: str
    flwr_home: Path | None = None

    def run(
        self,
        app: Path,
        on_output: Callable[[str], None],
        simulation: Mapping[str, int | float] | None = None,
    ) -> None:
        """Runs an app to its end. A run that is interrupted is stopped.

        Args:
            app: The folder of the app.
            on_output: Called with every line that the server's app writes for users.
            simulation: Flower's settings of a simulation, if the SuperLink simulates nodes.

        Raises:
            FederationError: The run could not be started, or the SuperLink was lost.
            TrainingError: The run failed; the message is that of the server's app.
        """
        run_id = self._start_run(app, simulation)
        try:
            self._stream_log(run_id, on_output)
        except BaseException:
            self._ask("stop", run_id, self.name)
            raise
        self._check_completed(run_id)

    def _start_run(self, app: Path, simulation: Mapping[str, int | float] | None) -> str:
        arguments = ["run", str(app), self.name]
        if simulation is not None:
            pairs = " ".join(f"{name}={value}" for name, value in simulation.items())
            arguments += ["--federation-config", pairs]
        reply = self._ask(*arguments)
        if not reply.get("run-id"):
            reason = " ".join(str(reply.get("error-message", "it gave no reason")).split())
            raise FederationError(f"Flower did not start the run: {reason}")
        return str(reply["run-id"])

    def _stream_log(self, run_id: str, on_output: Callable[[str], None]) -> None:
        with self._launch("log", run_id, self.name, "--stream") as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    _, marker, text = line.rstrip().partition(LOG_MARKER)
                    if marker:
                        on_output(text)
            except BaseException:
                process.kill()
                raise

    def _check_completed(self, run_id: str) -> None:
        """Raises an error unless the run has completed; ``flwr log`` does not tell."""
        reply = self._ask("list", self.name, "--run-id", run_id)
        try:
            (run,) = reply["runs"]
            status, details = run["status"], strip_exception_prefix(run["status-details"])
        except (ValueError, LookupError):
            raise FederationError(
                "the SuperLink does not respond any more, so the result of the run is not known"
            ) from None
        if status != COMPLETED:
            raise TrainingError(details if details not in ("", "N/A") else f"the run is {status}")

    def _ask(self, *arguments: str) -> dict[str, Any]:
        """What a command of Flower reports in JSON; nothing if it reports something else."""
        with self._launch(*arguments, "--format", "json") as process:
            try:
                output, _ = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                return {"error-message": f"no reply within {TIMEOUT:g} seconds"}
            except BaseException:
                process.kill()
                raise
        try:
            reply = json.loads(output)
        except ValueError:
            return {"error-message": output}
        return reply if isinstance(reply, dict) else {}

    def _launch(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts Flower's command in its own session, so that Ctrl-C does not reach it."""
        parent = os.getpid()
        return subprocess.Popen(
            [find_executable("flwr"), *arguments],
            env=make_environment(self.flwr_home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=None if sys.platform == "win32" else lambda: exit_with_parent(parent),
        )


def find_executable(name: str) -> str:
    """The path of one of Flower's commands, of the same installation as this Python."""
    return str(Path(sys.executable).parent / name)


def make_environment(flwr_home: Path | None) -> dict[str, str]:
    """The environment of Flower's commands: on the path, offline, single-threaded."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    no_proxy = ",".join(filter(None, [no_proxy, "127.0.0.1", "localhost"]))
    home = {} if flwr_home is None else {"FLWR_HOME": str(flwr_home)}
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **OFFLINE, **own, **home, "NO_PROXY": no_proxy, "no_proxy": no_proxy}
