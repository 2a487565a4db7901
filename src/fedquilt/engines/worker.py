"""A worker process: takes requests, does a client's work, replies, and sends heartbeats.

Requests and replies are small messages; their tensors are in files. A thread of the worker touches
a file while the process lives. So work may take long, but a process that was stopped or that hangs
is noticed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from fedquilt.engines.client_state import read_client_state, write_client_state
from fedquilt.engines.client_work import run_stack
from fedquilt.engines.processes import (
    ForkedInput,
    ProcessInput,
    StoredInput,
    choose_start_method,
    encode_message,
    exit_with_parent,
    retain_freed_memory,
    start_process,
)
from fedquilt.errors import ConfigError, DeviceMemoryError, describe_exception
from fedquilt.federation import flat_tensors
from fedquilt.federation.client import ClientResult, Recipe, Task
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext

MAX_BEAT_SECONDS = 1.0  # between two heartbeats, and between two looks at them
MAX_START_SECONDS = 300.0  # until a new process has imported everything
REQUEST, REPLY = ".request", ".reply"  # suffixes of files with messages too long for a pipe
MAX_MESSAGE_BYTES = 16_000  # that a pipe takes at once, so that no process waits to send more


@dataclass(frozen=True)
class Timeouts:
    """How long a worker may take, in seconds, while the server waits for it.

    Args:
        heartbeat: A worker without a heartbeat for this time is replaced, and the client's work is
            done once more.
        deadline: The work of one client fails if it takes longer; None: no limit.
    """

    heartbeat: float = 60.0
    deadline: float | None = None

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats, and between two looks at them."""
        return min(MAX_BEAT_SECONDS, self.heartbeat / 4, (self.deadline or self.heartbeat) / 4)


@dataclass(frozen=True)
class WorkRequest:
    """A task as it goes to a worker: its tensors stay in the files it names."""

    number: int
    client: int
    subnets: tuple[Subnet, ...]
    recipe: Recipe
    seed: int
    params: Path
    state: Path | None
    next_state: Path
    update: Path
    stack: tuple[int, ...] = ()  # the numbers of all requests that are done in one pass with it

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """The update's tensors, and a request and a reply that are too long for a pipe."""
        return self.update, self.update.with_suffix(REQUEST), self.update.with_suffix(REPLY)


@dataclass(frozen=True)
class WorkReply:
    """What comes of a request: the update without its tensors, or what went wrong."""

    number: int
    subnets: tuple[Subnet, ...] = ()
    weight: float = 0.0
    metrics: Mapping[str, float] | None = None
    slots: tuple[flat_tensors.Slot, ...] = ()
    has_new_state: bool = False
    problem: str | None = None
    is_out_of_memory: bool = False  # of the worker's device


@dataclass(frozen=True)
class ProgressMessage:
    """A worker's report: the part of a request that is done."""

    number: int
    done: float


@dataclass(frozen=True)
class StartFailure:
    """A worker's last message: why it cannot work at all."""

    reason: str


class Worker:
    """One worker process and its requests, of which it works on the first."""

    def __init__(
        self,
        contexts: ProcessInput[Sequence[ClientContext]],
        number: int,
        timeouts: Timeouts,
        pulse: Path,
    ) -> None:
        self.requests: deque[WorkRequest] = deque()
        self.context = contexts.value[number]
        self._contexts, self._number = contexts, number
        self._timeouts, self._pulse = timeouts, pulse
        self._start()

    def _start(self) -> None:
        self._method = choose_start_method(self.context.device)
        contexts = self._contexts.for_method(self._method)
        ends: Any = Pipe()  # of another class on Windows
        self.pipe: Connection = ends[0]
        theirs: Connection = ends[1]
        self._pulse.touch()
        self._seen, self._silent, self._spent, self._looked = 0, 0.0, 0.0, time.monotonic()
        self._is_importing, self._started = self._method == "spawn", self._last_beat()
        beat, parent = self._timeouts.beat, os.getpid()
        args = (theirs, self.pipe, self._pulse, beat, contexts, self._number, parent)
        self._process = start_process(self._method, _run_worker, args, daemon=True)
        theirs.close()

    @property
    def sentinel(self) -> int:
        """Becomes ready when the process ends."""
        return self._process.sentinel

    @property
    def num_passes(self) -> int:
        """How many times it has to work for its requests."""
        return len({request.stack or request.number for request in self.requests})

    def send(self, *requests: WorkRequest) -> None:
        """Sends a request, or several that are done in one pass.

        A worker that has just died is noticed when its replies are awaited.
        """
        if not self.requests:
            self._silent = self._spent = 0.0
        self.requests.extend(requests)
        data = encode_message(requests, self._method)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            _send(self.pipe, data, requests[0].update.with_suffix(REQUEST))

    def receive(self) -> WorkReply | ProgressMessage | None:
        """The next message; None if the process has died."""
        try:
            message: WorkReply | ProgressMessage | StartFailure = _receive(self.pipe)
        except (EOFError, OSError):
            return None
        if isinstance(message, StartFailure):
            raise ConfigError(message.reason)
        if isinstance(message, WorkReply):
            self.requests.popleft()
            self._spent = 0.0
        return message

    def is_working_on(self, number: int) -> bool:
        """Whether it works on the request of this number."""
        if not self.requests:
            return False
        first = self.requests[0]
        return number == first.number or number in first.stack

    def find_problem(self) -> WorkerProblem | None:
        """Why a worker with requests has to be replaced, if it does.

        Between two calls no more than one beat counts: if all processes were stopped together, or
        the server was busy, that is no fault of the worker.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, self._timeouts.beat), now
        before, self._seen = self._seen, self._last_beat()
        self._silent = 0.0 if self._seen != before else self._silent + passed
        self._spent += passed
        heartbeat, deadline = self._timeouts.heartbeat, self._timeouts.deadline
        self._is_importing = self._is_importing and self._seen == self._started
        if self._is_importing:  # all that it needs, before its first heartbeat
            heartbeat, deadline = max(heartbeat, MAX_START_SECONDS), None
        if not self.requests:
            return None
        if self._silent >= heartbeat:
            return WorkerProblem(
                f"its worker gave no sign of life for {heartbeat:g} seconds, twice", is_late=False
            )
        clients = max(1, len(self.requests[0].stack))
        if deadline is not None and self._spent >= deadline * clients:
            return WorkerProblem(f"its work was not done within {deadline:g} seconds", is_late=True)
        return None

    def _last_beat(self) -> int:
        try:
            return self._pulse.stat().st_mtime_ns
        except OSError:  # the file was removed; the next heartbeat creates it again
            return self._seen

    def replace(self) -> int | None:
        """Starts a new process in place of this one; the old one's exit code."""
        code = self.terminate()
        self._start()
        return code

    def terminate(self) -> int | None:
        """Ends the process; its exit code."""
        self.pipe.close()
        if self._process.is_alive():
            self._process.join(timeout=0.05)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        return code


@dataclass(frozen=True)
class WorkerProblem:
    """Why a worker is replaced; the work of one that ``is_late`` is not tried again."""

    reason: str
    is_late: bool


def _run_worker(
    pipe: Connection,
    parent_end: Connection,
    pulse: Path,
    beat: float,
    contexts: ForkedInput[Sequence[ClientContext]] | StoredInput[Sequence[ClientContext]],
    number: int,
    parent: int,
) -> None:
    """The main function of the process: handles one request after another."""
    parent_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGHUP"):  # the server handles a closed terminal, as it does Ctrl-C
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    exit_with_parent(parent)
    retain_freed_memory()
    torch.set_num_threads(1)
    threading.Thread(target=_send_heartbeats, args=(pulse, beat), daemon=True).start()
    try:
        context = contexts.load()[number]
    except ConfigError as problem:
        pipe.send(StartFailure(str(problem)))
        return
    mapped = _MappedParams()
    while True:
        try:
            requests: tuple[WorkRequest, ...] = _receive(pipe)
        except (EOFError, OSError):
            return
        for request, reply in _handle_requests(requests, context, mapped, pipe):
            _reply(pipe, reply, request)


def _send_heartbeats(pulse: Path, beat: float) -> None:
    rest = threading.Event()
    with contextlib.suppress(OSError):  # the folder and its server are gone
        while not rest.wait(beat):
            pulse.touch()
            parent = parent_process()
            if parent is not None and not parent.is_alive():  # what Linux does by itself
                os._exit(1)


def _reply(pipe: Connection, message: WorkReply | ProgressMessage, request: WorkRequest) -> None:
    try:
        _send(pipe, pickle.dumps(message), request.update.with_suffix(REPLY))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit()  # the round was left early, and the server has closed its end


def _send(pipe: Connection, data: bytes, overflow: Path) -> None:
    """Sends a message without blocking: a long one goes into a file."""
    if len(data) > MAX_MESSAGE_BYTES:
        overflow.write_bytes(data)
        data = pickle.dumps(overflow)
    pipe.send_bytes(data)


def _receive(pipe: Connection) -> Any:
    message = pickle.loads(pipe.recv_bytes())
    if isinstance(message, Path):
        overflow, message = message, pickle.loads(message.read_bytes())
        overflow.unlink(missing_ok=True)
    return message


def _handle_requests(
    requests: Sequence[WorkRequest],
    context: ClientContext,
    mapped: _MappedParams,
    pipe: Connection,
) -> Iterator[tuple[WorkRequest, WorkReply]]:
    """Does the work of requests in one pass; tensors of updates and new states go into files."""
    by_client = {request.client: request for request in requests}

    def on_progress(client: int, done: float) -> None:
        request = by_client[client]
        _reply(pipe, ProgressMessage(request.number, done), request)

    try:
        tasks = [_read_task(request, mapped) for request in requests]
        states = [partial(read_client_state, request.state) for request in requests]
        results = run_stack(tasks, context, states, on_progress)
    except Exception as problem:  # the file of tensors cannot be read
        results = [problem] * len(requests)
    for request, result in zip(requests, results, strict=True):
        yield request, _make_reply(request, result)


def _read_task(request: WorkRequest, mapped: _MappedParams) -> Task:
    params = mapped.read(request.params)
    return Task(request.client, request.subnets, params, request.recipe, request.seed)


def _make_reply(request: WorkRequest, result: ClientResult | Exception) -> WorkReply:
    """The reply; the update's tensors and the new state are in files afterwards."""
    if isinstance(result, DeviceMemoryError):
        return WorkReply(request.number, problem=str(result), is_out_of_memory=True)
    if isinstance(result, Exception):
        return WorkReply(request.number, problem=describe_exception(result))
    update, state = result.update, result.state
    try:
        slots = (
            flat_tensors.write_flat(request.update, flat_tensors.join_parts(update.params))
            if update.params
            else ()
        )
        if state is not None:
            write_client_state(request.next_state, state)
    except Exception as problem:
        return WorkReply(request.number, problem=describe_exception(problem))
    return WorkReply(
        request.number, update.subnets, update.weight, update.metrics, slots, state is not None
    )


class _MappedParams:
    """The global tensors of a round, mapped into this process once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._tensors: dict[str, Tensor] = {}

    def read(self, path: Path) -> Params:
        if path != self._path:
            if sys.platform == "win32":  # where a mapped file cannot be removed
                self._tensors = load(path.read_bytes())
            else:
                with safe_open(path, framework="pt") as file:
                    self._tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
            self._path = path
        return self._tensors
