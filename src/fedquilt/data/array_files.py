"""Data sets in .npz files: one file, or one file per domain."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedquilt.data.arrays import (
    GROUPINGS,
    REQUIRED,
    Array,
    Arrays,
    check_arrays,
    describe_kind,
    make_dataset,
)
from fedquilt.data.dataset import Dataset
from fedquilt.data.limits import check_headers
from fedquilt.errors import DataError

CLIENTS = ("client", "id")  # names of the array with the client of each example, without a test set


def read_npz(path: Path) -> Arrays:
    """Reads the arrays with known names from a file."""
    pairs = (f"{kind}_{part}" for kind in GROUPINGS for part in ("train", "test"))
    known = (*REQUIRED, *pairs, *CLIENTS)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(".npy")]
            present = {name.removesuffix(".npy") for name in members}
            check_headers(path, archive, [name for name in known if name in present])
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in known if name in present}
    except DataError:
        raise
    except Exception as error:  # a foreign file can fail anywhere in a reader
        raise DataError(_describe_unreadable(path, error)) from error
    arrays = _add_empty_test(arrays)
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise DataError(
            f"an .npz file must hold {', '.join(REQUIRED)}; '{path}' lacks {', '.join(missing)} "
            f"(it has: {', '.join(sorted(present)) or 'nothing'}): save it again with those names"
        )
    return arrays


def _add_empty_test(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Adds an empty test set to arrays that have none and name the client of each example."""
    arrays = dict(arrays)
    own = [arrays.pop(name) for name in CLIENTS if name in arrays]
    if len(own) == 1 and arrays.keys() == {"x_train", "y_train"}:
        empty = {f"{key}_test": arrays[f"{key}_train"][:0] for key in "xy"}
        arrays |= {**empty, "id_train": own[0], "id_test": own[0][:0]}
    return arrays


def _describe_unreadable(path: Path, error: Exception) -> str:
    if "allow_pickle" in str(error):
        return (
            f"'{path}' holds Python objects, which are never unpickled; "
            "save plain arrays of numbers instead"
        )
    return (
        f"'{path}' is not a readable .npz file ({type(error).__name__}); "
        "write it again with numpy.savez"
    )


def write_npz(path: Path, arrays: Arrays) -> None:
    """Writes the file atomically: whole or not at all, also with two processes at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    unfinished = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            x_train, y_train, x_test, y_test = (arrays[name] for name in REQUIRED)
            np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_domains(name: str, files: Sequence[Path], *, equally: bool = False) -> Dataset:
    """Reads one domain per file; ``equally`` cuts all domains to the size of the smallest."""
    domains = [read_npz(file) for file in files]
    for file, arrays in zip(files, domains, strict=True):
        check_arrays(str(file), arrays)
        given, first = (describe_kind(a["x_train"]) for a in (arrays, domains[0]))
        if given != first:
            raise DataError(
                f"all domains must have inputs of one shape and type, '{file.name}' has {given} "
                f"and '{files[0].name}' has {first}; convert them, or keep one set per folder"
            )
    if equally:
        domains = _cut_to_smallest(domains)
    joined = {key: np.concatenate([arrays[key] for arrays in domains]) for key in REQUIRED}
    for part in ("train", "test"):
        sizes = [len(arrays[f"y_{part}"]) for arrays in domains]
        joined[f"domain_{part}"] = np.repeat(np.arange(len(files)), sizes)
    return replace(make_dataset(name, joined), group_names=tuple(file.stem for file in files))


def _cut_to_smallest(domains: Sequence[Arrays]) -> list[Arrays]:
    """Keeps the first examples of every domain, as many as the smallest has."""
    sizes = {key: min(len(arrays[key]) for arrays in domains) for key in REQUIRED}
    return [{key: arrays[key][:size] for key, size in sizes.items()} for arrays in domains]
