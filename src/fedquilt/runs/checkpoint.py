"""Checkpoints: the state of a run on disk, there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedquilt.errors import CheckpointError
from fedquilt.federation.state import State
from fedquilt.runs.origin import Origin
from fedquilt.structure.subnet import Subnet

FORMAT, VERSION = "fedquilt-checkpoint", 1
KEYS = ("fingerprint", "kept", "memory", "phase", "round", "sha256")
KEPT = 2  # checkpoints that stay


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A state, and the versions of what clients keep that belong to it.

    ``origins`` are where it was computed, one after another.
    """

    state: State
    kept: Mapping[int, int]
    origins: tuple[Origin, ...] = ()


def save(folder: Path, checkpoint: Checkpoint, fingerprint: str) -> Path:
    """Writes a checkpoint beside the earlier ones; a failure leaves those as they were."""
    state = checkpoint.state
    final = folder / f"round-{state.round:06d}"
    part = folder / f".{final.name}.part"
    try:
        tidy(folder)
        part.mkdir(parents=True)
        digest = write_tensors(part / "params.safetensors", state.params)
        about = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint,
            "round": state.round,
            "phase": state.phase,
            "memory": state.memory,
            "kept": {str(c): v for c, v in checkpoint.kept.items()},
            "chosen": {str(c): s.encode().decode() for c, s in state.chosen.items()},
            "origins": checkpoint.origins,
            "sha256": digest,
        }
        if state.server:
            about["server"] = write_tensors(part / "server.safetensors", state.server)
        write_text(part / "state.json", json.dumps(about, indent=1, sort_keys=True))
        _remove(final)
        part.rename(final)
        sync(folder)
    except OSError as problem:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of round {state.round} could not be written to {folder} ({problem}); "
            f"{_what_is_left(folder)}; make room and resume"
        ) from problem
    for old in saved(folder)[:-KEPT]:
        _remove(old)
    return final


def tidy(folder: Path) -> None:
    """Removes what a run left that was killed while it wrote or removed a checkpoint."""
    for left in folder.glob(".round-*"):
        shutil.rmtree(left, ignore_errors=True)


def _remove(path: Path) -> None:
    """Removes a checkpoint, so that at no moment a part of one looks like a whole one."""
    if path.exists():
        gone = path.with_name(f".{path.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _what_is_left(folder: Path) -> str:
    left = saved(folder)
    return f"the last good one is {left[-1].name}" if left else "there is no earlier one"


def saved(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("round-*"))


def load(path: Path, fingerprint: str | None = None) -> Checkpoint:
    """Reads a checkpoint, and refuses one that is damaged or of another run."""
    about = _read_about(path)
    if fingerprint is not None and about["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path} belongs to another run (its model, method, clients or seed differ); "
            "resume with the settings it was started with, or choose another --out"
        )
    params = read_tensors(path / "params.safetensors", about["sha256"])
    digest = about.get("server")  # few methods keep tensors on the server
    server = {} if digest is None else read_tensors(path / "server.safetensors", digest)
    chosen = {int(c): Subnet.decode(s.encode()) for c, s in about.get("chosen", {}).items()}
    state = State(about["round"], about["phase"], params, about["memory"], server, chosen)
    kept = {int(c): v for c, v in about["kept"].items()}
    return Checkpoint(state, kept, tuple(about.get("origins", ())))  # older ones have none


def kept_of(path: Path) -> dict[int, int]:
    """The versions of what clients keep that belong to a checkpoint."""
    return {int(c): v for c, v in _read_about(path)["kept"].items()}


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as problem:
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read ({problem})"
        ) from problem
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of fedquilt")
    if about.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {about.get('version')}, this fedquilt reads version {VERSION}"
        )
    missing = [key for key in KEYS if key not in about]
    if missing:
        raise CheckpointError(f"{path} is damaged: its state.json has no '{missing[0]}'")
    return about


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes tensors to disk for good; their hash. Raises an OSError if there is no room."""
    try:
        save_file({n: t.detach().contiguous() for n, t in tensors.items()}, path)
    except SafetensorError as problem:  # its way to say that the system refused
        raise OSError(str(problem)) from problem
    sync(path)
    return file_hash(path)


def read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    """Reads tensors, and refuses a file that is not the one that was written."""
    try:
        if file_hash(path) != digest:
            raise CheckpointError(f"{path} is damaged: its contents are not what was written")
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read ({problem})") from problem
    return tensors


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else (hashlib.sha256(file.read()).hexdigest())
        )


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


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
