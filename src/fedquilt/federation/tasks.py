"""The tasks of a round, planned while it runs.

Ten thousand tasks are ten thousand recipes. An engine needs those of a window only, so a task is
made when it is asked for, and forgotten when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedquilt.federation.client import Client, Task
from fedquilt.federation.columns import Column

NUM_READY = 256  # tasks that stay ready, since several parts of a round ask for the same ones


class LazyTasks(Column[Task]):
    """A sequence of tasks, each of which is made when it is asked for.

    Args:
        count: The number of tasks.
        make: Makes the task of a row; the same one, whenever it is called.

    >>> import fedquilt as fq
    >>> recipe = fq.LocalSGD(fq.LocalTraining(), lr=0.1)
    >>> tasks = LazyTasks(1000, lambda row: Task(row, (fq.Subnet(),), {}, recipe, seed=row))
    >>> len(tasks), tasks[999].client
    (1000, 999)
    """

    def __init__(self, count: int, make: Callable[[int], Task]) -> None:
        self._count, self._make = count, make
        self._ready: dict[int, Task] = {}

    def __len__(self) -> int:
        return self._count

    def _get(self, row: int) -> Task:
        task = self._ready.get(row)
        if task is None:
            task = self._ready[row] = self._make(row)
            if len(self._ready) > NUM_READY:
                del self._ready[next(iter(self._ready))]
        return task


def plan_each(cohort: Sequence[Client], plan: Callable[[Client], Task]) -> LazyTasks:
    """One task for each client of a cohort.

    Args:
        cohort: The clients, in order.
        plan: Makes a client's task; the same one, whenever it is called.
    """
    return LazyTasks(len(cohort), lambda row: plan(cohort[row]))


def map_tasks(change: Callable[[Task], Task], tasks: Sequence[Task]) -> LazyTasks:
    """The tasks, each changed when it is asked for."""
    return LazyTasks(len(tasks), lambda row: change(tasks[row]))
