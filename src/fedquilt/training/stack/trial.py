"""A short trial: whether nets of one shape train quicker in one pass, and how many at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fedquilt.devices import is_accelerator
from fedquilt.federation.client import ClientResult, Task, Update
from fedquilt.federation.threads import single_thread
from fedquilt.learning.batch import Batch
from fedquilt.structure.tensors import (
    find_tensors,
)
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.stack.nets import NetStack

MIN_SPEED_UP = 1.15  # times quicker than one by one, so that noise does not decide
NEARLY = 1.05  # a smaller number that takes at most this many times as long is preferred
COUNTS = (4, 8, 16)  # nets in one pass that are tried
WARM_UP, TRIES = 2, 8  # steps that are not timed, and that are


@dataclass(frozen=True)
class Trial:
    """What a trial found.

    Args:
        count: How many nets train in one pass; 1: one by one.
        seconds: Of a step of one net, by the number of nets in one pass.
    """

    count: int
    seconds: dict[int, float]


def try_counts(
    step: Callable[[Batch, torch.Generator], object],
    make_stack: Callable[[int], NetStack],
    batch: Batch,
    loss: ClientLoss,
    *,
    counts: Sequence[int] = COUNTS,
) -> Trial:
    """Times a step of training, one by one and in one pass, on one thread as clients train.

    On the CPU the thread's own time counts, whatever else the machine does.

    Args:
        step: Trains one net.
        make_stack: Makes a stack of as many nets.
        batch: What is learned from.
        loss: What is minimized.
        counts: The numbers of nets that are tried.
    """
    generator = torch.Generator()
    is_on_host = not is_accelerator(find_tensors(tuple(batch))[0].device)
    clock = time.thread_time if is_on_host else time.perf_counter
    with single_thread(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        seconds = {1: _time(partial(step, batch, generator), clock)}
        for count in counts:
            stack, batches = make_stack(count), [batch] * count
            together = partial(
                stack.step, range(count), batches, [loss] * count, [generator] * count
            )
            seconds[count] = _time(together, clock) / count
    best = min((seconds[count] for count in counts), default=math.inf)
    if seconds[1] < MIN_SPEED_UP * best:
        return Trial(1, seconds)
    return Trial(min(c for c in counts if seconds[c] <= NEARLY * best), seconds)


def _time(step: Callable[[], object], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(WARM_UP + TRIES):
        started = clock()
        step()
        times.append(clock() - started)
    return min(times[WARM_UP:])


@dataclass(frozen=True)
class TryStacking:
    """The recipe of a trial: times a client's work, alone and with others in one pass.

    The metrics of its update are seconds of a step, by the number of clients in one pass.

    Args:
        recipe: The work.
        counts: The numbers of clients that are tried.
    """

    recipe: Any
    counts: tuple[int, ...]

    def run(self, task: Task, context: Any) -> ClientResult:
        """Times a few steps; nothing is trained."""
        found = self.recipe.try_stacking(replace(task, recipe=self.recipe), context, self.counts)
        metrics = {str(count): seconds for count, seconds in found.seconds.items()}
        return ClientResult(Update(task.client, (), (), float(found.count), metrics))
