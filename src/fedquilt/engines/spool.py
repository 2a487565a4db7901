"""Temporary folders that do not outlive their owner by much, even if it is killed."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl


class Spool:
    """A temporary folder in ``parent``, locked while its owner lives.

    The system takes the lock away from a process that dies, however that happens; the next spool
    in the same place then removes the folder.
    """

    def __init__(self, parent: Path) -> None:
        _remove_abandoned(parent)
        hidden = Path(tempfile.mkdtemp(prefix=".fedquilt-", dir=parent))
        self._lock = (hidden / "lock").open("w")
        _try_to_lock(self._lock)
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
    for path in parent.glob("fedquilt-*"):
        with contextlib.suppress(OSError), (path / "lock").open("r+") as lock:
            if _try_to_lock(lock):
                shutil.rmtree(path, ignore_errors=True)


def _try_to_lock(file: IO[str]) -> bool:
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
