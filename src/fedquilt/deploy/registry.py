"""Who takes part in a run on Flower: each client as it registered, and the node that it is.

A run is identified by its settings and by what its clients registered with, not by who is there: it
can be resumed with some of its nodes. The registry is a file in the run's directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedquilt.deploy.hello import Hello
from fedquilt.engines.flower.letters import SETTINGS
from fedquilt.errors import CheckpointError, TrainingError
from fedquilt.files import write_text
from fedquilt.runs.run import CLIENTS_FILE


@dataclass(frozen=True)
class Registered:
    """What a client said about itself, and the key of the node that said so."""

    hello: Hello
    key: str


def write_registry(folder: Path, registered: Mapping[int, Registered]) -> None:
    """Writes who takes part into the run's directory."""
    people = [
        {"key": one.key, **one.hello.content().config_records[SETTINGS]}
        for _, one in sorted(registered.items())
    ]
    write_text(folder / CLIENTS_FILE, json.dumps(people, indent=1, sort_keys=True))


def read_registry(folder: Path) -> dict[int, Registered]:
    """Who takes part in the run of a directory; nobody, if it does not say so."""
    path = folder / CLIENTS_FILE
    if not path.exists():
        return {}
    try:
        found = [_read(dict(words)) for words in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, KeyError, TrainingError) as problem:
        raise CheckpointError(
            f"{path} cannot be read ({problem}); restore it, or start the run anew"
        ) from problem
    return {one.hello.client.id: one for one in found}


def _read(words: dict[str, Any]) -> Registered:
    key = str(words.pop("key"))
    return Registered(Hello.read(RecordDict({SETTINGS: ConfigRecord(words)})), key)
