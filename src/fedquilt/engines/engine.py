"""What every engine offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from fedquilt.federation.client import Failure, Task, Update


class Engine(Protocol):
    """Takes tasks, yields what came of each, in the order of the tasks and lazily.

    Order is part of the contract, because sums of floating-point numbers depend on it. What clients
    keep between rounds is known by a version for each client; the files behind it are the engine's.
    """

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Failure]:
        """Does the tasks."""
        ...

    def kept(self) -> Mapping[int, int]:
        """The version of what each client keeps."""
        ...

    def restore(self, kept: Mapping[int, int]) -> None:
        """Goes back to these versions."""
        ...

    def forget_others(self, *used: Mapping[int, int]) -> None:
        """Removes what clients kept in versions that none of these uses."""
        ...

    def close(self) -> None:
        """Ends all workers."""
        ...
