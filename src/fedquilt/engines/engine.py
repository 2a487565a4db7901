"""The interface of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from fedquilt.federation.client import Failure, Task, Update

OnProgress = Callable[[int, float], None]  # a client, and the part of its work that is done


def ignore_progress(client: int, done: float) -> None:
    """Does nothing with a report of progress."""


class Engine(Protocol):
    """Runs tasks, and yields the result of each lazily, in the order of the tasks.

    The order is part of the contract, because sums of floating-point numbers depend on it. The
    engine keeps the clients' states; a version for each client names the current one.

    ``on_progress`` may be set. An engine may call it from within ``run``, a few times a second at
    most for each client at work, and never after the client's result. Reports rise, unless the work
    was lost and is done again.

    ``train`` takes a function that makes an engine. This one notes what it runs:

    >>> import torch, fedquilt as fq
    >>> asked = []
    >>> class LoggingEngine(fq.LocalEngine):
    ...     def run(self, tasks, *, enough=None):
    ...         asked.extend(task.client for task in tasks)
    ...         return super().run(tasks, enough=enough)
    >>> def make_engine(setup, population, folder) -> fq.Engine:
    ...     data = {"train": population.train, "test": population.test}
    ...     return LoggingEngine(setup.model, setup.structure, data, workers=0, folder=folder)
    >>> inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    >>> clients = fq.make_clients((inputs, labels), count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, inputs[:1], "fedavg", clients, rounds=1, engine=make_engine)
    >>> asked
    [0, 1]
    """

    on_progress: OnProgress

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Runs the tasks.

        Args:
            tasks: What to do.
            enough: After this number of updates the engine need not wait for others.
        """
        ...

    def client_versions(self) -> Mapping[int, int]:
        """The version of each client's state."""
        ...

    def restore(self, versions: Mapping[int, int], *, after: Mapping[int, int] = {}) -> None:
        """Goes back to earlier states of clients; raises a CorruptFileError if one is damaged.

        Args:
            versions: The version of each client's state, as ``client_versions`` returned them.
            after: Versions that stay in use: new states get later ones. Without it, versions later
                than those restored are written over.
        """
        ...

    def remove_unused(self, *used: Mapping[int, int]) -> None:
        """Removes versions of clients' states that are not needed any more.

        Args:
            used: Versions that are still needed, as ``client_versions`` returned them.
        """
        ...

    def close(self) -> None:
        """Ends all workers."""
        ...
