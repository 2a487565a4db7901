"""Logs the numbers of a run to Weights & Biases."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.runs.events import RunEnded, RunStarted
from fedquilt.runs.trackers.tracker import (
    Tracker,
    import_package,
    read_run_id,
    write_run_id,
)

logger = logging.getLogger(__name__)

MODES = ("online", "offline", "disabled")
STEP = "round"


class WandbTracker(Tracker):
    """Logs the settings and numbers of a run to Weights & Biases.

    Files are in ``wandb`` in the run's directory. In offline mode nothing is sent; send it later
    with ``wandb sync``. A run that resumes goes on as the same run, whose id is in the run's
    directory. It needs the extra ``fedquilt[wandb]``.

    Args:
        project: The project, which is made if there is none.
        mode: ``online``, ``offline`` or ``disabled``; None: that of ``WANDB_MODE``, or online.
        entity: The team or user; None: the default of the account.
        name: The name of the run; None: that of its directory.

    >>> import fedquilt as fq
    >>> tracker = fq.WandbTracker("digits", mode="offline")
    >>> tracker.project
    'digits'
    """

    def __init__(
        self,
        project: str = "fedquilt",
        mode: Literal["online", "offline", "disabled"] | None = None,
        entity: str | None = None,
        name: str | None = None,
    ) -> None:
        if mode is not None and mode not in MODES:
            raise ConfigError(describe_unknown("mode of wandb", mode, MODES))
        self.project, self.mode, self.entity, self.name = project, mode, entity, name
        self._package = import_package("wandb", "wandb")
        self._run: Any = None

    def start(self, run: RunStarted) -> None:
        """Makes a run of W&B, or goes on with it."""
        key = f"wandb {self.project}"
        run_id = read_run_id(run, key) or self._package.util.generate_id()
        folder = None if run.folder is None else run.folder.resolve()
        is_offline = (self.mode or os.environ.get("WANDB_MODE")) == "offline"
        self._run = self._package.init(
            project=self.project,
            entity=self.entity,
            name=self.name or (None if folder is None else folder.name),
            id=run_id,
            resume="allow" if run.is_resumed and not is_offline else None,
            mode=self.mode,
            dir=None if folder is None else str(_make_folder(folder)),
            config=dict(run.settings),
            reinit="create_new",  # a run of the user's own goes on
            settings=self._package.Settings(silent=True, console="off"),
        )
        write_run_id(run, key, run_id)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        where = self._run.dir if self._run.offline else self._run.url
        logger.info("W&B run %s: %s", run_id, where)

    def log(self, values: Mapping[str, float], round: int) -> None:
        """Logs the numbers of a round."""
        self._run.log({STEP: round, **values})

    def finish(self, end: RunEnded) -> None:
        """Sends what has waited."""
        self._run.finish(exit_code=0 if end.state == "finished" else 1)


def _make_folder(folder: Path) -> Path:
    """The folder that W&B writes ``wandb`` into; without it, it would take a temporary one."""
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    return folder
