"""The bundle: a finished model on disk, from which a model of any size is cut at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedquilt.errors import CheckpointError
from fedquilt.runs.checkpoint import read_tensors, write_tensors, write_text

FORMAT, VERSION = "fedquilt-bundle", 1


@dataclass(frozen=True, eq=False)
class Bundle:
    """Global tensors, and what is needed to cut them: as plain values."""

    params: Mapping[str, Tensor]
    about: Mapping[str, Any]


def save(folder: Path, bundle: Bundle) -> None:
    """Writes the bundle; the description last, so that one which can be read is whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        digest = write_tensors(folder / "params.safetensors", bundle.params)
        about = {"format": FORMAT, "version": VERSION, "sha256": digest, **bundle.about}
        write_text(folder / "bundle.json", json.dumps(about, indent=1, sort_keys=True))
    except OSError as problem:
        raise CheckpointError(
            f"the model could not be written to {folder} ({problem})"
        ) from problem


def load(folder: Path) -> Bundle:
    """Reads a bundle, and refuses one that is damaged or foreign."""
    path = folder / "bundle.json"
    if not path.exists():
        raise CheckpointError(
            f"{folder.parent} holds no finished model; finish its run (fedquilt train --resume "
            f"{folder.parent}) or give the directory of another"
        )
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read ({problem})") from problem
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a bundle of fedquilt")
    return Bundle(read_tensors(folder / "params.safetensors", about["sha256"]), about)
