"""The registry of a run on Flower: each client's information, and the key of its node.

A run is identified by its settings and its registered clients, whichever nodes are online. So it
can be resumed with some of its nodes. The registry is a file in the run's directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedquilt.deploy.node_info import NodeInfo
from fedquilt.engines.flower.codec import SETTINGS
from fedquilt.errors import CheckpointError, TrainingError
from fedquilt.files import write_text
from fedquilt.runs.directory import RunDirectory


@dataclass(frozen=True)
class RegistryEntry:
    """A client's information, and the key of its node."""

    info: NodeInfo
    key: str


def write_registry(folder: Path, registered: Mapping[int, RegistryEntry]) -> None:
    """Writes the registered clients into the run's directory."""
    clients = [
        {"key": entry.key, **entry.info.to_message().config_records[SETTINGS]}
        for _, entry in sorted(registered.items())
    ]
    write_text(RunDirectory(folder).registry_file, json.dumps(clients, indent=1, sort_keys=True))


def read_registry(folder: Path) -> dict[int, RegistryEntry]:
    """Reads the registered clients of a run; none if it has no registry."""
    path = RunDirectory(folder).registry_file
    if not path.exists():
        return {}
    try:
        entries = [_parse_entry(dict(fields)) for fields in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, KeyError, TrainingError) as problem:
        raise CheckpointError(
            f"{path} cannot be read ({problem}); restore it, or start a new run"
        ) from problem
    return {entry.info.client.id: entry for entry in entries}


def _parse_entry(fields: dict[str, Any]) -> RegistryEntry:
    key = str(fields.pop("key"))
    return RegistryEntry(NodeInfo.from_message(RecordDict({SETTINGS: ConfigRecord(fields)})), key)
