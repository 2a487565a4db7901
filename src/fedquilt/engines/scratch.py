"""Temporary folders that are removed later if their owner was killed."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from pathlib import Path

from fedquilt.files import try_to_lock

MAX_START_SECONDS = 3600.0  # after which a folder without a lock is abandoned


class ScratchDirectory:
    """A temporary folder in ``parent``, locked while its owner lives.

    The system releases the lock when the process dies, also if it is killed. The next scratch
    directory in the same parent then removes the folder.

    Args:
        parent: Where to create the folder.
    """

    def __init__(self, parent: Path) -> None:
        self._numbers = itertools.count(1)
        _remove_abandoned(parent)
        hidden = Path(tempfile.mkdtemp(prefix=".fedquilt-", dir=parent))
        self._lock = (hidden / "lock").open("w")
        with contextlib.suppress(OSError):  # a file system without locks
            try_to_lock(self._lock)
        self.folder = hidden.with_name(hidden.name.removeprefix("."))
        hidden.rename(self.folder)  # other processes look for this name, and find it locked

    def make_path(self, prefix: str, suffix: str = "") -> Path:
        """A path in the folder that was not used before."""
        return self.folder / f"{prefix}{next(self._numbers)}{suffix}"

    def has_room(self, size: int) -> bool:
        """Whether there is room for twice as many bytes."""
        return shutil.disk_usage(self.folder).free > 2 * size

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Removes folders of processes that were killed: nothing holds their locks."""
    for path in parent.glob("fedquilt-*"):
        with contextlib.suppress(OSError), (path / "lock").open("r+") as lock:
            if try_to_lock(lock):
                shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(".fedquilt-*"):  # killed before it was locked
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - MAX_START_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
