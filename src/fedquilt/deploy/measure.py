"""What a device can afford, measured on it: the time and the memory of training candidates."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedquilt.data.examples import ClientData
from fedquilt.federation.state import Setup
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import cost
from fedquilt.structure.cut import build
from fedquilt.training.descent import Descent, Optimiser, one_thread
from fedquilt.training.losses import cross_entropy

WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)
STEPS = 3  # that are timed, after one that is not
MARGIN = 1.5  # other work on the device, and what comes beside the steps


@dataclass(frozen=True)
class Measured:
    """A candidate on this device: seconds for a round of training, and bytes at its peak."""

    width: float
    seconds: float
    memory: int


def affordable(
    setup: Setup,
    data: ClientData,
    optimiser: Optimiser,
    deadline: float | None,
    widths: Sequence[float] = WIDTHS,
) -> tuple[Budget, list[Measured]]:
    """The largest width whose round meets the deadline and fits into memory, and what was found.

    Without a deadline memory alone decides. If no width does, it is the smallest one: the server
    will see who is late.
    """
    found: list[Measured] = []
    room = free_memory()
    for width in sorted(widths, reverse=True):
        found.append(measured(setup, data, optimiser, width, room))
        last = found[-1]
        if last.memory <= room and (deadline is None or MARGIN * last.seconds <= deadline):
            break
    return Budget(found[-1].width), found


def measured(
    setup: Setup, data: ClientData, optimiser: Optimiser, width: float, room: float
) -> Measured:
    """One candidate; what does not fit into memory is not tried."""
    subnet = setup.structure.subnet(width)
    memory = cost(
        setup.model, setup.structure, subnet, setup.example, batch_size=optimiser.batch_size
    ).memory
    if memory > room:
        return Measured(width, float("inf"), memory)
    module = build(setup.model, setup.structure, subnet).train()
    num_steps = optimiser.epochs * -(-len(data) // optimiser.batch_size)
    return Measured(width, num_steps * _seconds_a_step(module, data, optimiser), memory)


def _seconds_a_step(module: nn.Module, data: ClientData, optimiser: Optimiser) -> float:
    rows = torch.arange(min(optimiser.batch_size, len(data)))
    descent = Descent(module.parameters(), optimiser, optimiser.lr)
    times = []
    with one_thread(), torch.random.fork_rng(devices=[]):
        for _ in range(1 + STEPS):
            started = time.perf_counter()
            x, y = data.batch(rows)
            descent.step(cross_entropy(module(x), y))
            times.append(time.perf_counter() - started)
    return min(times[1:])


def free_memory() -> float:
    """Bytes that this process may still take; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return float("inf")
