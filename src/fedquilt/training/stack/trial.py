"""A short trial: whether nets of one shape train quicker in one pass, and how many at a time."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.devices import is_accelerator
from fedquilt.federation.client import ClientResult, Task, Update
from fedquilt.federation.threads import single_thread
from fedquilt.learning.batch import Batch
from fedquilt.learning.losses import CROSS_ENTROPY, Loss, OutputLoss
from fedquilt.structure.layout import use_channels_last
from fedquilt.structure.tensors import (
    Example,
    find_tensors,
    map_tensors,
    named_tensors,
    to_arguments,
)
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.optimizer_settings import SGDSettings
from fedquilt.training.stack.layers import UnstackableError
from fedquilt.training.stack.nets import PLAIN, NetStack
from fedquilt.training.stack.program import find_program
from fedquilt.training.trainer import make_trainer

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
    is_shared: bool = False,
) -> Trial:
    """Times a step of training, one by one and in one pass, on one thread as clients train.

    On the CPU the thread's own time counts, whatever else the machine does.

    Args:
        step: Trains one net.
        make_stack: Makes a stack of as many nets.
        batch: What is learned from.
        loss: What is minimized.
        counts: The numbers of nets that are tried.
        is_shared: Whether all nets learn from the same batch.
    """
    generator = torch.Generator()
    is_on_host = not is_accelerator(find_tensors(tuple(batch))[0].device)
    clock = time.thread_time if is_on_host else time.perf_counter
    with single_thread(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        seconds = {1: _time(partial(step, batch, generator), clock)}
        for count in counts:
            stack, batches = make_stack(count), [batch] * (1 if is_shared else count)
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


def should_stack(
    model: nn.Module,
    example: Example,
    count: int,
    batch_size: int,
    loss: Loss = CROSS_ENTROPY,
    *,
    channels_last: bool = False,
) -> bool:
    """Whether nets of this shape train clearly quicker in one pass than one after another.

    They learn from the same batches, like the bases of one client. A short trial on inputs like the
    example.
    """
    if loss.needs_batch:
        return False
    net = copy.deepcopy(model).train()
    if channels_last:
        use_channels_last(net)
    inputs = map_tensors(
        lambda x: torch.cat([x] * batch_size)[:batch_size] if x.ndim else x, to_arguments(example)
    )
    with torch.random.fork_rng(devices=[]):
        try:
            program = find_program(net, lambda: inputs)
        except UnstackableError:
            return False
        if program.draws:  # in another order than one after another
            return False
        trial: Loss = OutputLoss(_square_outputs)  # no target is needed to know how long it takes
        targets = None
        if loss.has_classes:
            trial, targets = loss, torch.zeros(net(*inputs).shape[:-1], dtype=torch.int64)
    settings, tensors = SGDSettings(lr=0.0, momentum=0.9, weight_decay=5e-4), named_tensors(net)
    alone = make_trainer([net], settings, PLAIN, ClientLoss(trial))

    def make_stack(count: int) -> NetStack:
        stack = NetStack(program, tensors, count)
        for number in range(count):
            stack.load(number, tensors, settings)
        return stack

    batch, client_loss = Batch(inputs, targets), ClientLoss(trial)
    found = try_counts(alone.step, make_stack, batch, client_loss, counts=(count,), is_shared=True)
    return found.count > 1


def _square_outputs(output: Any, targets: None) -> Tensor:
    return torch.stack([tensor.square().mean() for tensor in find_tensors(output)]).sum()


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
