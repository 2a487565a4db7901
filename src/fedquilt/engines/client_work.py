"""A client's work on a worker: runs the recipe, and passes on how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedquilt.devices import (
    is_accelerator,
    is_out_of_memory,
    on_device,
    reproducible_kernels,
)
from fedquilt.engines.client_state import is_finite_state
from fedquilt.errors import DeviceMemoryError
from fedquilt.federation.client import ClientResult, Task
from fedquilt.structure.cut import compute_shapes
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext

ReadState = Callable[[], Mapping[str, Tensor] | None]

MIN_REPORT_SECONDS = 0.25  # of work between two reports of progress
MIN_REPORT_STEP = 0.01  # of the work; so a pipe takes all reports, even unread


def run_task(
    task: Task,
    context: ClientContext,
    client_state: Mapping[str, Tensor] | None,
    on_progress: Callable[[float], None] | None = None,
) -> ClientResult:
    """Does a client's work on the device of its context; tensors come and go on the host.

    A new client state that is not finite is dropped: the client goes on from its last sound one.
    If the device has too little memory, the work is done once more without all that was kept there
    to save time, and then a DeviceMemoryError is raised.

    Args:
        task: The work.
        context: What the worker has for all of its clients.
        client_state: What the client has kept from earlier rounds, if anything.
        on_progress: Hears a few times a second which part of the work is done.
    """
    with (
        _ProgressThrottle(on_progress or (lambda done: None)) as throttle,
        on_device(context.device),
        reproducible_kernels(context.device),
    ):
        try:
            return _run_on_device(task, context, client_state, throttle)
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
        context.release_memory()  # now that the exception has let go of what it held
        try:
            return _run_on_device(task, context, client_state, throttle)
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
        raise DeviceMemoryError(  # after the handler, so that it holds nothing of the work
            f"its work does not fit into the memory of device {context.device}, even with one "
            "client at a time; use a smaller batch_size, or give it a smaller budget"
        )


def run_stack(
    tasks: Sequence[Task],
    context: ClientContext,
    read_states: Sequence[ReadState],
    on_progress: Callable[[int, float], None] | None = None,
) -> list[ClientResult | Exception]:
    """Does the work of several clients in one pass; each result, or why a client has none.

    If that fails, each client works by itself, so that only those fail that would fail alone. One
    whose state cannot be read is left out.

    Args:
        tasks: The work, with one recipe and subnets of one shape.
        context: What the worker has for all of its clients.
        read_states: Reads what each client has kept from earlier rounds, if anything.
        on_progress: Hears a few times a second which part of a client's work is done.
    """
    results: dict[int, ClientResult | Exception] = {}
    states: dict[int, Mapping[str, Tensor] | None] = {}
    for number, read in enumerate(read_states):
        try:
            states[number] = read()
        except Exception as problem:
            results[number] = problem
    readable = [tasks[number] for number in states]
    done = _run_readable(readable, context, list(states.values()), on_progress)
    results |= zip(states, done, strict=True)
    return [results[number] for number in range(len(tasks))]


def _run_readable(
    tasks: Sequence[Task],
    context: ClientContext,
    client_states: Sequence[Mapping[str, Tensor] | None],
    on_progress: Callable[[int, float], None] | None,
) -> list[ClientResult | Exception]:
    hear = on_progress or (lambda client, done: None)
    heard = [partial(hear, task.client) for task in tasks]
    if len(tasks) > 1:
        try:
            return _run_in_one_pass(tasks, context, client_states, heard)
        except Exception as problem:
            is_too_much = is_out_of_memory(problem)
        if is_too_much:
            context.release_memory()  # now that the exception has let go of what it held
    results: list[ClientResult | Exception] = []
    for task, state, report in zip(tasks, client_states, heard, strict=True):
        try:
            results.append(run_task(task, context, state, report))
        except Exception as problem:
            results.append(problem)
    return results


def _run_in_one_pass(
    tasks: Sequence[Task],
    context: ClientContext,
    client_states: Sequence[Mapping[str, Tensor] | None],
    on_progress: Sequence[Callable[[float], None]],
) -> list[ClientResult | Exception]:
    with (
        ExitStack() as stack,
        on_device(context.device),
        reproducible_kernels(context.device),
    ):
        reports = [stack.enter_context(_ProgressThrottle(report)) for report in on_progress]
        work = [
            _prepare(task, context, state, report)
            for task, state, report in zip(tasks, client_states, reports, strict=True)
        ]
        recipe: Any = tasks[0].recipe
        results = recipe.run_stacked(*map(list, zip(*work, strict=True)))
        return [r if isinstance(r, Exception) else _finish(r, context) for r in results]


def _run_on_device(
    task: Task,
    context: ClientContext,
    client_state: Mapping[str, Tensor] | None,
    on_progress: Callable[[float], None],
) -> ClientResult:
    task, client = _prepare(task, context, client_state, on_progress)
    return _finish(task.recipe.run(task, client), context)


def _prepare(
    task: Task,
    context: ClientContext,
    client_state: Mapping[str, Tensor] | None,
    on_progress: Callable[[float], None],
) -> tuple[Task, ClientContext]:
    """The task with its tensors on the device, and the client's context."""
    if is_accelerator(context.device):
        task = replace(task, params=context.to_device(task.params))
        if client_state is not None:
            client_state = {n: t.to(context.device) for n, t in client_state.items()}
    return task, context.for_client(client_state, on_progress)


def _finish(result: ClientResult, context: ClientContext) -> ClientResult:
    """The result on the host, without a state that is not finite."""
    if result.state is not None and not is_finite_state(result.state, context.model):
        result = replace(result, state=None)
    return result.to_host() if is_accelerator(context.device) else result


class _ProgressThrottle:
    """Passes on a client's reports while it works, a few times a second at most.

    Nothing is passed on about a task that is done sooner. Whoever heard of a part hears of the end.
    """

    def __init__(self, on_progress: Callable[[float], None]) -> None:
        self._on_progress, self._said, self._when = on_progress, 0.0, time.monotonic()

    def __enter__(self) -> _ProgressThrottle:
        return self

    def __call__(self, done: float) -> None:
        done = min(done, 1.0)
        if done >= self._said + MIN_REPORT_STEP:  # which NaN is not
            now = time.monotonic()
            if now >= self._when + MIN_REPORT_SECONDS:
                self._said, self._when = float(done), now
                self._on_progress(self._said)

    def __exit__(self, problem: type[BaseException] | None, *_: object) -> None:
        last, self._said = self._said, math.inf  # nothing is passed on after the end
        if problem is None and 0 < last < 1:
            self._on_progress(1.0)


def describe_work(structure: Structure, subnets: Sequence[Subnet]) -> str:
    """A kind of work: the number of values in each subnet that a client received."""
    sizes = (
        sum(torch.Size(shape).numel() for shape in compute_shapes(structure, subnet).values())
        for subnet in subnets
    )
    return "+".join(map(str, sizes))
