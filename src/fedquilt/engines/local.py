"""The local engine: worker processes on this machine, one thread each.

Global tensors are written once a round to a file in shared memory, which every worker maps; a
worker takes its subnet from there. What comes back is a file as well, so that updates which are
early wait outside the server's memory. Without workers the same code does the work in this
process. Each process uses one thread, so the bits do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.devices import CPU
from fedquilt.engines.client_state import ClientStateStore, read_client_state, write_client_state
from fedquilt.engines.client_work import describe_exception, run_task
from fedquilt.engines.engine import OnProgress, ignore_progress
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.engines.worker import (
    Timeouts,
    Worker,
    WorkerProblem,
    WorkReply,
    WorkRequest,
)
from fedquilt.errors import DeviceMemoryError
from fedquilt.federation import flat_tensors
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.threads import single_thread
from fedquilt.learning.task import CLASSIFICATION, LearningTask
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext

Data = Mapping[str, Mapping[int, ClientData]]  # split -> client -> examples
SHARED_MEMORY = Path("/dev/shm")
MAX_TRIES = 2  # a task whose worker died or worker_problem is done once more


class LocalEngine:
    """Runs tasks in worker processes, or in this one.

    Args:
        model: The whole model, with its initial values.
        structure: What can be cut in the model.
        data: Examples of each client, by split.
        workers: The number of processes on each device; 0: the work is done in this one, on the
            first device.
        folder: Where clients' states are kept; None: in a temporary folder.
        timeouts: When a worker process counts as hung or late.
        devices: Where clients train.
        task: What is learned: the loss and the metrics.

    >>> import torch, fedquilt as fq
    >>> inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    >>> clients = fq.make_clients((inputs, labels), count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure, params = fq.trace_structure(model, inputs[:1]), model.state_dict()
    >>> recipe = fq.LocalSGD(fq.LocalTraining(epochs=1), lr=0.1)
    >>> tasks = [fq.Task(id, (structure.subnet(),), params, recipe, seed=id) for id in (0, 1)]
    >>> engine = fq.LocalEngine(model, structure, {"train": clients.train}, workers=0)
    >>> [update.metrics["examples"] for update in engine.run(tasks)]
    [6, 6]
    >>> engine.close()
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
        devices: Sequence[torch.device] = (CPU,),
        task: LearningTask = CLASSIFICATION,
    ) -> None:
        self._scratch = ScratchDirectory(Path(tempfile.gettempdir()))
        secrets = self._scratch.folder / "secrets"
        contexts = [
            ClientContext(model, structure, data, device, task, secrets=secrets)
            for device in devices
        ]
        self._context = contexts[0]
        self._memory = ScratchDirectory(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else self._scratch
        self._states = ClientStateStore(folder or self._scratch.folder / "clients")
        self._timeouts = timeouts or Timeouts()
        self._workers = [
            Worker(context, self._timeouts, self._memory.folder / f"pulse-{context.device}-{n}")
            for n in range(workers)
            for context in contexts
        ]
        self._files = 0
        self.on_progress: OnProgress = ignore_progress

    @property
    def device(self) -> torch.device:
        """The first of the devices that clients train on; all are of one kind."""
        return self._context.device

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Does all tasks; yields their results in order."""
        if self._workers:
            with single_thread():  # the cores are for the workers
                yield from self._run_in_workers(tasks)
        else:
            yield from (self._run_here(task) for task in tasks)

    @property
    def context(self) -> ClientContext:
        """What clients work with, in this process."""
        return self._context

    def read_state(self, client: int) -> Mapping[str, Tensor] | None:
        """What a client has kept so far, if anything."""
        return read_client_state(self._states.current_path(client))

    def client_versions(self) -> Mapping[int, int]:
        """The version of each client's state."""
        return dict(self._states.versions)

    def restore(self, versions: Mapping[int, int], *, after: Mapping[int, int] = {}) -> None:
        """Goes back to these versions of clients' states; new ones come after others in use."""
        self._states.restore(versions, after)

    def remove_unused(self, *used: Mapping[int, int]) -> None:
        """Removes versions of clients' states that none of these uses."""
        self._states.remove_unused(*used)

    def close(self) -> None:
        """Ends all workers, and removes temporary files."""
        for worker in self._workers:
            worker.terminate()
            worker.requests.clear()
        self._memory.close()
        self._scratch.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_here(self, task: Task) -> Update | Failure:
        def on_progress(done: float) -> None:
            try:
                self.on_progress(task.client, done)
            except Exception as problem:
                raise _CallbackError(problem) from problem

        with single_thread():
            try:
                before = read_client_state(self._states.current_path(task.client))
                result = run_task(task, self._context, before, on_progress)
                if result.state is not None:
                    write_client_state(self._states.next_path(task.client), result.state)
            except DeviceMemoryError as problem:
                return Failure(task.client, str(problem))
            except Exception as problem:
                return Failure(task.client, describe_exception(problem))
            except _CallbackError as error:
                raise error.problem from None
        if result.state is not None:
            self._states.advance(task.client)
        return result.update

    def _run_in_workers(self, tasks: Sequence[Task]) -> Iterator[Update | Failure]:
        with self._write_params(tasks) as paths:
            requests = [
                self._make_request(number, task, paths[id(task.params)])
                for number, task in enumerate(tasks)
            ]
            queue = _TaskQueue(requests, deque(_sort_by_size(tasks, self._context.structure)))
            try:
                for request in requests:
                    while request.number not in queue.results:
                        self._assign_requests(queue)
                        self._await_messages(queue)
                    self._assign_requests(queue)
                    yield self._read_update(request, queue.results.pop(request.number))
            finally:
                self._drop_unfinished(requests)

    def _make_request(self, number: int, task: Task, params: Path) -> WorkRequest:
        return WorkRequest(
            number,
            task.client,
            task.subnets,
            task.recipe,
            task.seed,
            params,
            self._states.current_path(task.client),
            self._states.next_path(task.client),
            self._scratch.folder / f"update-{self._next_number()}",
        )

    def _next_number(self) -> int:
        self._files += 1
        return self._files

    @contextlib.contextmanager
    def _write_params(self, tasks: Sequence[Task]) -> Iterator[dict[int, Path]]:
        """Files with the tasks' global tensors, in shared memory where there is enough of it."""
        paths: dict[int, Path] = {}
        try:
            for params in {id(task.params): task.params for task in tasks}.values():
                size = sum(t.nbytes for t in params.values())
                scratch = self._memory if self._memory.has_room(size) else self._scratch
                path = scratch.folder / f"params-{self._next_number()}.safetensors"
                paths[id(params)] = path
                save_file({n: t.detach().contiguous() for n, t in params.items()}, path)
            yield paths
        finally:
            for path in paths.values():
                path.unlink(missing_ok=True)

    def _assign_requests(self, queue: _TaskQueue) -> None:
        """Gives every worker a request, and a second one while many are waiting."""
        for ahead in (1, 2):
            for worker in self._workers:
                many = len(queue.waiting) > 2 * len(self._workers)
                if queue.waiting and len(worker.requests) < ahead and (ahead == 1 or many):
                    worker.send(queue.requests[queue.waiting.popleft()])

    def _await_messages(self, queue: _TaskQueue) -> None:
        """Waits until a worker sends a message, dies, or hangs."""
        ready = connection.wait(
            [w.pipe for w in self._workers] + [w.sentinel for w in self._workers],
            timeout=self._timeouts.beat,
        )
        for worker in self._workers:
            problem, has_died = worker.find_problem(), worker.sentinel in ready
            if worker.pipe in ready:
                message = worker.receive()
                if isinstance(message, WorkReply):
                    if not (message.is_out_of_memory and self._redo(worker, queue, message.number)):
                        queue.results[message.number] = message
                    continue
                if message is not None and worker.is_working_on(message.number):
                    self.on_progress(queue.requests[message.number].client, message.done)
                has_died = message is None
            if problem is not None or has_died:
                requests, code = self._replace_worker(worker)
                queue.retry_or_fail(requests, problem, code)

    def _redo(self, worker: Worker, queue: _TaskQueue, number: int) -> bool:
        """Puts back a task that was too large for its device, with fewer clients at a time on it.

        The worker ends, unless it is the last one of its device. False if the task was tried alone.
        """
        device = worker.context.device
        if sum(other.context.device == device for other in self._workers) > 1:
            worker.terminate()
            self._workers = [other for other in self._workers if other is not worker]
            queue.waiting.extendleft(request.number for request in reversed(worker.requests))
            queue.waiting.appendleft(number)
        elif number not in queue.alone:  # others may have been there when it failed
            queue.alone.add(number)
            queue.waiting.appendleft(number)
        else:
            return False
        return True

    def _replace_worker(self, worker: Worker) -> tuple[deque[WorkRequest], int | None]:
        """Starts a worker's process anew; the requests that it had, and its exit code."""
        code = worker.replace()
        requests, worker.requests = worker.requests, deque()
        return requests, code

    def _read_update(self, request: WorkRequest, reply: WorkReply | Failure) -> Update | Failure:
        """The update of a reply, whose tensors are in a file."""
        if isinstance(reply, Failure):
            return reply
        if reply.problem is not None:
            return Failure(request.client, reply.problem)
        if reply.has_new_state:
            self._states.advance(request.client)
        tensors = flat_tensors.read_flat(request.update, reply.slots) if reply.slots else {}
        request.update.unlink(missing_ok=True)
        return Update(
            request.client,
            reply.subnets,
            flat_tensors.split_parts(tensors, len(reply.subnets)),
            reply.weight,
            reply.metrics or {},
        )

    def _drop_unfinished(self, requests: Sequence[WorkRequest]) -> None:
        """Restarts workers that are still busy, because the round was left early; removes files."""
        for worker in self._workers:
            if worker.requests:
                self._replace_worker(worker)
        for path in (path for request in requests for path in request.files):
            path.unlink(missing_ok=True)


@dataclass
class _TaskQueue:
    """The requests of a round: which are waiting for a worker, and what came of others."""

    requests: Sequence[WorkRequest]
    waiting: deque[int]  # numbers of requests
    results: dict[int, WorkReply | Failure] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    alone: set[int] = field(default_factory=set)  # done again because the device was too small

    def retry_or_fail(
        self, requests: Iterable[WorkRequest], problem: WorkerProblem | None, code: int | None
    ) -> None:
        """Puts back the requests of a worker that died or hung.

        The first, on which it worked, fails if it was tried too often, or if it was late.
        """
        for position, request in enumerate(requests):
            self.tries[request.number] += position == 0
            is_late = position == 0 and problem is not None and problem.is_late
            if self.tries[request.number] < MAX_TRIES and not is_late:
                self.waiting.appendleft(request.number)
            else:
                reason = _describe_exit(code) if problem is None else problem.reason
                self.results[request.number] = Failure(request.client, reason)


class _CallbackError(BaseException):
    """An exception of ``on_progress``, which is no failure of the client at work."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem


def _sort_by_size(tasks: Sequence[Task], structure: Structure) -> list[int]:
    """Numbers of tasks, the largest first, so that no worker is left alone with one at the end."""
    sizes: dict[tuple[Subnet, ...], float] = {}
    for task in tasks:
        if task.subnets not in sizes:
            sizes[task.subnets] = sum(_estimate_size(s, structure) for s in task.subnets)
    return sorted(range(len(tasks)), key=lambda i: -sizes[tasks[i].subnets])


def _estimate_size(subnet: Subnet, structure: Structure) -> float:
    """A subnet's work as a part of that of the whole net, roughly."""
    kept = [
        structure.kept_count(subnet, g) / structure.groups[g].size for g in structure.cut_groups()
    ]
    width = sum(kept) / len(kept) if kept else 1.0
    return width * (1 - len(structure.dropped_tensors(subnet)) / max(len(structure.shapes), 1))


def _describe_exit(code: int | None) -> str:
    """Why the process of a task that was tried twice has ended."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its worker was ended by {name} twice{hint}"
    return f"its worker ended twice with exit code {code}"
