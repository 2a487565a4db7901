"""What happened in each round of a run, as a table of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedquilt.evaluation.scores import SizeScore
from fedquilt.federation.client import Failure
from fedquilt.federation.privacy.accountant import PrivacySpent
from fedquilt.formatting import make_data_frame, make_html_table
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.events import Evaluated, Event, RoundDone
from fedquilt.runs.measurements import FINAL, measure_event
from fedquilt.runs.records import is_known_record, read_records, read_times

ROUND = "round"


class History(tuple[dict[str, float], ...]):
    """The numbers of a run, round by round: a tuple of rows that notebooks show as a table.

    A row has ``round``, and the numbers by the names that trackers use, such as ``train/loss``.

    >>> history = History([{"round": 1, "train/loss": 0.5}, {"round": 2, "train/loss": 0.4}])
    >>> history.get_curve("train/loss")
    [(1, 0.5), (2, 0.4)]
    """

    __slots__ = ()

    def get_curve(self, name: str) -> list[tuple[float, float]]:
        """The rounds in which a number is known, and its values.

        Args:
            name: The number, such as ``train/loss`` or ``accuracy/0.5``.
        """
        return [(row[ROUND], row[name]) for row in self if name in row]

    def to_pandas(self) -> Any:
        """A data frame of pandas, with a row for each round."""
        return make_data_frame(self, ROUND)

    def _repr_html_(self) -> str:
        names = dict.fromkeys(name for row in self for name in row if not _is_final(name))
        rows = [[f"{row[name]:.4g}" if name in row else "" for name in names] for row in self]
        return make_html_table(list(names), rows)


def _is_final(name: str) -> bool:
    return name.startswith(f"{FINAL}/")


class HistoryRecorder:
    """A callback that keeps the history of a run in memory."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}

    def __call__(self, event: Event) -> None:
        """Takes the numbers of a round, or of an evaluation."""
        if isinstance(event, RoundDone | Evaluated):
            row = self._rows.setdefault(event.round, {ROUND: event.round})
            row.update(measure_event(event))

    @property
    def history(self) -> History:
        """The history so far."""
        return History(self._rows[round] for round in sorted(self._rows))


@is_known_record
def read_history(directory: RunDirectory) -> History:
    """The history that a run has recorded in its directory."""
    times = {(t["event"], t[ROUND]): t["seconds"] for t in read_times(directory)}
    return _replay(read_records(directory), times)


def _replay(
    records: Iterable[Mapping[str, Any]], times: Mapping[tuple[str, int], float]
) -> History:
    recorder = HistoryRecorder()
    for record in records:
        recorder(_decode_event(record, times))
    return recorder.history


def _decode_event(
    record: Mapping[str, Any], times: Mapping[tuple[str, int], float]
) -> RoundDone | Evaluated:
    """The event of a record, with what its numbers are made of."""
    round, sent = record[ROUND], (record["bytes_down"], record["bytes_up"])
    failures = tuple(Failure(f["client"], f["reason"]) for f in record["failures"])
    if "scores" in record:
        scores = tuple(map(SizeScore.from_json, record["scores"]))
        return Evaluated(
            round,
            scores,
            failures,
            *sent,
            record["is_final"],
            times.get(("Evaluated", round), 0.0),
            validation=record.get("validation"),
        )
    privacy = record.get("privacy")
    return RoundDone(
        round,
        record["phase"],
        record["loss"],
        record["num_clients"],
        failures,
        *sent,
        times.get(("RoundDone", round), 0.0),
        record.get("local", {}),
        privacy=None if privacy is None else PrivacySpent(**privacy),
        merging=record.get("merging", {}),
    )
