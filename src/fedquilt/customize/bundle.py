"""The bundle: a finished model on disk, from which a model of any size is cut at once.

All tensors are in one file that is mapped into memory, with a digest for each of them: a model that
needs one base of eight reads and checks an eighth of the file. The structure is there too, so the
model need not be traced again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedquilt.customize.info import RunInfo
from fedquilt.errors import CheckpointError, CorruptFileError
from fedquilt.files import (
    hash_file,
    hash_tensor,
    read_document,
    write_document,
    write_tensors,
    write_text,
)
from fedquilt.structure.serialization import from_json, to_json
from fedquilt.structure.structure import Structure

FORMAT, VERSION = "fedquilt-bundle", 4
PARAMS_FILE, STRUCTURE_FILE = "params.safetensors", "structure.json"
INFO_FILE = "bundle.json"  # written last: a bundle that has it is whole


class StoredTensors(Mapping[str, Tensor]):
    """Tensors in a file, each read when it is asked for, and then compared with its digest.

    They lie in memory that is mapped from the file, and are not to be changed.
    """

    def __init__(self, path: Path, digests: Mapping[str, str]) -> None:
        self._path, self._digests = path, digests
        self._unchecked = dict(digests)
        try:
            self._file: Any = safe_open(path, framework="pt")
        except OSError as problem:
            raise CorruptFileError(f"{path} cannot be read ({problem})") from problem
        except SafetensorError as problem:
            raise self._make_damage_error("its header is") from problem
        self._names = frozenset(self._file.keys())  # type: ignore[no-untyped-call]
        if self._names != self._unchecked.keys():
            raise self._make_damage_error("the tensors in it are")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        if name in self._unchecked:
            if hash_tensor(tensor) != self._unchecked[name]:
                raise self._make_damage_error(f"'{name}' is")
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

    def _make_damage_error(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self._path} is damaged: {what} not what was written")


@dataclass(frozen=True, eq=False)
class Bundle:
    """The global tensors of a finished model, the structure of the user's model, and its run."""

    params: StoredTensors
    structure: Structure
    info: RunInfo


def save_bundle(
    folder: str | Path, params: Mapping[str, Tensor], structure: Structure, info: RunInfo
) -> None:
    """Writes a bundle; the info last, so that a bundle which can be read is whole.

    The file of the tensors is replaced, not written over: other processes may have it mapped.
    """
    folder = Path(folder)
    part = folder / f".{PARAMS_FILE}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(part, params)
        part.replace(folder / PARAMS_FILE)
        write_text(folder / STRUCTURE_FILE, json.dumps(to_json(structure)))
        document = {
            **info.to_json(),
            "format": FORMAT,
            "version": VERSION,
            "sha256": {name: hash_tensor(tensor) for name, tensor in params.items()},
            "structure": hash_file(folder / STRUCTURE_FILE),
        }
        write_document(folder / INFO_FILE, document)
    except OSError as problem:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"the model could not be written to {folder} ({problem})"
        ) from problem


def has_bundle(folder: str | Path) -> bool:
    """Whether there is a finished model in a folder."""
    return (Path(folder) / INFO_FILE).exists()


def load_bundle(folder: str | Path) -> Bundle:
    """Opens a bundle, and refuses one that is damaged or of another version."""
    folder = Path(folder)
    path = folder / INFO_FILE
    if not folder.parent.exists():
        raise CheckpointError(f"{folder.parent} does not exist; give the directory of a run")
    if not path.exists():
        raise CheckpointError(
            f"{folder.parent} holds no finished model; finish its run first (resume=True), or give "
            "the directory of another"
        )
    document = read_document(path)
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a bundle of fedquilt")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {document.get('version')}, this fedquilt reads version {VERSION}"
        )
    try:
        info = RunInfo.from_json(document)
        digests = TypeAdapter(dict[str, str]).validate_python(document["sha256"])
        structure = _read_structure(folder / STRUCTURE_FILE, document["structure"])
    except KeyError as problem:
        raise CorruptFileError(f"{path} is damaged: {problem}: field required") from problem
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CorruptFileError(f"{path} is damaged: '{place}': {first['msg'].lower()}") from problem
    return Bundle(StoredTensors(folder / PARAMS_FILE, digests), structure, info)


def _read_structure(path: Path, digest: str) -> Structure:
    try:
        if hash_file(path) != digest:
            raise CorruptFileError(f"{path} is damaged: its contents are not what was written")
        return from_json(json.loads(path.read_text()))
    except OSError as problem:
        raise CorruptFileError(f"{path} cannot be read ({problem})") from problem
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as problem:
        raise CorruptFileError(f"{path} is damaged: it describes no structure") from problem
