"""Files that are there whole or not at all, are known by their hash, and have one writer."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedquilt.errors import CheckpointError, DamageError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

SEAL = "digest"  # of everything else in a document or a file of tensors
LONGEST_WAIT = 5.0  # seconds; workers of a process that was killed hold its lock for a moment


def write_text(path: Path, text: str) -> None:
    """Writes a small file for good, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        sync(part)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON document that knows its own hash, for good, whole or not at all."""
    plain = json.loads(json.dumps(document))
    sealed = {**plain, SEAL: _document_hash(plain)}
    write_text(path, json.dumps(sealed, indent=1, sort_keys=True))


def read_document(path: Path, *, sealed_since: int) -> dict[str, Any]:
    """Reads a JSON document, and refuses one that is not what was written.

    Documents of an earlier ``version`` than that know no hash of themselves.
    """
    try:
        document = json.loads(path.read_text())
    except PermissionError as problem:
        raise CheckpointError(f"{path} cannot be read ({problem})") from problem
    except (OSError, ValueError, RecursionError) as problem:
        raise DamageError(f"{path} cannot be read ({problem})") from problem
    if not isinstance(document, dict):
        raise DamageError(f"{path} is damaged: it holds no JSON object")
    seal, version = document.pop(SEAL, None), document.get("version", 0)
    is_old = seal is None and type(version) is int and version < sealed_since
    if not is_old and seal != _document_hash(document):
        raise DamageError(f"{path} is damaged: its contents are not what was written")
    return document


def _document_hash(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes tensors to disk for good; the file's hash. Raises an OSError if there is no room."""
    _save(path, tensors, None)
    sync(path)
    return file_hash(path)


def read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    """Reads tensors, and refuses a file that is not the one that was written."""
    try:
        if file_hash(path) != digest:
            raise DamageError(f"{path} is damaged: its contents are not what was written")
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise DamageError(f"{path} cannot be read ({problem})") from problem
    return tensors


def write_sealed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors whose file knows their hash, whole or not at all; it is not synced yet."""
    part = path.with_name(f".{path.name}.part")
    try:
        _save(part, tensors, {SEAL: _tensors_hash(tensors)})
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_sealed(path: Path) -> dict[str, Tensor]:
    """Reads tensors, and refuses them if they are not what was written.

    Files of earlier versions know no hash; only their header is checked.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise DamageError(f"{path} cannot be read ({problem})") from problem
    if about and about.get(SEAL) != _tensors_hash(tensors):
        raise DamageError(f"{path} is damaged: its contents are not what was written")
    return tensors


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    try:
        save_file({n: t.detach().contiguous() for n, t in tensors.items()}, path, metadata)
    except SafetensorError as problem:  # its way to say that the system refused
        raise OSError(str(problem)) from problem


def _tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensor_hash(tensors[name])}\n".encode())
    return found.hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """The SHA-256 of a tensor: what it is, and every bit of it."""
    data = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{data.dtype} {tuple(data.shape)}".encode())
    found.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else (hashlib.sha256(file.read()).hexdigest())
        )


def remove_parts(folder: Path) -> None:
    """Removes files that a process was killed over while it wrote them."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Keeps others out of a folder; the system lets go of it when this process dies."""
    if folder is None:
        yield
        return
    with (folder / "lock").open("a") as lock:
        until = time.monotonic() + LONGEST_WAIT
        with suppress(OSError):  # a file system without locks
            while not try_to_lock(lock):
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"another run is at work in {folder}; wait for its end, or choose "
                        "another directory"
                    )
                time.sleep(0.05)
        yield


def try_to_lock(file: IO[str]) -> bool:
    """Locks an open file until it is closed; False if somebody else has locked it."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
