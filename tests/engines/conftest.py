"""A model of one small matrix, and temporary folders that can be watched."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedquilt.engines import local
from fedquilt.engines.local import LocalEngine
from fedquilt.structure.create import declare_structure
from fedquilt.structure.structure import Structure


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where temporary files and shared memory are, in this test alone."""
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    disk.mkdir()
    memory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(local, "SHARED_MEMORY", memory)
    return disk, memory


@pytest.fixture
def structure() -> Structure:
    return declare_structure(nn.Linear(3, 4), {"weight": ("h", None), "bias": ("h",)})


@pytest.fixture
def engine(places: tuple[Path, Path], structure: Structure) -> Iterator[Callable[..., LocalEngine]]:
    """Makes engines; afterwards no process may be left."""
    made: list[LocalEngine] = []

    def make(workers: int, folder: Path | None = None, **more: Any) -> LocalEngine:
        torch.manual_seed(0)
        found = LocalEngine(nn.Linear(3, 4), structure, {}, workers=workers, folder=folder, **more)
        made.append(found)
        return found

    yield make
    for one in made:
        one.close()
    assert not multiprocessing.active_children()
