"""Which task a worker gets next: in the order of the tasks, the largest first within a window.

Results are merged in the order of the tasks, so one that is early waits. A window bounds how many
do: no task is begun that lies further than that behind the first that is not merged. Within it the
largest is begun first, so that no worker is left alone with a large one at the end of a round.
"""

from __future__ import annotations

import heapq
import itertools
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fedquilt.engines.stacks import ListStacks, list_no_stacks
from fedquilt.engines.worker import WorkerProblem, WorkReply, WorkRequest
from fedquilt.federation.client import Failure

TASKS_PER_WORKER = 32  # in the window; a large task takes about as long as this many small ones
MAX_TRIES = 2  # a task whose worker died or hung is done once more


class TaskQueue:
    """The tasks of a round by their numbers: which are waiting, and what came of others.

    Args:
        count: The number of tasks.
        estimate_size: How large a task is.
        num_workers: The number of workers at the start of the round.
        list_stacks: Lists tasks that are done in one pass; the first of them stands for all.
    """

    def __init__(
        self,
        count: int,
        estimate_size: Callable[[int], float],
        num_workers: int,
        list_stacks: ListStacks = list_no_stacks,
    ) -> None:
        self._count, self._estimate_size = count, estimate_size
        self._list_stacks = list_stacks
        self._stacks: dict[int, tuple[int, ...]] = {}  # by their first tasks, of tasks that entered
        self._followers: set[int] = set()
        self._window = TASKS_PER_WORKER * num_workers
        self._num_merged = self._num_entered = 0
        self._waiting: list[tuple[float, int]] = []  # a heap: the largest first
        self._again: deque[int] = deque()  # tasks that come before all others
        self._tries: Counter[int] = Counter()
        self._alone: set[int] = set()  # done again because the device was too small
        self._results: dict[int, WorkReply | Failure] = {}
        self.requests: dict[int, WorkRequest] = {}  # that were sent, and are not merged
        self._move_window()

    @property
    def num_waiting(self) -> int:
        """The number of tasks that a worker may begin now."""
        return len(self._again) + len(self._waiting)

    def take_next(self) -> int:
        """The task to begin now; only if one is waiting."""
        return self._again.popleft() if self._again else heapq.heappop(self._waiting)[1]

    def find_stack(self, number: int) -> tuple[int, ...]:
        """All tasks that are done in one pass with a task that was taken; itself, if none is."""
        return self._stacks.get(number, (number,))

    def put_back(self, numbers: Iterable[int]) -> None:
        """Lets tasks be begun again, in this order and before all others."""
        self._again.extendleft(reversed(list(numbers)))

    def put_back_alone(self, number: int) -> bool:
        """Lets a task be begun again, once; False if that was done before."""
        if number in self._alone:
            return False
        self._alone.add(number)
        self.take_out(number)
        return True

    def take_out(self, number: int) -> None:
        """Lets a task be begun again, by itself and before all others."""
        if number in self.requests:
            self.requests[number] = replace(self.requests[number], stack=())
        self._stacks.pop(number, None)
        self.put_back([number])

    def has_result(self, number: int) -> bool:
        """Whether the result of a task has come."""
        return number in self._results

    def add_result(self, number: int, result: WorkReply | Failure) -> None:
        """Takes the result of a task, which waits until it is merged."""
        self._results[number] = result

    def pop_result(self, number: int) -> tuple[WorkRequest, WorkReply | Failure]:
        """A task that is merged now, and its result; the window moves on."""
        self._num_merged += 1
        self._stacks.pop(number, None)
        self._followers.discard(number)
        self._move_window()
        return self.requests.pop(number), self._results.pop(number)

    def retry_or_fail(
        self, requests: Iterable[WorkRequest], problem: WorkerProblem | None, code: int | None
    ) -> None:
        """Puts back the requests of a worker that died or hung.

        The first, on which it worked, fails if it was tried too often, or if it was late. Clients
        of one pass are then tried once more, each alone.
        """
        for position, requests_of_pass in enumerate(self._divide(requests)):
            first = requests_of_pass[0]
            self._tries[first.number] += position == 0
            is_late = position == 0 and problem is not None and problem.is_late
            if self._tries[first.number] < MAX_TRIES and not is_late:
                self.put_back_requests(requests_of_pass)
            elif first.stack:
                self._split(requests_of_pass)
            else:
                reason = _describe_exit(code) if problem is None else problem.reason
                self.add_result(first.number, Failure(first.client, reason))

    def put_back_requests(self, requests: Iterable[WorkRequest]) -> None:
        """Lets what a worker has not answered be begun again; in one pass if it was so."""
        for same in reversed(self._divide(requests)):
            if len(same) == max(len(same[0].stack), 1):
                self.put_back([same[0].number])
            else:  # others of the pass were answered
                self._split(same)

    def _split(self, requests: Sequence[WorkRequest]) -> None:
        """Lets tasks of one pass be begun again, each alone and once."""
        self._stacks.pop(requests[0].stack[0], None)
        for request in requests:
            self.requests[request.number] = replace(request, stack=())
            self._tries[request.number] = MAX_TRIES - 1
        self.put_back([request.number for request in requests])

    @staticmethod
    def _divide(requests: Iterable[WorkRequest]) -> list[list[WorkRequest]]:
        """Requests by the pass that they are done in, in their order."""
        passes = itertools.groupby(requests, key=lambda request: request.stack or request.number)
        return [list(same) for _, same in passes]

    def _move_window(self) -> None:
        while self._num_entered < min(self._num_merged + self._window, self._count):
            number = self._num_entered
            for stack in self._list_stacks(number):
                self._stacks[stack[0]] = stack
                self._followers.update(stack[1:])
            if number not in self._followers:
                size = sum(map(self._estimate_size, self.find_stack(number)))
                heapq.heappush(self._waiting, (-size, number))
            self._num_entered += 1


def _describe_exit(code: int | None) -> str:
    """Why the process of a task that was tried twice has ended."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its worker was ended by {name} twice{hint}"
    return f"its worker ended twice with exit code {code}"
