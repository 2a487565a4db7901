"""Which task a worker gets next: in the order of the tasks, the largest first within a window.

Results are merged in the order of the tasks, so one that is early waits. A window bounds how many
do: no task is begun that lies further than that behind the first that is not merged. Within it the
largest is begun first, so that no worker is left alone with a large one at the end of a round.
"""

from __future__ import annotations

import heapq
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable

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
    """

    def __init__(self, count: int, estimate_size: Callable[[int], float], num_workers: int) -> None:
        self._count, self._estimate_size = count, estimate_size
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

    def put_back(self, numbers: Iterable[int]) -> None:
        """Lets tasks be begun again, in this order and before all others."""
        self._again.extendleft(reversed(list(numbers)))

    def put_back_alone(self, number: int) -> bool:
        """Lets a task be begun again, once; False if that was done before."""
        if number in self._alone:
            return False
        self._alone.add(number)
        self.put_back([number])
        return True

    def has_result(self, number: int) -> bool:
        """Whether the result of a task has come."""
        return number in self._results

    def add_result(self, number: int, result: WorkReply | Failure) -> None:
        """Takes the result of a task, which waits until it is merged."""
        self._results[number] = result

    def pop_result(self, number: int) -> tuple[WorkRequest, WorkReply | Failure]:
        """A task that is merged now, and its result; the window moves on."""
        self._num_merged += 1
        self._move_window()
        return self.requests.pop(number), self._results.pop(number)

    def retry_or_fail(
        self, requests: Iterable[WorkRequest], problem: WorkerProblem | None, code: int | None
    ) -> None:
        """Puts back the requests of a worker that died or hung.

        The first, on which it worked, fails if it was tried too often, or if it was late.
        """
        for position, request in enumerate(requests):
            self._tries[request.number] += position == 0
            is_late = position == 0 and problem is not None and problem.is_late
            if self._tries[request.number] < MAX_TRIES and not is_late:
                self.put_back([request.number])
            else:
                reason = _describe_exit(code) if problem is None else problem.reason
                self.add_result(request.number, Failure(request.client, reason))

    def _move_window(self) -> None:
        while self._num_entered < min(self._num_merged + self._window, self._count):
            number = self._num_entered
            heapq.heappush(self._waiting, (-self._estimate_size(number), number))
            self._num_entered += 1


def _describe_exit(code: int | None) -> str:
    """Why the process of a task that was tried twice has ended."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its worker was ended by {name} twice{hint}"
    return f"its worker ended twice with exit code {code}"
