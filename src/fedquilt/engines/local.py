"""The local engine: worker processes on this machine, one thread each.

Global tensors are written once a round to a file in shared memory, which every worker maps; a
worker takes its subnet from there. What comes back is a file as well, so that updates which are
early wait outside the server's memory. The same code does the work in this very process
when there are no workers. One thread everywhere, so the bits do not depend on the number of
workers.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from fedquilt.data import ClientData
from fedquilt.engines import flat
from fedquilt.engines.engine import Tell, nobody
from fedquilt.engines.kept import KeptStates, read, write
from fedquilt.engines.spool import Spool
from fedquilt.engines.worker import Answer, Hung, Order, Timeouts, Worker, do_task, sentence
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import one_thread
from fedquilt.training.recipe import Workbench

Data = Mapping[str, Mapping[int, ClientData]]  # split -> client -> examples
SHARED_MEMORY = Path("/dev/shm")
MOST_TRIES = 2  # a task whose worker died or hung is done once more


class LocalEngine:
    """Runs tasks in ``workers`` processes, or in this one if there are none.

    ``timeouts`` are for worker processes; nobody watches over work in this one.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        data: Data,
        *,
        workers: int,
        folder: Path | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._bench = Workbench(model, structure, data)
        self._spool = Spool(Path(tempfile.gettempdir()))
        self._memory = Spool(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else self._spool
        self._states = KeptStates(folder or self._spool.folder / "clients")
        self._timeouts = timeouts or Timeouts()
        self._workers = [
            Worker(self._bench, self._timeouts, self._memory.folder / f"pulse-{number}")
            for number in range(workers)
        ]
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
        self._states.restore(kept)

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
        done: dict[int, Answer | Failure] = {}
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

    def _order(self, number: int, task: Task, params: Path) -> Order:
        return Order(
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

    def _feed(self, queue: deque[int], orders: Sequence[Order]) -> None:
        """Every worker has something to do, and, while there is plenty, something to do next."""
        for ahead in (1, 2):
            for worker in self._workers:
                plenty = len(queue) > 2 * len(self._workers)
                if queue and len(worker.orders) < ahead and (ahead == 1 or plenty):
                    worker.send(orders[queue.popleft()])

    def _listen(
        self,
        queue: deque[int],
        orders: Sequence[Order],
        tries: list[int],
        done: dict[int, Answer | Failure],
    ) -> None:
        """Waits for a worker to say something, to die, or to hang."""
        ready = connection.wait(
            [w.pipe for w in self._workers] + [w.sentinel for w in self._workers],
            timeout=self._timeouts.beat,
        )
        for worker in self._workers:
            hung, is_gone = worker.look(), worker.sentinel in ready
            if worker.pipe in ready:
                said = worker.receive()
                if isinstance(said, Answer):
                    done[said.number] = said
                    continue
                if said is not None and worker.is_at(said.number):
                    self.tell(orders[said.number].client, said.done)
                is_gone = said is None
            if hung is not None or is_gone:
                self._give_up(worker, hung, queue, tries, done)

    def _give_up(
        self,
        worker: Worker,
        hung: Hung | None,
        queue: deque[int],
        tries: list[int],
        done: dict[int, Answer | Failure],
    ) -> None:
        """Work of a worker that died or hung is done again, unless it was the work's own fault."""
        waiting, code = self._replaced(worker)
        for position, order in enumerate(waiting):
            tries[order.number] += position == 0
            is_late = position == 0 and hung is not None and hung.is_late
            if tries[order.number] < MOST_TRIES and not is_late:
                queue.appendleft(order.number)
            else:
                reason = _death(code) if hung is None else hung.reason
                done[order.number] = Failure(order.client, reason)

    def _replaced(self, worker: Worker) -> tuple[deque[Order], int | None]:
        """Puts a fresh process in a worker's place; what it had to do, and its exit code."""
        code = worker.replace(self._bench)
        waiting, worker.orders = worker.orders, deque()
        return waiting, code

    def _delivered(self, order: Order, answer: Answer | Failure) -> Update | Failure:
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

    def _drop_unfinished(self, orders: Sequence[Order]) -> None:
        """A round that was left early leaves nothing behind: its workers start afresh."""
        for worker in self._workers:
            if worker.orders:
                self._replaced(worker)
        for path in (path for order in orders for path in order.files):
            path.unlink(missing_ok=True)


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


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its worker was ended by {name} twice{hint}"
    return f"its worker ended twice with exit code {code}"
