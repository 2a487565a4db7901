"""Stores what a benchmark measured: a JSON file from which docs/results/speed.md is written."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedquilt.comparison.code_version import read_commit
from fedquilt.comparison.render import Section, to_markdown
from fedquilt.runs.environment import read_environment

FOLDER = Path(__file__).resolve().parent.parent / "docs/results/values/benchmarks"


@dataclass(frozen=True)
class Table:
    """A table of a benchmark.

    Args:
        title: What it shows.
        header: The titles of its columns.
        cells: Its rows.
        notes: What it was measured on, and targets, a sentence each.
    """

    title: str
    header: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Record:
    """What a benchmark measured, and how."""

    name: str
    command: str
    commit: str
    load: float
    tables: Sequence[Table]
    environment: Mapping[str, str] = field(default_factory=read_environment)


class Recorder:
    """Prints the tables of a benchmark that is about to start, and stores them with ``--save``.

    Args:
        name: The name of the file.
        is_saved: Whether they are stored.
    """

    def __init__(self, name: str, is_saved: bool) -> None:
        self._name, self._is_saved = name, is_saved
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0

    def finish(self, *tables: Table) -> None:
        """Prints the tables, and stores them."""
        for table in tables:
            print(to_markdown([Section(table.title, table.header, tuple(table.cells))]))
            print(*table.notes, sep="\n", end="\n\n")
        if self._is_saved:
            self.store(tables)

    def store(self, tables: Sequence[Table], folder: Path = FOLDER) -> Path:
        """Writes a file with the command, the commit, and how busy the machine was before."""
        given = [word for word in sys.argv[1:] if word != "--save"]
        words = [f"benchmarks/{Path(sys.argv[0]).name}", *map(shorten_path, given)]
        record = Record(
            self._name,
            f"python {shlex.join(words)}",
            read_commit() or "unknown",
            round(self._load, 1),
            tables,
        )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._name}.json"
        path.write_text(json.dumps(asdict(record), indent=1) + "\n")
        return path


def shorten_path(word: str) -> str:
    """A path of this machine as the name of what it is.

    >>> shorten_path("/home/me/peers"), shorten_path("--rounds")
    ('PEERS', '--rounds')
    """
    return Path(word).name.upper() if os.sep in word else word
