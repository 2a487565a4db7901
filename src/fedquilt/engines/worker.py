"""A worker process: takes orders, does a client's work, answers, and shows that it lives.

Orders and answers are small messages; their tensors are in files. A thread of the worker touches
a file while the process lives, so that honest work may take as long as it takes, but a process that
was stopped or that hangs is noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fedquilt.engines import flat
from fedquilt.engines.kept import is_sound, read, write
from fedquilt.federation.client import Task, Update
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet
from fedquilt.training.recipe import Recipe, Workbench

SHORTEST_WAIT = 0.25  # seconds of work between two words about it
SMALLEST_STEP = 0.01  # of the work; so few words fit into a pipe that nobody reads for long
LONGEST_BEAT = 1.0  # seconds between two heartbeats, and between two looks at them
LARGEST_MESSAGE = 16_000  # bytes that a pipe takes at once; nobody waits for the rest of them


@dataclass(frozen=True)
class Timeouts:
    """How long a worker may take, in seconds, while the server waits for it.

    Without a ``heartbeat`` for so long it counts as hung: a fresh one takes its place, and the
    client's work is done once more. ``deadline`` is for the work of one client, which has failed
    when it takes longer; None: it may take any time.
    """

    heartbeat: float = 60.0
    deadline: float | None = None

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats, and between two looks at them."""
        return min(LONGEST_BEAT, self.heartbeat / 4, (self.deadline or self.heartbeat) / 4)


@dataclass(frozen=True)
class Order:
    """A task as it goes to a worker: its tensors stay in the files it names."""

    number: int
    client: int
    subnets: tuple[Subnet, ...]
    recipe: Recipe
    seed: int
    params: Path
    state: Path | None
    next_state: Path
    answer: Path

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """The answer's tensors, and the messages about it that are too long for a pipe."""
        return self.answer, self.answer.with_suffix(".order"), self.answer.with_suffix(".answer")


@dataclass(frozen=True)
class Answer:
    """What a worker says: the update without its tensors, or what went wrong."""

    number: int
    subnets: tuple[Subnet, ...] = ()
    weight: float = 0.0
    metrics: Mapping[str, float] | None = None
    slots: tuple[flat.Slot, ...] = ()
    kept_state: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Word:
    """What a worker says in between: the share of an order that is done."""

    number: int
    done: float


def do_task(
    task: Task,
    bench: Workbench,
    state: Mapping[str, Tensor] | None,
    tell: Callable[[float], None] | None = None,
) -> tuple[Update, Mapping[str, Tensor] | None]:
    """The client's work: its update, and what it keeps if that has changed and is sound."""
    listener = None if tell is None else _Listener(tell)
    bench.kept, bench.to_keep, bench.own, bench.listener = state, None, None, listener
    try:
        update = task.recipe.run(task, bench)
    finally:
        bench.listener = None
    if listener is not None:
        listener.end()
    kept = bench.to_keep
    return update, kept if kept is not None and is_sound(kept, bench.model) else None


class _Listener:
    """Passes on what a client tells, but only step by step, and a few times a second at most.

    Nothing is said about a task that is done sooner.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell, self._said, self._when = tell, 0.0, time.monotonic()

    def __call__(self, done: float) -> None:
        done = min(done, 1.0)
        if done >= self._said + SMALLEST_STEP and time.monotonic() >= self._when + SHORTEST_WAIT:
            self._said, self._when = float(done), time.monotonic()
            self._tell(self._said)

    def end(self) -> None:
        """All is done: whoever heard of a part hears that, as the result may have to wait."""
        if 0 < self._said < 1:
            self._tell(1.0)


def sentence(problem: BaseException) -> str:
    """What went wrong, and where, in one line."""
    where = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {problem} ({Path(where.filename).name}:{where.lineno})"


class Worker:
    """One worker process and the orders it holds; the first is the one it works on."""

    def __init__(self, bench: Workbench, timeouts: Timeouts, pulse: Path) -> None:
        self.orders: deque[Order] = deque()
        self._timeouts, self._pulse = timeouts, pulse
        self._start(bench)

    def _start(self, bench: Workbench) -> None:
        # forked, where that is possible: data and model need not be sent, nor be importable
        context: Any = get_context("fork" if sys.platform == "linux" else "spawn")
        self.pipe, theirs = context.Pipe()
        self._pulse.touch()
        self._seen, self._silent, self._spent, self._looked = 0, 0.0, 0.0, time.monotonic()
        beat = self._timeouts.beat
        self._process: BaseProcess = context.Process(
            target=_work,
            args=(theirs, self.pipe, self._pulse, beat, bench, os.getpid()),
            daemon=True,
        )
        with _undisturbed():  # until the worker ignores Ctrl-C, which is ours to handle
            self._process.start()
        theirs.close()

    @property
    def sentinel(self) -> int:
        """Becomes ready when the process ends."""
        return self._process.sentinel

    def send(self, order: Order) -> None:
        """Gives the worker something to do; if it has just died, that is noticed when listening."""
        if not self.orders:
            self._silent = self._spent = 0.0
        self.orders.append(order)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            _send(self.pipe, order, order.files[1])

    def receive(self) -> Answer | Word | None:
        """What it says, or None if it died instead."""
        try:
            said: Answer | Word = _receive(self.pipe)
        except (EOFError, OSError):
            return None
        if isinstance(said, Answer):
            self.orders.popleft()
            self._spent = 0.0
        return said

    def is_at(self, number: int) -> bool:
        """Whether this is what it works on."""
        return bool(self.orders) and self.orders[0].number == number

    def look(self) -> Hung | None:
        """What is wrong with a worker that has something to do, if it is alive at all.

        Time counts as long as the server looks: if all processes were stopped together, or the
        server was busy, the worker has had no more than one beat.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, self._timeouts.beat), now
        before, self._seen = self._seen, self._last_beat()
        self._silent = 0.0 if self._seen != before else self._silent + passed
        self._spent += passed
        heartbeat, deadline = self._timeouts.heartbeat, self._timeouts.deadline
        if not self.orders:
            return None
        if self._silent >= heartbeat:
            return Hung(
                f"its worker gave no sign of life for {heartbeat:g} seconds, twice", is_late=False
            )
        if deadline is not None and self._spent >= deadline:
            return Hung(f"its work was not done within {deadline:g} seconds", is_late=True)
        return None

    def _last_beat(self) -> int:
        try:
            return self._pulse.stat().st_mtime_ns
        except OSError:  # somebody tidied up, and the next beat brings the file back
            return self._seen

    def replace(self, bench: Workbench) -> int | None:
        """A fresh process in place of this one; the old one's exit code."""
        code = self.end()
        self._start(bench)
        return code

    def end(self) -> int | None:
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
class Hung:
    """Why a worker is given up; one that ``is_late`` was at work, and would be late again."""

    reason: str
    is_late: bool


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits, here and in processes started meanwhile."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(
    pipe: Connection,
    parents_end: Connection,
    pulse: Path,
    beat: float,
    bench: Workbench,
    parent: int,
) -> None:
    """A worker's life: take an order, do it, answer."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGHUP"):  # a closed terminal is the server's to handle, like Ctrl-C
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    die_with(parent)
    keep_memory()
    torch.set_num_threads(1)
    threading.Thread(target=_show_life, args=(pulse, beat), daemon=True).start()
    params = _Params()
    while True:
        try:
            order: Order = _receive(pipe)
        except (EOFError, OSError):
            return
        try:
            answer = _do(order, bench, params, pipe)
        except Exception as problem:
            answer = Answer(order.number, problem=sentence(problem))
        _say(pipe, answer, order)


def _show_life(pulse: Path, beat: float) -> None:
    rest = threading.Event()
    with contextlib.suppress(OSError):  # the folder is gone, and the server with it
        while not rest.wait(beat):
            pulse.touch()


def _say(pipe: Connection, what: Answer | Word, order: Order) -> None:
    try:
        _send(pipe, what, order.files[2])
    except (BrokenPipeError, ConnectionResetError):
        sys.exit()  # the round was left, and nobody listens any more


def _send(pipe: Connection, message: object, aside: Path) -> None:
    """Sends a message at once, so that nobody waits for half of one: a long one is a file."""
    data = ForkingPickler.dumps(message)
    if len(data) > LARGEST_MESSAGE:
        aside.write_bytes(data)
        data = ForkingPickler.dumps(aside)
    pipe.send_bytes(data)


def _receive(pipe: Connection) -> Any:
    message = pickle.loads(pipe.recv_bytes())
    if isinstance(message, Path):
        aside, message = message, pickle.loads(message.read_bytes())
        aside.unlink(missing_ok=True)
    return message


def _do(order: Order, bench: Workbench, params: _Params, pipe: Connection) -> Answer:
    def tell(done: float) -> None:
        _say(pipe, Word(order.number, done), order)

    task = Task(order.client, order.subnets, params.read(order.params), order.recipe, order.seed)
    update, state = do_task(task, bench, read(order.state), tell)
    slots = flat.write(order.answer, flat.packed(update.params)) if update.subnets else ()
    if state is not None:
        write(order.next_state, state)
    return Answer(
        order.number, update.subnets, update.weight, update.metrics, slots, state is not None
    )


class _Params:
    """The round's global tensors, mapped into this process once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._tensors: dict[str, Tensor] = {}

    def read(self, path: Path) -> Params:
        if path != self._path:
            with safe_open(path, framework="pt") as file:
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self._path = path
        return self._tensors


def die_with(parent: int) -> None:
    """This process ends when its parent does, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def keep_memory() -> None:
    """The C library keeps freed memory instead of giving it back to the system each time (glibc).

    Training frees and asks for the same large blocks at every step; with the defaults each
    of them is returned to the system and cleared by it again.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: keep up to 2 GB that was freed
            libc.mallopt(-4, 0)  # M_MMAP_MAX: also of the largest blocks
