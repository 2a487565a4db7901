"""Finds the runs in folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedquilt.errors import CheckpointError
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.status import read_status

DEPTH = 3  # folders between a given one and its runs, at most

Signature = tuple[tuple[int, int], ...]  # the times and sizes of a run's files


@dataclass(frozen=True)
class FoundRun:
    """A run that can be watched."""

    name: str
    directory: RunDirectory
    changed: float  # when, in seconds since 1970
    is_alive: bool


def find_runs(folders: Iterable[Path]) -> list[FoundRun]:
    """All runs in folders, those that go and the newest first; each has a name of its own."""
    paths = list(dict.fromkeys(p for folder in folders for p in _list_runs(folder, DEPTH)))
    names = _name_paths(paths)
    runs = [_describe(RunDirectory(path), names[path]) for path in paths]
    return sorted(runs, key=lambda run: (not run.is_alive, -run.changed))


def require_folder(folder: str | Path) -> Path:
    """The folder as a path; an error if there is none."""
    if not Path(folder).is_dir():
        raise CheckpointError(
            f"{folder} is not a directory; give a run, or a folder that holds runs"
        )
    return Path(folder)


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
    changed = max((time for time, _ in sign_files(directory)), default=0) / 1e9
    return FoundRun(name, directory, changed, status is not None and status.is_alive)


def sign_files(directory: RunDirectory) -> Signature:
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
