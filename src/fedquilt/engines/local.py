"""The local engine: worker processes on this machine, one thread each.

Global tensors are written once a round to a file in shared memory, which every worker maps; a
worker takes its subnet from there. What comes back is a file as well, so that updates which are
early wait outside the server's memory. The same code does the work in this very process
when there are no workers. One thread everywhere, so the bits do not depend on the number of
workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.engines import flat
from fedquilt.engines.engine import Tell, nobody
from fedquilt.engines.kept import KeptStates, is_sound, read, write
from fedquilt.engines.spool import Spool
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.structure.cut import Params
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import one_thread
from fedquilt.training.recipe import Recipe, Workbench

Data = Mapping[str, Mapping[int, ClientData]]  # split -> client -> examples
SHARED_MEMORY = Path("/dev/shm")
MOST_TRIES = 2  # a task whose worker died is done once more
SHORTEST_WAIT = 0.25  # seconds of work between two words about it
SMALLEST_STEP = 0.01  # of the work; so few words fit into a pipe that nobody reads for long


@dataclass(frozen=True)
class _Order:
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


@dataclass(frozen=True)
class _Answer:
    """What a worker says: the update without its tensors, or what went wrong."""

    number: int
    subnets: tuple[Subnet, ...] = ()
    weight: float = 0.0
    metrics: Mapping[str, float] | None = None
    slots: tuple[flat.Slot, ...] = ()
    kept_state: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class _Word:
    """What a worker says in between: the share of an order that is done."""

    number: int
    done: float


class LocalEngine:
    """Runs tasks in ``workers`` processes, or in this one if there are none."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        data: Data,
        *,
        workers: int,
        folder: Path | None = None,
    ) -> None:
        self._bench = Workbench(model, structure, data)
        self._spool = Spool(Path(tempfile.gettempdir()))
        self._memory = Spool(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else self._spool
        self._states = KeptStates(folder or self._spool.folder / "clients")
        self._workers = [_Worker(self._bench) for _ in range(workers)]
        self._files = 0
        self.tell: Tell = nobody

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Does the tasks, all of them; yields in their order."""
        if self._workers:
            with one_thread():  # the cores are the workers'; more threads here would wait for them
                yield from self._run_in_workers(tasks)
        else:
            yield from (self._run_here(task) for task in tasks)

    def kept(self) -> Mapping[int, int]:
        """The version of what each client keeps."""
        return dict(self._states.versions)

    def restore(self, kept: Mapping[int, int]) -> None:
        """Goes back to these versions of what clients keep."""
        self._states.versions = dict(kept)

    def forget_others(self, *used: Mapping[int, int]) -> None:
        """Removes what clients kept in versions that nobody needs any more."""
        self._states.forget_others(*used)

    def close(self) -> None:
        """Ends all workers and removes temporary files, also those of a round that was left."""
        for worker in self._workers:
            worker.end()
            worker.orders.clear()
        self._memory.close()
        self._spool.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_here(self, task: Task) -> Update | Failure:
        def tell(done: float) -> None:
            try:
                self.tell(task.client, done)
            except Exception as problem:
                raise _Disturbed(problem) from problem

        with one_thread():
            try:
                before = read(self._states.current(task.client))
                update, state = do_task(task, self._bench, before, tell)
                if state is not None:
                    write(self._states.next(task.client), state)
            except Exception as problem:
                return Failure(task.client, sentence(problem))
            except _Disturbed as disturbed:
                raise disturbed.problem from None
        if state is not None:
            self._states.advance(task.client)
        return update

    def _run_in_workers(self, tasks: Sequence[Task]) -> Iterator[Update | Failure]:
        queue = deque(_heaviest_first(tasks, self._bench.structure))
        tries = [0] * len(tasks)
        done: dict[int, _Answer | Failure] = {}
        with self._shared(tasks) as shared:
            orders = [self._order(i, task, shared[id(task.params)]) for i, task in enumerate(tasks)]
            try:
                for number in range(len(tasks)):
                    while number not in done:
                        self._feed(queue, orders)
                        self._listen(queue, orders, tries, done)
                    self._feed(queue, orders)
                    yield self._delivered(orders[number], done.pop(number))
            finally:
                self._drop_unfinished(orders)

    def _order(self, number: int, task: Task, params: Path) -> _Order:
        return _Order(
            number,
            task.client,
            task.subnets,
            task.recipe,
            task.seed,
            params,
            self._states.current(task.client),
            self._states.next(task.client),
            self._spool.folder / f"update-{self._next_number()}",
        )

    def _next_number(self) -> int:
        self._files += 1
        return self._files

    @contextlib.contextmanager
    def _shared(self, tasks: Sequence[Task]) -> Iterator[dict[int, Path]]:
        """Files with the tasks' global tensors, in shared memory where there is enough of it."""
        paths: dict[int, Path] = {}
        try:
            for params in {id(task.params): task.params for task in tasks}.values():
                size = sum(t.nbytes for t in params.values())
                spool = self._memory if self._memory.has_room(size) else self._spool
                path = spool.folder / f"params-{self._next_number()}.safetensors"
                paths[id(params)] = path
                save_file({n: t.detach().contiguous() for n, t in params.items()}, path)
            yield paths
        finally:
            for path in paths.values():
                path.unlink(missing_ok=True)

    def _feed(self, queue: deque[int], orders: Sequence[_Order]) -> None:
        """Every worker has something to do, and, while there is plenty, something to do next."""
        for ahead in (1, 2):
            for worker in self._workers:
                plenty = len(queue) > 2 * len(self._workers)
                if queue and len(worker.orders) < ahead and (ahead == 1 or plenty):
                    worker.send(orders[queue.popleft()])

    def _listen(
        self,
        queue: deque[int],
        orders: Sequence[_Order],
        tries: list[int],
        done: dict[int, _Answer | Failure],
    ) -> None:
        """Waits for a worker to say something or to die."""
        ready = connection.wait(
            [w.pipe for w in self._workers] + [w.sentinel for w in self._workers]
        )
        for worker in self._workers:
            if worker.pipe in ready:
                said = worker.receive()
                if isinstance(said, _Answer):
                    done[said.number] = said
                elif said is not None and worker.is_at(said.number):
                    self.tell(orders[said.number].client, said.done)
                if said is not None:
                    continue
            if worker.pipe in ready or worker.sentinel in ready:
                code = worker.replace(self._bench)
                waiting, worker.orders = worker.orders, deque()
                for position, order in enumerate(waiting):
                    tries[order.number] += position == 0
                    if tries[order.number] < MOST_TRIES:
                        queue.appendleft(order.number)
                    else:
                        done[order.number] = Failure(order.client, _death(code))

    def _delivered(self, order: _Order, answer: _Answer | Failure) -> Update | Failure:
        if isinstance(answer, Failure):
            return answer
        if answer.problem is not None:
            return Failure(order.client, answer.problem)
        if answer.kept_state:
            self._states.advance(order.client)
        tensors = flat.read(order.answer, answer.slots) if answer.subnets else {}
        order.answer.unlink(missing_ok=True)
        return Update(
            order.client,
            answer.subnets,
            flat.unpacked(tensors, len(answer.subnets)),
            answer.weight,
            answer.metrics or {},
        )

    def _drop_unfinished(self, orders: Sequence[_Order]) -> None:
        """A round that was left early leaves nothing behind: its workers start afresh."""
        for worker in self._workers:
            if worker.orders:
                worker.replace(self._bench)
                worker.orders.clear()
        for order in orders:
            order.answer.unlink(missing_ok=True)


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
    return update, kept if kept is not None and is_sound(kept) else None


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


class _Disturbed(BaseException):
    """A problem of the one who was told, which is no failure of the client at work."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem


def _heaviest_first(tasks: Sequence[Task], structure: Structure) -> list[int]:
    """Long tasks start early, so that no worker is left alone with one at the end."""
    sizes: dict[tuple[Subnet, ...], float] = {}
    for task in tasks:
        if task.subnets not in sizes:
            sizes[task.subnets] = sum(_share(s, structure) for s in task.subnets)
    return sorted(range(len(tasks)), key=lambda i: -sizes[tasks[i].subnets])


def _share(subnet: Subnet, structure: Structure) -> float:
    kept = [structure.kept(subnet, g) / structure.groups[g].size for g in structure.cut_groups()]
    width = sum(kept) / len(kept) if kept else 1.0
    return width * (1 - len(structure.gone(subnet)) / max(len(structure.shapes), 1))


def sentence(problem: BaseException) -> str:
    """What went wrong, and where, in one line."""
    where = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {problem} ({Path(where.filename).name}:{where.lineno})"


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its worker was ended by {name} twice{hint}"
    return f"its worker ended twice with exit code {code}"


class _Worker:
    """One worker process and the orders it holds; the first is the one it works on."""

    def __init__(self, bench: Workbench) -> None:
        self.orders: deque[_Order] = deque()
        self._start(bench)

    def _start(self, bench: Workbench) -> None:
        # forked, where that is possible: data and model need not be sent, nor be importable
        context: Any = get_context("fork" if sys.platform == "linux" else "spawn")
        self.pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_work, args=(theirs, self.pipe, bench, os.getpid()), daemon=True
        )
        with _undisturbed():  # until the worker ignores Ctrl-C, which is ours to handle
            self._process.start()
        theirs.close()

    @property
    def sentinel(self) -> int:
        """Becomes ready when the process ends."""
        return self._process.sentinel

    def send(self, order: _Order) -> None:
        """Gives the worker something to do; if it has just died, that is noticed when listening."""
        self.orders.append(order)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(order)

    def receive(self) -> _Answer | _Word | None:
        """What it says, or None if it died instead."""
        try:
            said: _Answer | _Word = self.pipe.recv()
        except (EOFError, OSError):
            return None
        if isinstance(said, _Answer):
            self.orders.popleft()
        return said

    def is_at(self, number: int) -> bool:
        """Whether this is what it works on."""
        return bool(self.orders) and self.orders[0].number == number

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


def _work(pipe: Connection, parents_end: Connection, bench: Workbench, parent: int) -> None:
    """A worker's life: take an order, do it, answer."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
    keep_memory()
    torch.set_num_threads(1)
    params = _Params()
    while True:
        try:
            order: _Order = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = _do(order, bench, params, pipe)
        except Exception as problem:
            answer = _Answer(order.number, problem=sentence(problem))
        _say(pipe, answer)


def _say(pipe: Connection, what: _Answer | _Word) -> None:
    try:
        pipe.send(what)
    except (BrokenPipeError, ConnectionResetError):
        sys.exit()  # the round was left, and nobody listens any more


def _do(order: _Order, bench: Workbench, params: _Params, pipe: Connection) -> _Answer:
    def tell(done: float) -> None:
        _say(pipe, _Word(order.number, done))

    task = Task(order.client, order.subnets, params.read(order.params), order.recipe, order.seed)
    update, state = do_task(task, bench, read(order.state), tell)
    slots = flat.write(order.answer, flat.packed(update.params)) if update.subnets else ()
    if state is not None:
        write(order.next_state, state)
    return _Answer(
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
