"""What clients keep between rounds, as files that a checkpoint can go back to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedquilt.files import read_sealed, sync, write_sealed


class KeptStates:
    """One file per client and version; only the latest versions are current."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[int, int] = {}
        self._synced: set[Path] = set()

    def path(self, client: int, version: int) -> Path:
        """Where a version of a client's state is."""
        return self.folder / f"client-{client}.{version}.safetensors"

    def current(self, client: int) -> Path | None:
        """The file of a client's state, if it has any."""
        version = self.versions.get(client)
        return None if version is None else self.path(client, version)

    def next(self, client: int) -> Path:
        """Where the client's next state goes."""
        return self.path(client, self.versions.get(client, 0) + 1)

    def advance(self, client: int) -> None:
        """The next state has been written and is current."""
        self.versions[client] = self.versions.get(client, 0) + 1

    def restore(self, versions: Mapping[int, int]) -> None:
        """Goes back to these versions; a DamageError says which of them is not what it was."""
        for client, version in versions.items():
            read_sealed(self.path(client, version))
        self.versions = dict(versions)

    def sync(self, versions: Mapping[int, int]) -> None:
        """Waits until these versions are on the disk, those that are files here."""
        paths = (self.path(client, version) for client, version in versions.items())
        there = {path for path in paths if path.exists()}
        for path in there - self._synced:
            sync(path)
        if there - self._synced:
            sync(self.folder)
        self._synced = there

    def forget_others(self, *used: Mapping[int, int]) -> None:
        """Removes the files of versions that none of the given ones uses."""
        wanted = {self.path(c, v) for versions in used for c, v in versions.items()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path not in wanted:  # also what was left by a process killed while it wrote
                path.unlink()


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a client's state so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, tensors)


def read(path: Path | None) -> dict[str, Tensor] | None:
    """A client's state, if it has any; refused if it is not what was written."""
    return None if path is None else read_sealed(path)


def is_sound(tensors: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether a state may be kept: a diverged client goes on from its last sound one.

    Constants of the model that are infinite, such as the -inf of a mask, are no sign of that.
    """
    diverged = {name for name, tensor in tensors.items() if not _is_finite(tensor)}
    if not diverged:
        return True
    constants = {name for name, tensor in model.named_buffers() if not _is_finite(tensor)}
    return all(_plain(name) in constants and not tensors[name].isnan().any() for name in diverged)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _plain(name: str) -> str:
    """A tensor's name in the model, without what says whose and of what time it is."""
    return name.rpartition("/")[2].partition("@")[0]
