"""Micro-batches: requests for the same size are answered together, by one thread.

A batch is what has gathered while the model was at work, so that an idle server answers at once.
Only if other requests are being read at that moment does it wait for them, at most for a window.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedquilt.serve.errors import RequestError
from fedquilt.serve.limits import Limits

Inputs = tuple[Tensor, ...]
Compute = Callable[[Inputs], Tensor]
logger = logging.getLogger(__name__)

BUSY = "the server is busy; try again in a moment"
CANNOT = "the model cannot take this input; check that its numbers are in range"


@dataclass(frozen=True, eq=False)
class BatchResult:
    """The outputs of one request, with the time and the size of the batch that it was part of."""

    outputs: Tensor
    seconds: float
    batch_size: int


@dataclass(eq=False)
class _Waiting:
    key: Hashable
    compute: Compute
    inputs: Inputs
    future: asyncio.Future[BatchResult]
    loop: asyncio.AbstractEventLoop
    deadline: float
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.inputs[0])


class Batcher:
    """Collects requests by key, and computes those of one key at once in a thread of its own."""

    def __init__(self, limits: Limits, *, joins_requests: bool = True) -> None:
        self._limits, self._joins = limits, joins_requests
        self._queue: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._examples = 0  # that wait
        self._reading = 0  # requests whose body is being read
        self._is_open = True
        self._thread = threading.Thread(target=self._work, name="fedquilt-model", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and turns away what still waits."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._thread.join(timeout=5)

    @contextmanager
    def expect(self) -> Iterator[None]:
        """A request is being read; a batch may wait a moment for it."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    async def compute(self, key: Hashable, compute: Compute, inputs: Inputs) -> BatchResult:
        """The outputs for some inputs, computed together with those of other requests."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[BatchResult] = loop.create_future()
        seconds = self._limits.seconds
        waiting = _Waiting(key, compute, inputs, future, loop, time.monotonic() + seconds)
        with self._changed:
            if not self._is_open or self._examples + waiting.size > self._limits.waiting:
                raise RequestError(503, BUSY)
            self._examples += waiting.size
            self._queue.append(waiting)
            self._changed.notify()
        timer = loop.call_later(seconds, _fail, future, RequestError(503, BUSY))
        try:
            return await future
        finally:
            timer.cancel()

    def _work(self) -> None:
        with torch.inference_mode():
            while (batch := self._take()) is not None:
                _answer(batch)

    def _take(self) -> list[_Waiting] | None:
        """The oldest request, and all that can join it; None: the server ends."""
        with self._changed:
            while self._is_open and not self._queue:
                self._changed.wait()
            if not self._is_open:
                for waiting in self._queue:
                    _send(waiting.loop, _fail, waiting.future, RequestError(503, BUSY))
                return None
            self._wait_for_company()
            return self._pop_batch()

    def _wait_for_company(self) -> None:
        """Waits while requests are being read and the batch is not full."""
        end = time.monotonic() + self._limits.window
        while self._joins and self._reading > 0 and self._examples < self._limits.batch:
            left = end - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return

    def _pop_batch(self) -> list[_Waiting]:
        now = time.monotonic()
        batch: list[_Waiting] = []
        others: deque[_Waiting] = deque()
        total = 0
        while self._queue:
            waiting = self._queue.popleft()
            if waiting.deadline < now or waiting.future.done():
                self._examples -= waiting.size
            elif not batch or (
                self._joins
                and waiting.key == batch[0].key
                and total + waiting.size <= self._limits.batch
            ):
                batch.append(waiting)
                total += waiting.size
                self._examples -= waiting.size
            else:
                others.append(waiting)
        self._queue = others
        return batch


def _answer(batch: Sequence[_Waiting]) -> None:
    """Computes a batch; if that fails, each of its requests alone, so that one harms no other."""
    if not batch:
        return
    start = time.perf_counter()
    try:
        parts = zip(*(waiting.inputs for waiting in batch), strict=True)
        inputs = batch[0].inputs if len(batch) == 1 else tuple(map(torch.cat, parts))
        outputs = batch[0].compute(inputs)
    except Exception as problem:  # a user's model may raise anything
        if len(batch) > 1:
            for waiting in batch:
                _answer([waiting])
            return
        logger.info("a request failed in the model: %s", problem)
        _send(batch[0].loop, _fail, batch[0].future, RequestError(422, CANNOT))
        return
    seconds = time.perf_counter() - start
    sizes = [waiting.size for waiting in batch]
    results = [BatchResult(own, seconds, sum(sizes)) for own in outputs.split(sizes)]
    pairs = [(w.future, result) for w, result in zip(batch, results, strict=True)]
    _send(batch[0].loop, _resolve, pairs)


def _send(loop: asyncio.AbstractEventLoop, *call: object) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]


def _resolve(pairs: Sequence[tuple[asyncio.Future[BatchResult], BatchResult]]) -> None:
    for future, result in pairs:
        if not future.done():
            future.set_result(result)


def _fail(future: asyncio.Future[BatchResult], problem: RequestError) -> None:
    if not future.done():
        future.set_exception(problem)
