"""Checkpoints: the state of a run on disk, there whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.errors import CheckpointError, DamageError
from fedquilt.federation.state import State
from fedquilt.files import read_document, read_tensors, sync, write_document, write_tensors
from fedquilt.runs.origin import Origin
from fedquilt.runs.records import Mark
from fedquilt.structure.subnet import Subnet

FORMAT, VERSION = "fedquilt-checkpoint", 2  # version 1 knows no hash of itself and of records
KEPT = 2  # checkpoints that stay


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A state, and the versions of what clients keep that belong to it.

    ``origins`` are where it was computed, one after another. ``records`` is how far the run's
    records belong to it.
    """

    state: State
    kept: Mapping[int, int]
    origins: tuple[Origin, ...] = ()
    records: Mark | None = None


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
            "records": checkpoint.records,
            "sha256": digest,
        }
        if state.server:
            about["server"] = write_tensors(part / "server.safetensors", state.server)
        write_document(part / "state.json", about)
        discard(final)
        part.rename(final)
        sync(folder)
    except OSError as problem:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of round {state.round} could not be written to {folder} ({problem}); "
            f"{_what_is_left(folder)}; make room and resume"
        ) from problem
    for old in saved(folder)[:-KEPT]:
        discard(old)
    return final


def tidy(folder: Path) -> None:
    """Removes what a run left that was killed while it wrote or removed a checkpoint."""
    for left in folder.glob(".round-*"):
        shutil.rmtree(left, ignore_errors=True)


def discard(path: Path) -> None:
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
    try:
        if fingerprint is not None and about["fingerprint"] != fingerprint:
            raise CheckpointError(
                f"{path} belongs to another run (its model, method, clients or seed differ); "
                "resume with the settings it was started with, or choose another --out"
            )
        params = read_tensors(path / "params.safetensors", about["sha256"])
        digest = about.get("server")  # few methods keep tensors on the server
        server = {} if digest is None else read_tensors(path / "server.safetensors", digest)
        chosen = {int(c): Subnet.decode(s.encode()) for c, s in about["chosen"].items()}
        state = State(about["round"], about["phase"], params, about["memory"], server, chosen)
        return Checkpoint(state, _kept(about), tuple(about["origins"]), about["records"])
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise DamageError(f"{path} is damaged: its state.json is of another shape") from problem


def load_newest(folder: Path, fingerprint: str) -> Checkpoint | None:
    """The newest checkpoint that is not damaged; None if there are none at all."""
    problem: DamageError | None = None
    for path in reversed(saved(folder)):
        try:
            return load(path, fingerprint)
        except DamageError as found:
            problem = problem or found
    if problem is not None:
        raise problem
    return None


def kept_of(path: Path) -> dict[int, int]:
    """The versions of what clients keep that belong to a checkpoint; none to a damaged one."""
    try:
        return _kept(_read_about(path))
    except CheckpointError:
        return {}


def _kept(about: Mapping[str, Any]) -> dict[int, int]:
    return {int(c): v for c, v in about["kept"].items()}


def _read_about(path: Path) -> dict[str, Any]:
    about = read_document(path / "state.json", sealed_since=2)
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of fedquilt")
    if about.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {about.get('version')}, this fedquilt reads version {VERSION}; "
            "finish the run with the fedquilt that it was started with"
        )
    return about
