"""What a run writes down about itself: added to, cut back to a checkpoint, known by hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from fedquilt.errors import CheckpointError, CorruptFileError
from fedquilt.evaluation.clients import ClientRecord
from fedquilt.evaluation.scores import SizeScore
from fedquilt.files import fsync, write_text
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.health import Finding
from fedquilt.runs.record_format import decode_clients, expand_record
from fedquilt.structure.structure import Structure

Mark = Mapping[str, Any]  # the number of bytes of the records so far, and their SHA-256
Read = TypeVar("Read")
More = ParamSpec("More")
Reader = Callable[Concatenate[RunDirectory, More], Read]


class Records:
    """``metrics.jsonl``, the same bytes for the same run, and ``timing.jsonl``, in a folder.

    The second has times, which differ, and the hash of every line of the first.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._metrics, self._timing = directory.metrics_file, directory.timing_file
        self._hash, self._size = hashlib.sha256(), 0
        self._marks = {0: self._here()}  # by round, of the last two

    def add(self, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Appends a record of a round, or of an evaluation after it, and what it took."""
        line = _format_line(record)
        times = _format_line({**timing, "sha256": _hash(line)})
        try:
            for path, text in ((self._metrics, line), (self._timing, times)):
                with path.open("ab") as file:
                    file.write(text)
        except OSError as problem:
            raise CheckpointError(
                f"the records of round {record['round']} could not be written to {self._directory} "
                f"({problem}); make room and resume"
            ) from problem
        self._hash.update(line)
        self._size += len(line)
        if "scores" not in record:
            *_, last = self._marks.items()
            self._marks = dict([last, (record["round"], self._here())])

    def mark(self, round: int) -> Mark:
        """The records up to that of the round, which is one of the last two; they are on the disk.

        What was stopped between two rounds may have a record of the later one already.
        """
        for path in (self._metrics, self._timing):
            if path.exists():
                fsync(path)
        return self._marks[round]

    def _here(self) -> Mark:
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}

    def cut_back(self, mark: Mark | None = None, round: int = 0) -> bool:
        """Forgets records behind a round's mark, but for its evaluation; whether there was one.

        Without a mark all is forgotten. Raises a CorruptFileError, before anything is changed, if
        the records are not those that were marked. Records that are gone are not missed.
        """
        try:
            found = self._metrics.read_bytes() if self._metrics.exists() else b""
            kept = b"" if mark is None or not found else self._marked(found, mark)
            line, end, _ = found[len(kept) :].partition(b"\n")
            line += end
            is_evaluated = mark is not None and _is_evaluation(line) and self._is_known(line)
            self._hash, self._size = hashlib.sha256(kept), len(kept)
            self._marks = {round: self._here()}
            if is_evaluated:
                kept += line
                self._hash.update(line)
                self._size += len(line)
            if found:
                write_text(self._metrics, kept.decode())
            self._mend_timing()
        except OSError as problem:
            raise CheckpointError(
                f"{self._metrics} could not be written ({problem}); make room and resume"
            ) from problem
        return is_evaluated

    def _marked(self, found: bytes, mark: Mark) -> bytes:
        kept = found[: mark["bytes"]]
        if len(kept) < mark["bytes"] or _hash(kept) != mark["sha256"]:
            raise CorruptFileError(
                f"{self._metrics} is damaged: its records are not those that were written; restore "
                "it, or remove it to go on without them"
            )
        return kept

    def _is_known(self, line: bytes) -> bool:
        return _hash(line) in (read_known_hashes(self._directory) or ())

    def _mend_timing(self) -> None:
        """Ends the last line, of which a process that was killed may have written a part."""
        if self._timing.exists():
            text = self._timing.read_text(errors="replace")
            if text and not text.endswith("\n"):
                write_text(self._timing, text[: text.rfind("\n") + 1])


def read_records(directory: RunDirectory) -> list[dict[str, Any]]:
    """The records of a run, each compared with its hash; none if they are gone.

    Runs of earlier versions have no hashes, and are believed.
    """
    path = directory.metrics_file
    known = read_known_hashes(directory)
    records = []
    for number, line in enumerate(_read_lines(path), 1):
        record = _parse(line)
        if record is None or (known is not None and _hash(line) not in known):
            raise CorruptFileError(
                f"{path} or the hashes of its lines in {directory.timing_file.name} are damaged: "
                f"line {number} is not what was written; restore them, or remove both files to go "
                "on without records"
            )
        records.append(expand_record(record))
    return records


def is_known_record(read: Reader[More, Read]) -> Reader[More, Read]:
    """Refuses records that can be read but are not ours."""

    @wraps(read)
    def checked(directory: RunDirectory, /, *more: More.args, **named: More.kwargs) -> Read:
        try:
            return read(directory, *more, **named)
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise CorruptFileError(
                f"{directory.metrics_file} is damaged: its records are not of the shape that this "
                "fedquilt writes"
            ) from problem

    return checked


@is_known_record
def read_clients(
    directory: RunDirectory, structure: Structure
) -> tuple[Sequence[ClientRecord], ...]:
    """What clients did in each training round; ``structure`` is that of the prepared model."""
    rounds = [record for record in read_records(directory) if "scores" not in record]
    return tuple(decode_clients(record, structure) for record in rounds)


@is_known_record
def read_final_findings(directory: RunDirectory) -> tuple[Finding, ...]:
    """What the records show about the health of the run, at its last evaluation."""
    tests = [record for record in read_records(directory) if "scores" in record]
    return tuple(
        Finding(**{**finding, "clients": tuple(finding["clients"])})
        for finding in (tests[-1].get("findings", ()) if tests else ())
    )


@is_known_record
def read_final_scores(directory: RunDirectory, round: int) -> tuple[SizeScore, ...]:
    """The scores of the model after its last round; none, if there is no record of them."""
    for record in read_records(directory):
        if record.get("is_final") and record["round"] == round:
            return tuple(SizeScore.from_json(score) for score in record["scores"])
    return ()


def has_final_evaluation(directory: RunDirectory) -> bool:
    """Whether the last evaluation was recorded: the model is written before it.

    A run whose records are gone counts as evaluated.
    """
    path = directory.metrics_file
    return not path.exists() or '"is_final":true' in path.read_text(errors="replace")


def read_times(directory: RunDirectory) -> list[dict[str, Any]]:
    """What rounds and evaluations took; lines that cannot be read are left out."""
    return [
        times for line in _read_lines(directory.timing_file) if (times := _parse(line)) is not None
    ]


def read_known_hashes(directory: RunDirectory) -> set[str] | None:
    """The hashes of all lines of the records; None: of a version without them."""
    hashes = {times["sha256"] for times in read_times(directory) if "sha256" in times}
    return hashes or None


def _read_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read ({problem})") from problem


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(record, dict) and isinstance(record.get("round"), int)
    return record if is_one else None


def _format_line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n").encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_evaluation(line: bytes) -> bool:
    """Whether a line records an evaluation, but not the one at the run's end."""
    record = _parse(line) or {}
    return "scores" in record and not record.get("is_final")
