"""The directory of a run: its file names, its format, its lock, and what is checked before use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from fedquilt.engines.client_state import ClientStateStore
from fedquilt.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    CorruptFileError,
    DataError,
    StructureError,
)
from fedquilt.federation.privacy.noise import read_secret, write_secret
from fedquilt.files import (
    fsync,
    hold_lock,
    read_document,
    read_sealed,
    remove_partial_files,
    write_document,
    write_sealed,
    write_text,
)
from fedquilt.structure.serialization import from_json, to_json
from fedquilt.structure.structure import Structure

FORMAT_VERSION = 3  # of checkpoints and records; earlier ones are not read


class RunDirectory:
    """One run on disk.

    ``config.toml`` has the settings, ``initial.safetensors`` the model's first values, whose
    presence means that there is a run. ``metrics.jsonl`` and ``timing.jsonl`` have the records,
    ``checkpoints`` the last states, ``clients`` what clients keep, ``model`` the finished model.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.initial_file = self.path / "initial.safetensors"
        self.metrics_file = self.path / "metrics.jsonl"
        self.timing_file = self.path / "timing.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.clients = self.path / "clients"
        self.model = self.path / "model"
        self.registry_file = self.path / "clients.json"  # where clients are nodes
        self.evaluation_file = self.path / "evaluation.json"
        self.traffic_file = self.path / "traffic.json"
        self.status_file = self.path / "status.json"  # what it is doing, for those who watch
        self.trackers_file = self.path / "trackers.json"  # under which names they know the run
        self.structure_file = self.path / "structure.json"  # of the prepared model
        self.examples_file = self.path / "examples.json"  # a hash of what clients have
        self.passes_file = self.path / "passes.json"  # how many clients train in one pass
        self.lock_file = self.path / "lock"
        self.secret_file = self.path / "secret.key"  # of a private run

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def has_run(self) -> bool:
        """Whether a run was started here."""
        return self.initial_file.exists()

    @property
    def client_states(self) -> ClientStateStore:
        """What clients keep between rounds."""
        return ClientStateStore(self.clients)

    def check(self, *, resume: bool) -> None:
        """Refuses to start a run over other files, or to resume one that is not there."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(
                f'{self} is a file, and a run needs a directory; choose another: out="..."'
            )
        if resume:
            if not self.has_run:
                raise CheckpointError(f"{self} holds no run to resume; leave out resume=True")
            return
        if self.has_run:
            raise CheckpointError(
                f"{self} already holds a run; go on with it (resume=True), or choose another "
                'directory: out="..."'
            )
        if self.path.exists() and not all(map(self._is_early, self.path.iterdir())):
            raise CheckpointError(
                f'{self} is not empty and holds no run; choose another directory: out="..."'
            )

    def require_run(self) -> None:
        """Refuses a file, and a directory in which nothing was trained."""
        if self.path.exists() and not (self.has_run or self.model.exists()):
            raise CheckpointError(
                f"{self} is not a run's directory; give one that a run is kept in"
            )

    def _is_early(self, path: Path) -> bool:
        """Whether this may be there before there is a run, such as a half-written first file."""
        is_partial = path.name.startswith(".") and path.name.endswith(".part")
        early = (
            self.config_file,
            self.examples_file,
            self.lock_file,
            self.registry_file,
            self.secret_file,
        )
        return is_partial or path in early

    @contextmanager
    def hold(self, *, resume: bool, on_wait: Callable[[], None]) -> Iterator[None]:
        """Creates and locks the directory for one process; ``on_wait`` is called if it must wait.

        Directories that were created are removed again if the run is refused before its first
        round.
        """
        self.check(resume=resume)
        created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold_lock(self.lock_file, on_wait))
            except OSError as problem:
                raise CheckpointError(f"{self} cannot hold a run ({problem})") from problem
            self.check(resume=resume)  # another process may have been quicker
            remove_partial_files(self.path)
            remove_partial_files(self.model)
            try:
                yield
            except (BudgetError, ConfigError, DataError, StructureError):
                if created and not self.metrics_file.exists():
                    _remove_created(created)
                raise

    def write_config(self, text: str) -> None:
        """Writes the settings."""
        try:
            write_text(self.config_file, text)
        except OSError as problem:
            raise CheckpointError(f"{self} cannot hold a run ({problem})") from problem

    def write_initial(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the first values of the model; from now on there is a run."""
        try:
            write_sealed(self.initial_file, tensors)
            fsync(self.initial_file)
            fsync(self.path)
        except OSError as problem:
            raise CheckpointError(
                f"the run could not be started in {self} ({problem}); make room"
            ) from problem

    def write_secret(self, secret: bytes) -> None:
        """Writes the secret that noise and cohorts are drawn from; only its owner can read it."""
        try:
            write_secret(self.secret_file, secret)
        except OSError as problem:
            raise CheckpointError(
                f"the run's secret could not be written to {self} ({problem}); make room"
            ) from problem

    def read_secret(self) -> bytes:
        """The secret that the run was started with."""
        try:
            return read_secret(self.secret_file)
        except CorruptFileError as problem:
            raise CheckpointError(
                f"{problem}, and other noise would release the run's rounds a second time; put the "
                "file back, or start a new run"
            ) from problem

    def write_structure(self, structure: Structure) -> None:
        """Stores what can be cut in the prepared model, which records of clients refer to."""
        try:
            write_text(self.structure_file, json.dumps(to_json(structure)))
        except OSError as problem:
            raise CheckpointError(f"{self} cannot hold a run ({problem})") from problem

    def read_structure(self) -> Structure | None:
        """What ``write_structure`` stored; None if it cannot be read."""
        try:
            return from_json(json.loads(self.structure_file.read_text()))
        except (OSError, KeyError, IndexError, TypeError, ValueError, RecursionError):
            return None

    def read_initial(self) -> dict[str, Tensor]:
        """The first values of the model."""
        return read_sealed(self.initial_file)

    def write_evaluation(self, document: Mapping[str, Any]) -> None:
        """Stores scores that were measured after training, for reports."""
        write_document(self.evaluation_file, document)

    def read_evaluation(self) -> dict[str, Any] | None:
        """The scores that ``write_evaluation`` stored; None if there are none."""
        return read_document(self.evaluation_file) if self.evaluation_file.is_file() else None


def _remove_created(created: list[Path]) -> None:
    shutil.rmtree(created[0], ignore_errors=True)
    for parent in created[1:]:
        with suppress(OSError):  # another process has put something there
            parent.rmdir()
