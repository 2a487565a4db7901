"""Files that are written atomically and verified by their hash, and locks on them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedquilt.errors import CheckpointError, CorruptFileError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

HASH_KEY = "digest"  # of everything else in a document or a file of tensors
DTYPE_NAMES = {  # of the format of safetensors
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
MAX_WAIT = 5.0  # seconds; the workers of a killed process hold its lock for a moment


def write_text(path: Path, text: str) -> None:
    """Writes a small file atomically, and waits until it is on the disk."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        fsync(part)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON document that holds its own hash, atomically."""
    plain = json.loads(json.dumps(document))
    sealed = {**plain, HASH_KEY: _hash_document(plain)}
    write_text(path, json.dumps(sealed, indent=1, sort_keys=True))


def read_document(path: Path) -> dict[str, Any]:
    """Reads a JSON document, and refuses one whose hash is not that of its contents."""
    try:
        document = json.loads(path.read_text())
    except PermissionError as problem:
        raise CheckpointError(f"{path} cannot be read ({problem})") from problem
    except (OSError, ValueError, RecursionError) as problem:
        raise CorruptFileError(f"{path} cannot be read ({problem})") from problem
    if not isinstance(document, dict):
        raise CorruptFileError(f"{path} is damaged: it holds no JSON object")
    if document.pop(HASH_KEY, None) != _hash_document(document):
        raise CorruptFileError(f"{path} is damaged: its contents are not what was written")
    return document


def _hash_document(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes tensors, waits until they are on the disk, and returns the file's hash."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _serialize(tensors):
            digest.update(part)
            file.write(part)
    fsync(path)
    return digest.hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Writes tensors in the format of safetensors, one at a time; nothing waits for the disk.

    The library would hold a copy of all of them.
    """
    with path.open("wb") as file:
        for part in _serialize(tensors, **metadata):
            file.write(part)


def _serialize(tensors: Mapping[str, Tensor], **metadata: str) -> Iterator[bytes | memoryview]:
    """The parts of a file: a header that says where the tensors are, and the bytes of each.

    Those with large items come first, so that each starts at a multiple of its items' size.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    sizes = {name: tensor.element_size() for name, tensor in tensors.items()}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _view_bytes(tensors[name])


def _view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its items."""
    data = tensor.detach().cpu().contiguous()
    view: memoryview = data.reshape(-1).view(torch.uint8).numpy().data
    return view


def read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    """Reads tensors, and refuses a file with another hash."""
    try:
        if hash_file(path) != digest:
            raise CorruptFileError(f"{path} is damaged: its contents are not what was written")
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise CorruptFileError(f"{path} cannot be read ({problem})") from problem
    return tensors


def write_sealed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors with their hash atomically; the file is not synced yet."""
    part = path.with_name(f".{path.name}.part")
    try:
        save_tensors(part, tensors, **{HASH_KEY: _hash_tensors(tensors)})
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_sealed(path: Path) -> dict[str, Tensor]:
    """Reads tensors, and refuses them if their hash is not the one in the file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise CorruptFileError(f"{path} cannot be read ({problem})") from problem
    if metadata.get(HASH_KEY) != _hash_tensors(tensors):
        raise CorruptFileError(f"{path} is damaged: its contents are not what was written")
    return tensors


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {hash_tensor(tensors[name])}\n".encode())
    return digest.hexdigest()


def hash_tensor(tensor: Tensor) -> str:
    """The SHA-256 of a tensor: its dtype, its shape and its bits."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(_view_bytes(tensor))
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else (hashlib.sha256(file.read()).hexdigest())
        )


def remove_partial_files(folder: Path) -> None:
    """Removes files that a killed process left half written."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Waits until a file or folder is on the disk; Windows opens no folders."""
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def hold_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds a lock on a file; the system releases it when this process dies.

    If another process holds it, ``on_wait`` is called, and after ``MAX_WAIT`` seconds a
    CheckpointError is raised.
    """
    with path.open("a") as file:
        with suppress(OSError):  # a file system without locks
            if not try_to_lock(file):
                on_wait()
                _wait_for_lock(file, path.parent)
        yield


def _wait_for_lock(file: IO[str], folder: Path) -> None:
    deadline = time.monotonic() + MAX_WAIT
    while not try_to_lock(file):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"another process is training in {folder}; wait until it ends, or choose another "
                "directory"
            )
        time.sleep(0.05)


def try_to_lock(file: IO[str]) -> bool:
    """Locks an open file until it is closed; False if another process has locked it."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
