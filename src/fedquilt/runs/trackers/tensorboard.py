"""Writes the numbers of a run as event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.runs.events import RunEnded, RunStarted
from fedquilt.runs.trackers.tracker import Tracker, find_place, import_package

FLUSH_SECONDS = 10  # between two writes, so that pages follow a run


class TensorBoardTracker(Tracker):
    """Writes the numbers of a run as event files, which ``tensorboard --logdir runs`` shows.

    A run that resumes goes on in the same folder. What was logged after its checkpoint is replaced.
    It needs the extra ``fedquilt[tensorboard]``.

    Args:
        folder: Where to write; None: ``tensorboard`` in the run's directory.

    >>> import tempfile, pathlib, torch, fedquilt as fq
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> clients = fq.make_clients(data, test=data, count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     callbacks = [fq.TensorBoardTracker(folder)]
    ...     run = fq.train(model, data[0], "fedavg", clients, 1, workers=0, callbacks=callbacks)
    ...     len(list(pathlib.Path(folder).glob("events.out.tfevents.*")))
    1
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._package = import_package("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, run: RunStarted) -> None:
        """Opens the folder."""
        folder = find_place(self.folder, run, "tensorboard", type(self).__name__)
        self._writer = self._package.SummaryWriter(
            str(folder),
            purge_step=run.round + 1 if run.is_resumed else None,
            flush_secs=FLUSH_SECONDS,
        )
        rows = "\n".join(f"| {name} | {value} |" for name, value in run.settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", run.round)

    def log(self, values: Mapping[str, float], round: int) -> None:
        """Adds the numbers of a round."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)

    def finish(self, end: RunEnded) -> None:
        """Writes what has waited."""
        self._writer.close()
