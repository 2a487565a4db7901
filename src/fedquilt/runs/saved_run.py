"""A run on disk while it trains: its checkpoints, its records, and what they need of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedquilt.engines.engine import Engine
from fedquilt.errors import CheckpointError, CorruptFileError
from fedquilt.runs import checkpoint
from fedquilt.runs.checkpoint import Checkpoint
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.events import Callback, CheckpointDamaged, CheckpointSaved
from fedquilt.runs.records import Records, read_records


@dataclass(frozen=True, eq=False)
class Position:
    """Where training continues, and whether the round before was evaluated."""

    checkpoint: Checkpoint
    is_evaluated: bool


class SavedRun:
    """Saves a run in its directory, if it has one, and finds where it goes on.

    Args:
        directory: The run's directory; None: the run is in memory only.
        fingerprint: The run's identity.
        engine: Keeps the clients' states.
        notify: Is called with what happens to checkpoints.
    """

    def __init__(
        self,
        directory: RunDirectory | None,
        fingerprint: str,
        engine: Engine,
        notify: Callback,
    ) -> None:
        self._directory, self._fingerprint = directory, fingerprint
        self._engine, self._notify = engine, notify
        self._records = None if directory is None else Records(directory)
        self._states = None if directory is None else directory.client_states
        self._stored: dict[Path, list[dict[int, int]]] = {}  # what checkpoints need of clients

    def add_record(self, record: Mapping[str, Any], timing: Mapping[str, Any]) -> bool:
        """Writes a record; whether there is a directory to write it to."""
        if self._records is not None:
            self._records.add(record, timing)
        return self._records is not None

    def read_records(self) -> list[dict[str, Any]]:
        """The records of the run so far."""
        return [] if self._directory is None else read_records(self._directory)

    def save(self, done: Checkpoint) -> None:
        """Writes a checkpoint; files that it names are on the disk before it is."""
        if self._directory is None or self._states is None or self._records is None:
            return
        try:
            self._states.sync(*self._list_versions(done))
            done = replace(done, records=self._records.mark(done.state.round))
        except OSError as problem:
            raise CheckpointError(
                f"the files of round {done.state.round} could not be written to {self._directory} "
                f"({problem}); make room and resume"
            ) from problem
        path = checkpoint.save_checkpoint(self._directory.checkpoints, done, self._fingerprint)
        self._stored.pop(path, None)
        self._notify(CheckpointSaved(done.state.round, path))

    def remove_old_states(self, done: Checkpoint) -> None:
        """Removes clients' states that neither this round, the best one nor a checkpoint needs."""
        if done.client_versions:
            self._engine.remove_unused(*self.list_used_versions(done))

    def list_used_versions(self, done: Checkpoint) -> list[Mapping[int, int]]:
        """The versions of clients' states that are needed: now, and by checkpoints."""
        directory = self._directory
        saved = [] if directory is None else checkpoint.list_checkpoints(directory.checkpoints)
        self._stored = {
            path: self._stored.get(path) or checkpoint.list_client_versions(path) for path in saved
        }
        return [*self._list_versions(done), *(v for some in self._stored.values() for v in some)]

    @staticmethod
    def _list_versions(done: Checkpoint) -> list[Mapping[int, int]]:
        best = done.selection.best
        return [*([] if best is None else [best.client_versions]), done.client_versions]

    def find_position(self, require_same: Callable[[Checkpoint], None]) -> Position | None:
        """The position of the newest good checkpoint; None if there is none at all.

        Everything later is removed from the directory, and damaged checkpoints are, which later
        ones would be confused with.

        Args:
            require_same: Refuses a checkpoint that the run cannot go on from.
        """
        assert self._directory is not None
        assert self._records is not None
        checkpoint.remove_leftovers(self._directory.checkpoints)
        paths = checkpoint.list_checkpoints(self._directory.checkpoints)
        damaged: dict[Path, CorruptFileError] = {}
        for path in reversed(paths):
            try:
                restored = checkpoint.load_checkpoint(path, self._fingerprint)
                require_same(restored)
                self._engine.restore(restored.client_versions)
                is_evaluated = self._records.cut_back(restored.records, restored.state.round)
            except CorruptFileError as problem:
                damaged[path] = problem
                continue
            for worse, reason in damaged.items():
                self._notify(CheckpointDamaged(restored.state.round, str(reason)))
                checkpoint.remove_checkpoint(worse)
            self.remove_old_states(restored)
            return Position(restored, is_evaluated)
        if paths:
            newest, *_ = damaged.values()
            raise CheckpointError(
                f"{newest} (no other checkpoint can be used; if nothing can be restored, start "
                "the run anew in another directory)"
            ) from newest
        self._records.cut_back()
        return None  # stopped before the first checkpoint
