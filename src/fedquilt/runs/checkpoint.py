"""Checkpoints: the state of a run on disk, there whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedquilt.errors import CheckpointError, CorruptFileError
from fedquilt.federation.chosen import ChosenSubnets, encode_chosen
from fedquilt.federation.state import State
from fedquilt.files import fsync, read_document, read_tensors, write_document, write_tensors
from fedquilt.runs.directory import FORMAT_VERSION
from fedquilt.runs.environment import Environment
from fedquilt.runs.records import Mark
from fedquilt.runs.selection import BestRound, SelectionProgress

FORMAT = "fedquilt-checkpoint"
PARAMS_FILE, SERVER_FILE = "params.safetensors", "server.safetensors"
STATE_FILE = "state.json"
BEST = "best-"  # before the names of files of the best model so far
MAX_KEPT = 2  # older checkpoints are removed


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A state, and the versions of what clients keep that belong to it.

    ``environments`` are where it was computed, one after another. ``records`` marks how far the
    run's records belong to it. ``selection`` is what is known of the best model so far.
    """

    state: State
    client_versions: Mapping[int, int]
    environments: tuple[Environment, ...] = ()
    records: Mark | None = None
    selection: SelectionProgress = field(default_factory=SelectionProgress)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, fingerprint: str) -> Path:
    """Writes a checkpoint beside the earlier ones; a failure leaves those as they were."""
    state = checkpoint.state
    final = folder / f"round-{state.round:06d}"
    part = folder / f".{final.name}.part"
    try:
        remove_leftovers(folder)
        part.mkdir(parents=True)
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "environments": checkpoint.environments,
            "records": checkpoint.records,
            **_write_state(part, state, checkpoint.client_versions),
        }
        if checkpoint.selection.round:
            document["selection"] = _write_selection(part, checkpoint)
        write_document(part / STATE_FILE, document)
        remove_checkpoint(final)
        part.rename(final)
        fsync(folder)
    except OSError as problem:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of round {state.round} could not be written to {folder} ({problem}); "
            f"{_list_leftovers(folder)}; make room and resume"
        ) from problem
    for old in list_checkpoints(folder)[:-MAX_KEPT]:
        remove_checkpoint(old)
    return final


def _write_state(
    folder: Path, state: State, client_versions: Mapping[int, int], prefix: str = ""
) -> dict[str, Any]:
    """Writes the tensors of a state; returns the rest of it."""
    document = {
        "round": state.round,
        "phase": state.phase,
        "method_state": state.method_state,
        "client_versions": {str(c): v for c, v in client_versions.items()},
        "chosen_subnets": encode_chosen(state.chosen_subnets),
        "sha256": write_tensors(folder / f"{prefix}{PARAMS_FILE}", state.params),
    }
    if state.server_tensors:
        document["server"] = write_tensors(folder / f"{prefix}{SERVER_FILE}", state.server_tensors)
    return document


def _read_state(folder: Path, document: Mapping[str, Any], prefix: str = "") -> State:
    params = read_tensors(folder / f"{prefix}{PARAMS_FILE}", document["sha256"])
    digest = document.get("server")  # few methods keep tensors on the server
    server = {} if digest is None else read_tensors(folder / f"{prefix}{SERVER_FILE}", digest)
    chosen = ChosenSubnets.decode(document["chosen_subnets"])
    return State(
        document["round"], document["phase"], params, document["method_state"], server, chosen
    )


def _write_selection(folder: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Writes what is known of the best model; its tensors only if it is an earlier one."""
    progress = checkpoint.selection
    document: dict[str, Any] = {"round": progress.round, "num_worse": progress.num_worse}
    if (best := progress.best) is not None:
        document["score"] = best.score
        if best.state.round != checkpoint.state.round:
            document["best"] = _write_state(folder, best.state, best.client_versions, BEST)
    return document


def _read_selection(folder: Path, document: Mapping[str, Any], state: State) -> SelectionProgress:
    selection = document.get("selection")
    if selection is None:
        return SelectionProgress()
    best = None
    if "score" in selection:
        other = selection.get("best")
        kept = state if other is None else _read_state(folder, other, BEST)
        versions = _parse_versions(document if other is None else other)
        best = BestRound(kept, versions, selection["score"])
    return SelectionProgress(best, selection["num_worse"], selection["round"])


def remove_leftovers(folder: Path) -> None:
    """Removes what a run left that was killed while it wrote or removed a checkpoint."""
    for left in folder.glob(".round-*"):
        shutil.rmtree(left, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint, so that at no moment a part of one looks like a whole one."""
    if path.exists():
        gone = path.with_name(f".{path.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _list_leftovers(folder: Path) -> str:
    left = list_checkpoints(folder)
    return f"the last good one is {left[-1].name}" if left else "there is no earlier one"


def count_saved_rounds(folder: Path) -> int:
    """The rounds of the newest checkpoint; 0 if there is none."""
    paths = list_checkpoints(folder)
    return int(paths[-1].name.removeprefix("round-")) if paths else 0


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("round-*"))


def load_checkpoint(path: Path, fingerprint: str | None = None) -> Checkpoint:
    """Reads a checkpoint, and refuses one that is damaged or of another run."""
    document = _read_document(path)
    try:
        if fingerprint is not None and document["fingerprint"] != fingerprint:
            raise CheckpointError(
                f"{path} belongs to another run (its model, method, clients or seed differ); "
                "resume with the settings it was started with, or choose another directory: "
                'out="..."'
            )
        state = _read_state(path, document)
        return Checkpoint(
            state,
            _parse_versions(document),
            tuple(document["environments"]),
            document["records"],
            _read_selection(path, document, state),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise CorruptFileError(
            f"{path} is damaged: its {STATE_FILE} is of another shape"
        ) from problem


def list_client_versions(path: Path) -> list[dict[int, int]]:
    """The versions of what clients keep that a checkpoint and its best model need.

    A damaged checkpoint needs none.
    """
    try:
        document = _read_document(path)
    except CheckpointError:
        return []
    best = document.get("selection", {}).get("best")
    return [_parse_versions(part) for part in (document, best) if part is not None]


def _parse_versions(document: Mapping[str, Any]) -> dict[int, int]:
    return {int(c): v for c, v in document["client_versions"].items()}


def _read_document(path: Path) -> dict[str, Any]:
    document = read_document(path / STATE_FILE)
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of fedquilt")
    if document.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has version {document.get('version')}, this fedquilt reads version "
            f"{FORMAT_VERSION}; finish the run with the fedquilt that it was started with"
        )
    return document
