"""Clients' states between rounds, as files that a checkpoint can go back to."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

import torch
from torch import Tensor, nn

from fedquilt.files import fsync, read_sealed, write_sealed


class ClientStateStore:
    """One file per client and version; only the latest versions are current."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[int, int] = {}
        self._after: dict[int, int] = {}  # versions that new ones come after
        self._synced: Set[tuple[int, int]] = frozenset()
        self._replaced: set[tuple[int, int]] | None = None  # since ``remove_unused``; None: any

    def path(self, client: int, version: int) -> Path:
        """The file of a version of a client's state."""
        return self.folder / f"client-{client}.{version}.safetensors"

    def current_path(self, client: int) -> Path | None:
        """The file of a client's state, if it has any."""
        version = self.versions.get(client)
        return None if version is None else self.path(client, version)

    def next_path(self, client: int) -> Path:
        """The file for the client's next state."""
        return self.path(client, self._next_version(client))

    def advance(self, client: int) -> None:
        """Makes the next state, which has been written, the current one."""
        if self._replaced is not None and client in self.versions:
            self._replaced.add((client, self.versions[client]))
        self.versions[client] = self._next_version(client)

    def _next_version(self, client: int) -> int:
        return max(self.versions.get(client, 0), self._after.get(client, 0)) + 1

    def restore(self, versions: Mapping[int, int], after: Mapping[int, int] = {}) -> None:
        """Goes back to these versions; raises a CorruptFileError if one of them is damaged.

        Args:
            versions: The version of each client that has a state.
            after: Versions of other use, which new states do not write over.
        """
        for client, version in versions.items():
            read_sealed(self.path(client, version))
        self.versions, self._after = dict(versions), dict(after)
        self._replaced = None

    def sync(self, *used: Mapping[int, int]) -> None:
        """Waits until the files of these versions are on the disk.

        It looks at files of versions alone that were not among those of the last time.
        """
        wanted = frozenset[tuple[int, int]]().union(*(versions.items() for versions in used))
        new = [self.path(client, version) for client, version in wanted - self._synced]
        existing = [path for path in new if path.exists()]
        for path in existing:
            fsync(path)
        if existing:
            fsync(self.folder)
        self._synced = wanted

    def remove_unused(self, *used: Mapping[int, int]) -> None:
        """Removes the files of versions that none of the given ones uses.

        The first time, and after a ``restore``, it looks at all files; else only at those of
        versions that were replaced since, so that a round does not take time for every client.
        """
        if self._replaced is not None and self.versions:
            unused = {(c, v) for c, v in self._replaced if all(u.get(c) != v for u in used)}
            for client, version in unused:
                self.path(client, version).unlink(missing_ok=True)
            self._replaced -= unused
            return
        self._replaced = {(c, v) for versions in used for c, v in versions.items()} - {
            *self.versions.items()
        }
        wanted = {self.path(c, v) for versions in used for c, v in versions.items()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path not in wanted:  # also what was left by a process killed while it wrote
                path.unlink()


def write_client_state(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a client's state atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, tensors)


def read_client_state(path: Path | None) -> dict[str, Tensor] | None:
    """A client's state, if it has any; raises a CorruptFileError if the file is damaged."""
    return None if path is None else read_sealed(path)


def is_finite_state(tensors: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether a state has finite values only, but for infinite constants of the model.

    Such a constant is the -inf of an attention mask.
    """
    diverged = {name for name, tensor in tensors.items() if not _is_finite(tensor)}
    if not diverged:
        return True
    constants = {name for name, tensor in model.named_buffers() if not _is_finite(tensor)}
    return all(
        _tensor_name(name) in constants and not tensors[name].isnan().any() for name in diverged
    )


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensor_name(name: str) -> str:
    """A tensor's name in the model: without a recipe's prefix, and without its owner."""
    return name.rpartition("/")[2].partition("@")[0]
