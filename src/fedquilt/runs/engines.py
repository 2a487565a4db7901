"""How a run gets its engine: once the model is prepared and the directory is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fedquilt.data.population import Population
from fedquilt.engines.engine import Engine
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.worker import Timeouts
from fedquilt.federation.state import Setup
from fedquilt.ranges import Number, check_value

EngineFactory = Callable[[Setup, Population, Path | None], Engine]  # the path is for client states


def make_local_engine(workers: int | None, timeouts: Timeouts | None = None) -> EngineFactory:
    """A factory of engines on this machine; ``workers`` None means one per core, 0 this process."""
    check_value("workers", workers, Number | None)
    count = _count_cores() if workers is None else workers

    def make(setup: Setup, population: Population, folder: Path | None) -> LocalEngine:
        return LocalEngine(
            setup.model,
            setup.structure,
            population.data,
            workers=count,
            folder=folder,
            timeouts=timeouts,
        )

    return make


def _count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
