"""A client's work on a worker: runs the recipe, and passes on how far it is."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

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
from fedquilt.training.context import ClientContext

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
            raise DeviceMemoryError(
                f"its work does not fit into the memory of device {context.device}, even with one "
                "client at a time; use a smaller batch_size, or give it a smaller budget"
            ) from None


def _run_on_device(
    task: Task,
    context: ClientContext,
    client_state: Mapping[str, Tensor] | None,
    on_progress: Callable[[float], None],
) -> ClientResult:
    if is_accelerator(context.device):
        task = replace(task, params=context.to_device(task.params))
        if client_state is not None:
            client_state = {n: t.to(context.device) for n, t in client_state.items()}
    result = task.recipe.run(task, context.for_client(client_state, on_progress))
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


def describe_exception(problem: BaseException) -> str:
    """An exception in one line: its kind, its message, and where it was raised."""
    where = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {problem} ({Path(where.filename).name}:{where.lineno})"
