"""The local engine: worker processes on this machine, one thread each.

Global tensors are written once a round to a file in shared memory, which every worker maps; a
worker takes its subnet from there. What comes back is a file as well, so that updates which are
early wait outside the server's memory. Without workers the same code does the work in this
process. Each process uses one thread, so the bits do not depend on the number of workers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from multiprocessing import connection
from pathlib import Path

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.devices import CPU
from fedquilt.engines.client_state import ClientStateStore, read_client_state, write_client_state
from fedquilt.engines.client_work import run_stack
from fedquilt.engines.dispatch import TaskQueue
from fedquilt.engines.engine import OnProgress, ignore_progress
from fedquilt.engines.processes import ProcessInput
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.engines.stacks import (
    ClientsPerPass,
    ListStacks,
    PassSizes,
    list_no_stacks,
    plan_stacks,
)
from fedquilt.engines.worker import (
    Timeouts,
    Worker,
    WorkReply,
    WorkRequest,
)
from fedquilt.errors import DeviceMemoryError, describe_exception
from fedquilt.federation import flat_tensors
from fedquilt.federation.client import ClientResult, Failure, Task, Update
from fedquilt.federation.threads import single_thread
from fedquilt.files import save_tensors
from fedquilt.learning.task import CLASSIFICATION, LearningTask
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext

Data = Mapping[str, Mapping[int, ClientData]]  # split -> client -> examples
SHARED_MEMORY = Path("/dev/shm")  # of Linux; elsewhere files take its place
NUM_ESTIMATES = 256  # subnets whose sizes are kept


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
        clients_per_pass: How many clients with subnets of one shape a process trains in one pass;
            ``"auto"``: a short trial decides for each size of subnets. Or the ``passes.json`` of
            another run.

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
        clients_per_pass: ClientsPerPass = 1,
    ) -> None:
        self.pass_sizes = PassSizes(clients_per_pass)
        self._scratch = ScratchDirectory()
        secrets = self._scratch.folder / "secrets"
        contexts: Sequence[ClientContext] = [
            ClientContext(model, structure, data, device, task, secrets=secrets)
            for device in devices
        ]
        self._context = contexts[0]
        self._memory = ScratchDirectory(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else self._scratch
        self._states = ClientStateStore(folder or self._scratch.folder / "clients")
        self._timeouts = timeouts or Timeouts()
        given = ProcessInput(contexts, self._scratch.make_path("input-"), "the model and the data")
        self.on_progress: OnProgress = ignore_progress
        self._workers: list[Worker] = []
        try:
            for position in range(workers * len(contexts)):
                number = position % len(contexts)
                pulse = self._memory.make_path("pulse-")
                self._workers.append(Worker(given, number, self._timeouts, pulse))
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> torch.device:
        """The first of the devices that clients train on; all are of one kind."""
        return self._context.device

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Does all tasks; yields their results in order."""
        structure = self._context.structure
        list_stacks = plan_stacks(tasks, structure, self.pass_sizes, self._run_in_passes)
        yield from self._run_in_passes(tasks, list_stacks)

    def _run_in_passes(
        self, tasks: Sequence[Task], list_stacks: ListStacks = list_no_stacks
    ) -> Iterator[Update | Failure]:
        if self._workers:
            with single_thread():  # the cores are for the workers
                yield from self._run_in_workers(tasks, list_stacks)
            return
        by_first: dict[int, tuple[int, ...]] = {}
        results: dict[int, Update | Failure] = {}
        for number in range(len(tasks)):
            by_first |= {stack[0]: stack for stack in list_stacks(number)}
            if number not in results:
                stack = by_first.pop(number, (number,))
                results |= zip(stack, self._run_here([tasks[i] for i in stack]), strict=True)
            yield results.pop(number)

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

    def _run_here(self, tasks: Sequence[Task]) -> list[Update | Failure]:
        """Does tasks in one pass, in this process."""

        def on_progress(client: int, done: float) -> None:
            try:
                self.on_progress(client, done)
            except Exception as problem:
                raise _CallbackError(problem) from problem

        with single_thread():
            try:
                paths = [self._states.current_path(task.client) for task in tasks]
                before = [partial(read_client_state, path) for path in paths]
                results = run_stack(tasks, self._context, before, on_progress)
            except Exception as problem:
                results = [problem] * len(tasks)
            except _CallbackError as error:
                raise error.problem from None
            return [self._take(t, result) for t, result in zip(tasks, results, strict=True)]

    def _take(self, task: Task, result: ClientResult | Exception) -> Update | Failure:
        """The update of a result, whose state is stored."""
        try:
            if isinstance(result, Exception):
                raise result
            if result.state is not None:
                write_client_state(self._states.next_path(task.client), result.state)
        except DeviceMemoryError as problem:
            return Failure(task.client, str(problem))
        except Exception as problem:
            return Failure(task.client, describe_exception(problem))
        if result.state is not None:
            self._states.advance(task.client)
        return result.update

    def _run_in_workers(
        self, tasks: Sequence[Task], list_stacks: ListStacks
    ) -> Iterator[Update | Failure]:
        @lru_cache(maxsize=NUM_ESTIMATES)
        def estimate(subnets: tuple[Subnet, ...]) -> float:
            return sum(_estimate_size(s, self._context.structure) for s in subnets)

        def estimate_size(number: int) -> float:
            return estimate(tasks[number].subnets)

        queue = TaskQueue(len(tasks), estimate_size, len(self._workers), list_stacks)
        with _ParamFiles(self._memory, self._scratch) as files:
            try:
                for number in range(len(tasks)):
                    while not queue.has_result(number):
                        self._assign_requests(queue, tasks, files)
                        self._await_messages(queue)
                    self._assign_requests(queue, tasks, files)
                    request, reply = queue.pop_result(number)
                    files.release(request.params)
                    yield self._read_update(request, reply)
            finally:
                self._drop_unfinished(queue.requests.values())

    def _make_request(
        self, number: int, task: Task, params: Path, stack: tuple[int, ...]
    ) -> WorkRequest:
        return WorkRequest(
            number,
            task.client,
            task.subnets,
            task.recipe,
            task.seed,
            params,
            self._states.current_path(task.client),
            self._states.next_path(task.client),
            self._scratch.make_path("update-"),
            stack if len(stack) > 1 else (),
        )

    def _assign_requests(self, queue: TaskQueue, tasks: Sequence[Task], files: _ParamFiles) -> None:
        """Gives every worker a request, and a second one while many are waiting."""
        for ahead in (1, 2) if queue.num_waiting else ():
            for worker in self._workers:
                many = queue.num_waiting > 2 * len(self._workers)
                if queue.num_waiting and worker.num_passes < ahead and (ahead == 1 or many):
                    stack = queue.find_stack(queue.take_next())
                    for number in stack:
                        if number not in queue.requests:
                            task = tasks[number]
                            queue.requests[number] = self._make_request(
                                number, task, files.take_path(task), stack
                            )
                    worker.send(*(queue.requests[number] for number in stack))

    def _await_messages(self, queue: TaskQueue) -> None:
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
                        queue.add_result(message.number, message)
                    continue
                if message is not None and worker.is_working_on(message.number):
                    self.on_progress(queue.requests[message.number].client, message.done)
                has_died = message is None
            if problem is not None or has_died:
                requests, code = self._replace_worker(worker)
                queue.retry_or_fail(requests, problem, code)

    def _redo(self, worker: Worker, queue: TaskQueue, number: int) -> bool:
        """Puts back a task that was too large for its device, with fewer clients at a time on it.

        The worker ends, unless it is the last one of its device. False if the task was tried alone.
        """
        device = worker.context.device
        if sum(other.context.device == device for other in self._workers) > 1:
            worker.terminate()
            self._workers = [other for other in self._workers if other is not worker]
            queue.put_back_requests(worker.requests)
            queue.take_out(number)
            return True
        return queue.put_back_alone(number)  # others may have been there when it failed

    def _replace_worker(self, worker: Worker) -> tuple[deque[WorkRequest], int | None]:
        """Starts a worker's process anew; the requests that it had, and its exit code."""
        code = worker.replace()
        requests, worker.requests = worker.requests, deque()
        return requests, code

    def _read_update(self, request: WorkRequest, reply: WorkReply | Failure) -> Update | Failure:
        """The update of a reply, whose tensors are in a file."""
        if isinstance(reply, Failure) or reply.problem is not None:
            for path in request.files:
                path.unlink(missing_ok=True)
            if isinstance(reply, Failure):
                return reply
            return Failure(request.client, str(reply.problem))
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

    def _drop_unfinished(self, requests: Iterable[WorkRequest]) -> None:
        """Restarts workers that are still busy, because the round was left early; removes files."""
        for worker in self._workers:
            if worker.requests:
                self._replace_worker(worker)
        for path in (path for request in requests for path in request.files):
            path.unlink(missing_ok=True)


class _CallbackError(BaseException):
    """An exception of ``on_progress``, which is no failure of the client at work."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem


def _estimate_size(subnet: Subnet, structure: Structure) -> float:
    """A subnet's work as a part of that of the whole net, roughly."""
    kept = [
        structure.kept_count(subnet, g) / structure.groups[g].size for g in structure.cut_groups()
    ]
    width = sum(kept) / len(kept) if kept else 1.0
    return width * (1 - len(structure.dropped_tensors(subnet)) / max(len(structure.shapes), 1))


class _ParamFiles:
    """Files with the tasks' global tensors, in shared memory where there is enough of it.

    A file is written when the first of its tasks is begun, and removed when none of those that were
    begun is left to be merged.
    """

    def __init__(self, memory: ScratchDirectory, disk: ScratchDirectory) -> None:
        self._memory, self._disk = memory, disk
        self._files: dict[int, tuple[Path, Mapping[str, Tensor]]] = {}  # by the ids of the tensors
        self._num_waiting: Counter[Path] = Counter()

    def __enter__(self) -> _ParamFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._num_waiting:
            path.unlink(missing_ok=True)

    def take_path(self, task: Task) -> Path:
        """The file with the global tensors of a task that is begun."""
        path, _ = self._files.get(id(task.params)) or self._write(task.params)
        self._num_waiting[path] += 1
        return path

    def release(self, path: Path) -> None:
        """Notes that a task whose tensors are in a file is merged."""
        self._num_waiting[path] -= 1
        if not self._num_waiting[path]:
            del self._num_waiting[path]
            self._files = {key: file for key, file in self._files.items() if file[0] != path}
            path.unlink(missing_ok=True)

    def _write(self, params: Mapping[str, Tensor]) -> tuple[Path, Mapping[str, Tensor]]:
        size = sum(tensor.nbytes for tensor in params.values())
        scratch = self._memory if self._memory.has_room(size) else self._disk
        path = scratch.make_path("params-", ".safetensors")
        save_tensors(path, params)
        self._files[id(params)] = path, params  # kept, so that their id is not used again
        return self._files[id(params)]
