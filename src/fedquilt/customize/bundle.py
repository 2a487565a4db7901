"""The bundle: a finished model on disk, from which a model of any size is cut at once.

All tensors are in one file that is mapped into memory, with a digest for each of them: a model that
needs one base of eight reads and checks an eighth of the file. The structure is there too, so the
model need not be traced again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedquilt.errors import CheckpointError, DamageError
from fedquilt.files import (
    file_hash,
    read_document,
    tensor_hash,
    write_document,
    write_tensors,
    write_text,
)
from fedquilt.structure.groups import Structure
from fedquilt.structure.values import as_values, from_values

# version 1 has one digest for all tensors and no structure, version 2 none of bundle.json itself
FORMAT, VERSION = "fedquilt-bundle", 3
MOST_NUMBERS = 2**28  # of an example


class StoredTensors(Mapping[str, Tensor]):
    """Tensors in a file, each read when it is asked for, and then compared with its digest.

    They lie in memory that is mapped from the file, and are not to be changed.
    """

    def __init__(self, path: Path, digests: Mapping[str, str] | str) -> None:
        self._path, self._digests = path, digests
        self._unchecked = {} if isinstance(digests, str) else dict(digests)
        try:
            if isinstance(digests, str) and file_hash(path) != digests:
                raise self._damaged("its contents are")
            self._file: Any = safe_open(path, framework="pt")
        except OSError as problem:
            raise DamageError(f"{path} cannot be read ({problem})") from problem
        except SafetensorError as problem:
            raise self._damaged("its header is") from problem
        self._names = frozenset(self._file.keys())  # type: ignore[no-untyped-call]
        if self._unchecked and self._names != self._unchecked.keys():
            raise self._damaged("the tensors in it are")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        if name in self._unchecked:
            if tensor_hash(tensor) != self._unchecked[name]:
                raise self._damaged(f"'{name}' is")
            del self._unchecked[name]
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> Any:
        return StoredTensors, (self._path, self._digests)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read for it."""
        return tuple(self._file.get_slice(name).get_shape())

    def _damaged(self, what: str) -> DamageError:
        return DamageError(f"{self._path} is damaged: {what} not what was written")


def _dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return name


def _shape(sizes: list[int]) -> list[int]:
    if math.prod(sizes) > MOST_NUMBERS:
        raise ValueError(f"an example has at most {MOST_NUMBERS} numbers")
    return sizes


class _Input(BaseModel):
    shape: Annotated[list[NonNegativeInt], AfterValidator(_shape)]
    dtype: Annotated[str, AfterValidator(_dtype)]


class _Scale(BaseModel):
    mean: list[float]
    std: list[float]


class _About(BaseModel):
    """What ``bundle.json`` must hold, so that others may count on it."""

    seed: int
    rounds: PositiveInt
    method: str
    method_settings: dict[str, str] = {}
    exceeds_budgets: str | None = None
    sizes: Annotated[list[PositiveFloat], Field(min_length=1)]
    example: Annotated[list[_Input], Field(min_length=1)]
    sha256: dict[str, str] | str
    structure: str | None = None
    kept: dict[int, NonNegativeInt] = {}
    chosen: dict[int, str] = {}
    origins: list[dict[str, str]] = []
    config: dict[str, Any] = {}
    scale: _Scale | None = None


@dataclass(frozen=True, eq=False)
class Bundle:
    """Global tensors, and what is needed to cut them: as plain values."""

    params: StoredTensors
    structure: Structure | None  # of the model that was given; None: an old bundle
    about: Mapping[str, Any]


def save(
    folder: Path, params: Mapping[str, Tensor], structure: Structure, about: Mapping[str, Any]
) -> None:
    """Writes a bundle; the description last, so that one which can be read is whole.

    The file of the tensors is replaced, not written over: others may have it mapped.
    """
    part = folder / ".params.safetensors.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(part, params)
        part.replace(folder / "params.safetensors")
        write_text(folder / "structure.json", json.dumps(as_values(structure)))
        written = {
            **about,
            "format": FORMAT,
            "version": VERSION,
            "sha256": {name: tensor_hash(tensor) for name, tensor in params.items()},
            "structure": file_hash(folder / "structure.json"),
        }
        write_document(folder / "bundle.json", written)
    except OSError as problem:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"the model could not be written to {folder} ({problem})"
        ) from problem


def load(folder: Path) -> Bundle:
    """Opens a bundle, and refuses one that is damaged or foreign."""
    path = folder / "bundle.json"
    if not folder.parent.exists():
        raise CheckpointError(f"{folder.parent} does not exist; give the directory of a run")
    if not path.exists():
        raise CheckpointError(
            f"{folder.parent} holds no finished model; finish its run (fedquilt train --resume "
            f"{folder.parent}) or give the directory of another"
        )
    about = read_document(path, sealed_since=3)
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a bundle of fedquilt")
    version = about.get("version")
    if version not in (1, 2, VERSION):
        raise CheckpointError(
            f"{path} has version {version}, this fedquilt reads version {VERSION}"
        )
    try:
        _About.model_validate(about)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DamageError(f"{path} is damaged: '{place}': {first['msg'].lower()}") from problem
    params = StoredTensors(folder / "params.safetensors", about["sha256"])
    structure = _structure(folder / "structure.json", about["structure"]) if version > 1 else None
    return Bundle(params, structure, about)


def _structure(path: Path, digest: str) -> Structure:
    try:
        if file_hash(path) != digest:
            raise DamageError(f"{path} is damaged: its contents are not what was written")
        return from_values(json.loads(path.read_text()))
    except OSError as problem:
        raise DamageError(f"{path} cannot be read ({problem})") from problem
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as problem:
        raise DamageError(f"{path} is damaged: it describes no structure") from problem
