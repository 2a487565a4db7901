"""How a run gets its engine: once the model is prepared and the directory is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fedquilt.data.population import Population
from fedquilt.devices import find_devices, is_accelerator
from fedquilt.engines.engine import Engine
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.stacks import ClientsPerPass, PassSizes
from fedquilt.engines.worker import Timeouts
from fedquilt.errors import ConfigError
from fedquilt.federation.state import Setup
from fedquilt.ranges import Number, check_value

EngineFactory = Callable[[Setup, Population, Path | None], Engine]  # the path is for client states


def make_local_engine(
    workers: int | None,
    timeouts: Timeouts | None = None,
    device: str = "cpu",
    clients_per_pass: ClientsPerPass = 1,
) -> Callable[[Setup, Population, Path | None], LocalEngine]:
    """A factory of engines on this machine.

    Args:
        workers: The number of processes, of each device; 0: this process. None: one per core; with
            one accelerator this process, with several one for each.
        timeouts: When a worker process counts as hung or late.
        device: The devices that clients train on, as ``find_devices`` takes them.
        clients_per_pass: How many clients a process trains at once, as ``LocalEngine`` takes it.
    """
    check_value("workers", workers, Number | None)
    PassSizes(clients_per_pass)  # a wrong number is refused at once
    devices = find_devices(device)
    if workers == 0 and len(devices) > 1:
        raise ConfigError(
            f"one process works on one device, and '{device}' is {len(devices)} of them; name one, "
            "or use workers = 1 for a process on each"
        )
    count = _choose_count(devices) if workers is None else workers

    def make(setup: Setup, population: Population, folder: Path | None) -> LocalEngine:
        return LocalEngine(
            setup.model,
            setup.structure,
            population.data,
            workers=count,
            folder=folder,
            timeouts=timeouts,
            devices=devices,
            task=setup.task,
            clients_per_pass=clients_per_pass,
        )

    return make


def _choose_count(devices: Sequence[torch.device]) -> int:
    if not is_accelerator(devices[0]):
        return count_cores()
    return int(len(devices) > 1)


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
