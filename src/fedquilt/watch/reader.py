"""Finds runs in folders, and reads what they have recorded so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedquilt.errors import FedquiltError
from fedquilt.methods import METHODS
from fedquilt.report.coverage import compute_coverage
from fedquilt.report.page import RunReport
from fedquilt.report.run_report import read_recorded
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.find import FoundRun, Signature, find_runs, require_folder, sign_files
from fedquilt.runs.records import read_clients
from fedquilt.runs.status import read_status
from fedquilt.settings.toml import read_toml

MAX_RUNS = 200  # that are listed, the newest first
MAX_SHOWN = 4  # runs that are shown if none was chosen


class RunWatcher:
    """Reads runs again when their files have changed.

    Args:
        folders: Directories of runs, or folders that hold such directories.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [require_folder(folder) for folder in folders]
        self._read: dict[Path, tuple[Signature, RunReport]] = {}

    def find_runs(self) -> list[FoundRun]:
        """All runs, the newest first; each has a name of its own."""
        return find_runs(self._folders)[:MAX_RUNS]

    def choose(self, runs: Sequence[FoundRun], names: Sequence[str]) -> list[FoundRun]:
        """The runs of these names; those that go, and the newest, if there are none."""
        chosen = [run for run in runs if run.name in names]
        alive = [run for run in runs if run.is_alive][:MAX_SHOWN]
        return chosen or alive or list(runs[:1])

    def read(self, run: FoundRun) -> RunReport:
        """What is known about a run now; what cannot be read for a moment is as it was before."""
        path = run.directory.path
        signature = sign_files(run.directory)
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
