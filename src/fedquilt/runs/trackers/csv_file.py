"""Writes the numbers of a run into a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from fedquilt.files import write_text
from fedquilt.runs.events import RunStarted
from fedquilt.runs.trackers.tracker import Tracker, find_place

KEY = "round"


class CSVTracker(Tracker):
    """Writes the numbers of a run into a CSV file: a row for each round, a column for each number.

    The file is complete after every round. A run that resumes keeps the rows up to its checkpoint.

    Args:
        path: The file; None: ``metrics.csv`` in the run's directory.

    >>> import pathlib, tempfile, torch, fedquilt as fq
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> clients = fq.make_clients(data, test=data, count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "numbers.csv")
    ...     callbacks = [fq.CSVTracker(file)]
    ...     run = fq.train(model, data[0], "fedavg", clients, 2, workers=0, callbacks=callbacks)
    ...     lines = file.read_text().splitlines()
    >>> len(lines), lines[0][:16]
    (3, 'round,train/loss')
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = path
        self._file = Path()
        self._rows: dict[int, dict[str, str]] = {}

    def start(self, run: RunStarted) -> None:
        """Reads the rows of a run that resumes."""
        self._file = find_place(self.path, run, "metrics.csv", type(self).__name__)
        self._rows = {}
        if run.is_resumed and self._file.is_file():
            with self._file.open(newline="") as file:
                rows = {int(row[KEY]): row for row in csv.DictReader(file)}
            self._rows = {
                number: {name: value for name, value in row.items() if value and name != KEY}
                for number, row in rows.items()
                if number <= run.round
            }

    def log(self, values: Mapping[str, float], round: int) -> None:
        """Writes a row, or adds to the row of the round."""
        is_next = round not in self._rows
        before = self._list_columns()
        self._rows.setdefault(round, {}).update({name: f"{v:.10g}" for name, v in values.items()})
        if is_next and len(self._rows) > 1 and self._list_columns() == before:
            with self._file.open("a", newline="") as file:
                file.write(self._format(before, [round], header=False))
        else:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, self._format(self._list_columns(), sorted(self._rows)))

    def _list_columns(self) -> list[str]:
        return [KEY, *dict.fromkeys(name for row in self._rows.values() for name in row)]

    def _format(self, columns: list[str], rounds: list[int], *, header: bool = True) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows({KEY: number, **self._rows[number]} for number in rounds)
        return text.getvalue()
