"""Temporary folders that do not outlive their owner by much, even if it is killed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path

from fedquilt.files import try_to_lock

LONGEST_START = 3600.0  # seconds after which a folder is not one that somebody is about to lock


class Spool:
    """A temporary folder in ``parent``, locked while its owner lives.

    The system takes the lock away from a process that dies, however that happens; the next spool
    in the same place then removes the folder.
    """

    def __init__(self, parent: Path) -> None:
        _remove_abandoned(parent)
        hidden = Path(tempfile.mkdtemp(prefix=".fedquilt-", dir=parent))
        self._lock = (hidden / "lock").open("w")
        with contextlib.suppress(OSError):  # a file system without locks
            try_to_lock(self._lock)
        self.folder = hidden.with_name(hidden.name.removeprefix("."))
        hidden.rename(self.folder)  # seen by others only now that it is locked

    def has_room(self, size: int) -> bool:
        """Whether that many bytes fit, with as many to spare."""
        return shutil.disk_usage(self.folder).free > 2 * size

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Removes what processes left that were killed; those alive hold the locks of theirs."""
    for path in parent.glob("fedquilt-*"):
        with contextlib.suppress(OSError), (path / "lock").open("r+") as lock:
            if try_to_lock(lock):
                shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(".fedquilt-*"):  # killed before it was locked
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - LONGEST_START:
                shutil.rmtree(path, ignore_errors=True)
