"""Logs the numbers of a run to MLflow."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fedquilt.runs.events import RunEnded, RunStarted
from fedquilt.runs.trackers.tracker import (
    Tracker,
    import_package,
    read_run_id,
    write_run_id,
)

logger = logging.getLogger(__name__)

STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_PARAMS, MAX_METRICS = 100, 1000  # of one request
MAX_VALUE = 500  # characters of a setting
NOT_ALLOWED = re.compile(r"[^\w\-. :/]")  # in names

Item = TypeVar("Item")


class MLflowTracker(Tracker):
    """Logs the settings and numbers of a run to MLflow.

    A run that resumes goes on as the same run of MLflow, whose id is in the run's directory.
    It needs the extra ``fedquilt[mlflow]``.

    Args:
        experiment: The experiment, which is made if there is none.
        uri: The tracking server or folder; None: that of ``MLFLOW_TRACKING_URI``, or MLflow's own.
        name: The name of the run; None: that of its directory.

    >>> import fedquilt as fq
    >>> tracker = fq.MLflowTracker("digits", uri="http://localhost:5000")
    >>> tracker.experiment
    'digits'
    """

    def __init__(
        self, experiment: str = "fedquilt", uri: str | None = None, name: str | None = None
    ) -> None:
        self.experiment, self.uri, self.name = experiment, uri, name
        self._package = import_package("mlflow", "mlflow")
        self._client: Any = None
        self._run_id = ""
        self._known: dict[str, int] = {}  # the last round of each number that resumes

    def start(self, run: RunStarted) -> None:
        """Makes a run of MLflow, or goes on with it."""
        self._client = self._package.MlflowClient(tracking_uri=self.uri)
        key = f"mlflow {self.experiment}"
        found = self._find_run(read_run_id(run, key))
        self._known = {}
        if found is None:
            name = self.name or (None if run.folder is None else run.folder.resolve().name)
            found = self._client.create_run(self._find_experiment(), run_name=name)
        else:
            self._client.update_run(found.info.run_id, status="RUNNING")
            self._known = dict.fromkeys(found.data.metrics, 0)
        self._run_id = found.info.run_id
        write_run_id(run, key, self._run_id)
        logger.info("MLflow run %s of experiment %s", self._run_id, self.experiment)
        self._log_settings(run.settings, found.data.params)

    def _find_run(self, run_id: str | None) -> Any:
        """The run of MLflow that goes on; None if there is none, or not any more."""
        if run_id is None:
            return None
        try:
            found = self._client.get_run(run_id)
        except self._package.exceptions.MlflowException as problem:
            logger.warning("MLflow does not have run %s, a new one is made (%s)", run_id, problem)
            return None
        return found if found.info.lifecycle_stage == "active" else None

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self.experiment))

    def _log_settings(self, settings: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Logs the settings that MLflow does not have: it does not let them change."""
        make = self._package.entities.Param
        params = [
            make(_clean(name), str(value)[:MAX_VALUE])
            for name, value in settings.items()
            if _clean(name) not in known
        ]
        for part in _divide(params, MAX_PARAMS):
            self._client.log_batch(self._run_id, params=part)

    def log(self, values: Mapping[str, float], round: int) -> None:
        """Logs the numbers of a round, but for those that were logged before the run resumed."""
        make, now = self._package.entities.Metric, int(time.time() * 1000)
        named = {_clean(name): value for name, value in values.items()}
        metrics = [
            make(name, value, now, round)
            for name, value in named.items()
            if round > self._find_last_round(name)
        ]
        for part in _divide(metrics, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def _find_last_round(self, name: str) -> int:
        """The last round in which a number was logged before the run resumed; -1: in none."""
        if self._known.get(name) == 0:
            history = self._client.get_metric_history(self._run_id, name)
            self._known[name] = max((metric.step for metric in history), default=-1)
        return self._known.get(name, -1)

    def finish(self, end: RunEnded) -> None:
        """Says how the run has ended."""
        self._client.set_terminated(self._run_id, status=STATES[end.state])


def _clean(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return NOT_ALLOWED.sub("_", name)


def _divide(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))
