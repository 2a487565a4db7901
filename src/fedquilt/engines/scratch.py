"""Temporary folders that are removed later if their owner was killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from fedquilt.files import try_to_lock

PREFIX, LOCK = "fedquilt-", ".lock"


class ScratchDirectory:
    """A temporary folder in ``parent``, with a file beside it that is locked while its owner lives.

    The system releases the lock when the process dies, also if it is killed. The next scratch
    directory in the same parent then removes the folder. As a context it gives the folder.

    Args:
        parent: Where to create the folder; None: where temporary files are.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _remove_abandoned(parent)
        self._numbers = itertools.count(1)
        self._lock_path, self._lock = _create_lock(parent)
        self.folder = self._lock_path.with_suffix("")
        self.folder.mkdir(mode=0o700)

    def make_path(self, prefix: str, suffix: str = "") -> Path:
        """A path in the folder that was not used before."""
        return self.folder / f"{prefix}{next(self._numbers)}{suffix}"

    def has_room(self, size: int) -> bool:
        """Whether there is room for twice as many bytes."""
        return shutil.disk_usage(self.folder).free > 2 * size

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        _remove_lock(self._lock_path, self._lock)

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, *_: object) -> None:
        self.close()


def _create_lock(parent: Path) -> tuple[Path, IO[str]]:
    """A new locked file. Another process may lock it first, and remove it as abandoned."""
    while True:
        handle, name = tempfile.mkstemp(prefix=PREFIX, suffix=LOCK, dir=parent)
        lock = os.fdopen(handle, "w")
        try:
            is_locked = try_to_lock(lock)
        except OSError:  # a file system without locks
            is_locked = True
        if is_locked and Path(name).exists():
            return Path(name), lock
        lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Removes folders of processes that were killed: nothing holds their locks."""
    for path in parent.glob(f"{PREFIX}*{LOCK}"):
        with contextlib.suppress(OSError):
            lock = path.open("r+")
            try:
                is_abandoned = try_to_lock(lock)
            except OSError:
                is_abandoned = False
            if is_abandoned:
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                _remove_lock(path, lock)
            lock.close()


def _remove_lock(path: Path, lock: IO[str]) -> None:
    """Removes a file while it is locked, or, where open files stay, as soon as it is closed."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    lock.close()
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
