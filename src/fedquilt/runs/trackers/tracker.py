"""What a tracker is: a callback that gets the numbers of a run, and that cannot end it."""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.files import write_text
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.events import Evaluated, Event, RoundDone, RunEnded, RunStarted
from fedquilt.runs.measurements import measure_event

logger = logging.getLogger(__name__)


class Tracker:
    """A callback that sends the numbers of a run elsewhere. Subclasses override three methods.

    ``start`` is called before the first round, ``log`` after every round and every evaluation, and
    ``finish`` at the end, also if the run was stopped or failed. Names of numbers are such as
    ``train/loss`` and ``accuracy/0.5``: the value of the metric at size 0.5.

    What ``start``, ``log`` or ``finish`` raise does not end the run. It is logged, a warning says
    it, and the tracker is switched off until the next run. The exception are errors of fedquilt,
    which say that the tracker was set up wrongly.

    A run that resumes calls ``start`` with ``is_resumed``, and logs again what came after its
    checkpoint. Its numbers are the same.

    >>> import torch, fedquilt as fq
    >>> class Printer(fq.Tracker):
    ...     def log(self, values: dict[str, float], round: int) -> None:
    ...         print(round, sorted(values)[:2])
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> clients = fq.make_clients(data, test=data, count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, data[0], "fedavg", clients, 1, workers=0, callbacks=[Printer()])
    1 ['train/bytes_down', 'train/bytes_up']
    1 ['accuracy/1', 'accuracy/mean']
    """

    is_off = False

    def start(self, run: RunStarted) -> None:
        """Prepares for a run.

        Args:
            run: Its settings, its directory, and whether it goes on.
        """

    def log(self, values: Mapping[str, float], round: int) -> None:
        """Takes the numbers of a round, or of an evaluation after it.

        Args:
            values: The numbers by name.
            round: The number of the round.
        """

    def finish(self, end: RunEnded) -> None:
        """Completes what was written.

        Args:
            end: How the run has ended.
        """

    def __call__(self, event: Event) -> None:
        """Takes an event of the run."""
        if isinstance(event, RunStarted):
            self.is_off = False
        if self.is_off:
            return
        try:
            self._handle(event)
        except FedquiltError:
            raise
        except Exception as problem:
            self._switch_off(problem)

    def _handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.start(event)
            case RoundDone() | Evaluated():
                self.log(measure_event(event), event.round)
            case RunEnded():
                self.finish(event)

    def _switch_off(self, problem: Exception) -> None:
        self.is_off = True
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())
        sentence = f"{type(self).__name__} failed and is switched off, the run goes on ({reason})"
        logger.warning(sentence, exc_info=problem)
        with suppress(Warning):  # where warnings are errors, this one is still none
            warnings.warn(sentence, stacklevel=4)


def import_package(name: str, extra: str) -> ModuleType:
    """Imports the package that a tracker needs.

    Args:
        name: The module.
        extra: The extra of fedquilt that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise ConfigError(
            f"the tracker {extra} needs a package that is not here ({problem}); install it: "
            f"pip install 'fedquilt[{extra}]'"
        ) from problem


def find_place(given: str | Path | None, run: RunStarted, name: str, noun: str) -> Path:
    """Where a tracker writes: as given, or in the directory of the run.

    Args:
        given: A path; None: in the directory of the run.
        run: The run.
        name: What it is called in that directory.
        noun: The tracker, for errors.
    """
    if given is not None:
        return Path(given)
    if run.folder is None:
        raise ConfigError(
            f"{noun} writes into the directory of a run, and this one has none; train with "
            f'out="...", or say where: {noun}("PATH")'
        )
    return run.folder / name


def read_run_id(run: RunStarted, key: str) -> str | None:
    """The name under which a tracker knows a run that resumes; None: it does not know it."""
    return _read_ids(run).get(key) if run.is_resumed else None


def write_run_id(run: RunStarted, key: str, run_id: str) -> None:
    """Keeps the name under which a tracker knows a run, in the run's directory."""
    if run.folder is not None:
        ids = {**_read_ids(run), key: run_id}
        write_text(RunDirectory(run.folder).trackers_file, json.dumps(ids, indent=1) + "\n")


def _read_ids(run: RunStarted) -> dict[str, str]:
    if run.folder is None:
        return {}
    try:
        document: Any = json.loads(RunDirectory(run.folder).trackers_file.read_text())
        return {str(key): str(value) for key, value in document.items()}
    except (OSError, ValueError, AttributeError):
        return {}
