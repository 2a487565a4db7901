"""Finds runs in folders, and reads what they have recorded so far."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedquilt.errors import CheckpointError, FedquiltError
from fedquilt.methods import METHODS
from fedquilt.report.coverage import compute_coverage
from fedquilt.report.page import RunReport
from fedquilt.report.run_report import read_recorded
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.records import read_clients
from fedquilt.runs.status import read_status
from fedquilt.settings.toml import read_toml

DEPTH = 3  # folders between a given one and its runs, at most
MAX_RUNS = 200  # that are listed, the newest first
MAX_SHOWN = 4  # runs that are shown if none was chosen

Signature = tuple[tuple[int, int], ...]  # the times and sizes of a run's files


@dataclass(frozen=True)
class FoundRun:
    """A run that can be watched."""

    name: str
    directory: RunDirectory
    changed: float  # when, in seconds since 1970
    is_alive: bool


class RunWatcher:
    """Reads runs again when their files have changed.

    Args:
        folders: Directories of runs, or folders that hold such directories.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder} is not a directory; give a run, or a folder that holds runs"
                )
        self._folders = [Path(folder) for folder in folders]
        self._read: dict[Path, tuple[Signature, RunReport]] = {}

    def find_runs(self) -> list[FoundRun]:
        """All runs, the newest first; each has a name of its own."""
        paths = list(dict.fromkeys(p for f in self._folders for p in _list_runs(f, DEPTH)))
        names = _name_paths(paths)
        runs = [_describe(RunDirectory(path), names[path]) for path in paths]
        return sorted(runs, key=lambda run: (not run.is_alive, -run.changed))[:MAX_RUNS]

    def choose(self, runs: Sequence[FoundRun], names: Sequence[str]) -> list[FoundRun]:
        """The runs of these names; those that go, and the newest, if there are none."""
        chosen = [run for run in runs if run.name in names]
        alive = [run for run in runs if run.is_alive][:MAX_SHOWN]
        return chosen or alive or list(runs[:1])

    def read(self, run: FoundRun) -> RunReport:
        """What is known about a run now; what cannot be read for a moment is as it was before."""
        path = run.directory.path
        signature = _sign(run.directory)
        known = self._read.get(path)
        if known is None or known[0] != signature:
            try:
                report = read_report(run.name, run.directory)
            except FedquiltError as problem:
                if known is not None:
                    return known[1]  # a record was half written
                sentence = str(problem).replace(str(path), run.name)
                return RunReport(run.name, {"problem": sentence}, ())
            self._read[path] = known = signature, report
        return known[1]


def read_report(name: str, directory: RunDirectory) -> RunReport:
    """What the records of a run say, whether it has ended or not; its model is not read."""
    settings = _read_settings(directory)
    recorded = read_recorded(directory)
    evaluations = recorded["evaluations"]
    scores = recorded.pop("scores") or (evaluations[-1][1] if evaluations else ())
    structure = directory.read_structure()
    return RunReport(
        name,
        _describe_settings(settings),
        scores,
        size_kind=_find_size_kind(settings),
        coverage=None
        if structure is None
        else compute_coverage(structure, read_clients(directory, structure)),
        status=read_status(directory),
        **recorded,
    )


def _list_runs(folder: Path, depth: int) -> Iterator[Path]:
    if RunDirectory(folder).has_run:
        yield folder.resolve()
    elif depth:
        try:
            inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
        except OSError:
            return
        for path in inner:
            yield from _list_runs(path, depth - 1)


def _name_paths(paths: Sequence[Path]) -> dict[Path, str]:
    """The last folder's name; with those before it where several have the same."""
    names = {path: path.name for path in paths}
    for length in range(2, 5):
        counts = list(names.values())
        names = {
            path: name if counts.count(name) == 1 else "/".join(path.parts[-length:])
            for path, name in names.items()
        }
    return names


def _describe(directory: RunDirectory, name: str) -> FoundRun:
    status = read_status(directory)
    changed = max((time for time, _ in _sign(directory)), default=0) / 1e9
    return FoundRun(name, directory, changed, status is not None and status.is_alive)


def _sign(directory: RunDirectory) -> Signature:
    """What changes when the files of a run do."""
    found = []
    for file in (
        directory.metrics_file,
        directory.timing_file,
        directory.status_file,
        directory.evaluation_file,
        directory.config_file,
    ):
        try:
            facts = os.stat(file)
        except OSError:
            continue
        found.append((facts.st_mtime_ns, facts.st_size))
    return tuple(found)


def _read_settings(directory: RunDirectory) -> Mapping[str, Any]:
    """The settings of a run; none, if it was started from Python."""
    try:
        return read_toml(directory.config_file) if directory.config_file.is_file() else {}
    except FedquiltError:
        return {}


def _describe_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What people ask first about a run."""
    asked = (
        ("method", "method", "name"),
        ("model", "model", "name"),
        ("data", "data", "source"),
        ("clients", "data", "clients"),
        ("partition", "data", "partition"),
    )
    facts = {
        label: Path(str(value)).name
        for label, section, name in asked
        if (value := settings.get(section, {}).get(name)) is not None
    }
    facts |= {name: settings[name] for name in ("rounds", "seed") if name in settings}
    return facts or {"settings": "of a run from Python"}


def _find_size_kind(settings: Mapping[str, Any]) -> str:
    """What the sizes of a run are fractions of, as its method says."""
    given = dict(settings.get("method", {}))
    method = METHODS.get(str(given.pop("name", "")))
    if method is None:
        return "width"
    known = {field.name for field in fields(method)}  # type: ignore[arg-type]
    try:
        return str(method(**{n: v for n, v in given.items() if n in known}).size_kind)
    except (FedquiltError, TypeError, ValueError):
        return "width"
