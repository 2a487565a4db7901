"""Measures what a device can afford: the time and the memory of training at several widths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedquilt.data import ClientData
from fedquilt.devices import (
    CPU,
    fork_generators,
    get_free_memory,
    is_accelerator,
    on_device,
    synchronize,
)
from fedquilt.federation.state import Setup
from fedquilt.federation.threads import single_thread
from fedquilt.learning.batch import as_batch, bind_batch
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.cut import build_module
from fedquilt.structure.tensors import copy_to_device
from fedquilt.training.device_data import ResidentData, get_device
from fedquilt.training.optimizers import count_state_tensors, make_optimizer
from fedquilt.training.settings import LocalTraining

WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)
NUM_STEPS = 3  # timed steps, after one warm-up step
MARGIN = 1.5  # for other work on the device, and for the work beside the steps


@dataclass(frozen=True)
class Measurement:
    """The cost of one width on this device: seconds per round, and peak memory in bytes."""

    width: float
    seconds: float
    memory: int


def find_affordable_width(
    setup: Setup,
    data: ClientData,
    local_training: LocalTraining,
    deadline: float | None,
    widths: Sequence[float] = WIDTHS,
    *,
    device: torch.device = CPU,
) -> tuple[Budget, list[Measurement]]:
    """Finds the largest width whose round meets the deadline and fits into memory.

    Without a deadline, memory alone decides. If no width is affordable, the smallest one is
    returned: the server notices who is late.

    Returns:
        The budget, and the measurements of all widths that were tried.
    """
    measurements: list[Measurement] = []
    free_memory = get_free_memory(device)
    if is_accelerator(device):
        data = ResidentData(device).wrap(data, "all")
    for width in sorted(widths, reverse=True):
        last = measure_width(setup, data, local_training, width, free_memory)
        measurements.append(last)
        if last.memory <= free_memory and (deadline is None or MARGIN * last.seconds <= deadline):
            break
    return Budget(measurements[-1].width), measurements


def measure_width(
    setup: Setup, data: ClientData, local_training: LocalTraining, width: float, free_memory: float
) -> Measurement:
    """Measures one width; a width that does not fit into memory is not trained."""
    subnet = setup.structure.subnet(width)
    optimizer = local_training.optimizer_at(local_training.lr, len(data))
    memory = compute_cost(
        setup.model,
        setup.structure,
        subnet,
        setup.example,
        batch_size=local_training.batch_size,
        optimizer_tensors=count_state_tensors(optimizer),
    ).memory
    if memory > free_memory:
        return Measurement(width, float("inf"), memory)
    module = build_module(setup.model, setup.structure, subnet).train()
    module = copy_to_device(module, get_device(data))
    num_steps = local_training.epochs * -(-len(data) // local_training.batch_size)
    return Measurement(width, num_steps * _time_step(setup, module, data, local_training), memory)


def _time_step(
    setup: Setup, module: nn.Module, data: ClientData, local_training: LocalTraining
) -> float:
    rows = torch.arange(min(local_training.batch_size, len(data)))
    settings = local_training.optimizer_at(local_training.lr, len(data))
    optimizer_step = make_optimizer(module.parameters(), settings)
    times = []
    device = get_device(data)
    with single_thread(), fork_generators(device), on_device(device):
        for _ in range(1 + NUM_STEPS):
            start = time.perf_counter()
            batch = bind_batch(setup.model, as_batch(data.batch(rows)))
            optimizer_step.step(setup.task.loss.of_batch(module, batch))
            synchronize(device)
            times.append(time.perf_counter() - start)
    return min(times[1:])
